"""Wan's layouts: the original one of Wan 2.1 and 2.2, and that of the released MHLA code for Wan."""

import math
from collections.abc import Callable, Collection, Mapping

import torch

from ..attention import GATE_SHIFT
from .checkpoints import (
    CONVOLUTION_TO_MATRIX,
    Change,
    Layout,
    Rule,
    compressed,
    layer_count,
    pattern,
    rules,
    shape_of,
)
from .options import check_block_grid

__all__ = ["WAN", "WAN_MHLA"]

Shapes = Mapping[str, tuple[int, ...]]

HEAD_DIM = 128  # of every published Wan
RELEASED_GRID = (3, 5, 10)
SELF, CROSS = "blocks.{i}.self_attn", "blocks.{i}.cross_attn"
MIXING = f"{SELF}.block_attn.conv.weight"
GATE = f"{SELF}.g.weight"
NORM_OUT = f"{SELF}.g_norm.weight"
NORM_PROJECTED = f"{SELF}.out_rmsnorm.weight"
LOCAL_CONV = f"{SELF}.lepe.weight"

# Ours is SiLU(g(x) + shift), which is neutral at zero; the released code has SiLU(g(x)).
SHIFTED = Change(f"minus {GATE_SHIFT}", lambda bias: (bias.float() - GATE_SHIFT).to(bias.dtype))


def attention_rules(theirs: str, ours: str) -> dict[str, str]:
    names = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
    return {f"{theirs}.{old}.{{p}}": f"blocks.{{i}}.{ours}.{new}.{{p}}" for old, new in names.items()} | {
        f"{theirs}.norm_{x}.weight": f"blocks.{{i}}.{ours}.norm_{x}.weight" for x in "qk"
    }


EMBEDDER = "condition_embedder"
WAN_RULES = rules(
    {
        "patch_embedding.{p}": "patch_embedding.{p}",
        **{
            f"text_embedding.{n}.{{p}}": f"{EMBEDDER}.text_embedder.linear_{n // 2 + 1}.{{p}}" for n in (0, 2)
        },
        **{
            f"time_embedding.{n}.{{p}}": f"{EMBEDDER}.time_embedder.linear_{n // 2 + 1}.{{p}}" for n in (0, 2)
        },
        "time_projection.1.{p}": f"{EMBEDDER}.time_proj.{{p}}",
        **attention_rules(SELF, "attn1"),
        **attention_rules(CROSS, "attn2"),
        "blocks.{i}.modulation": "blocks.{i}.scale_shift_table",
        # The norm before the cross-attention, which the original code numbers last.
        "blocks.{i}.norm3.{p}": "blocks.{i}.norm2.{p}",
        "blocks.{i}.ffn.0.{p}": "blocks.{i}.ffn.net.0.proj.{p}",
        "blocks.{i}.ffn.2.{p}": "blocks.{i}.ffn.net.2.{p}",
        "head.modulation": "scale_shift_table",
        "head.head.{p}": "proj_out.{p}",
        # Image to video: the frame's embedding, and its keys and values in the cross-attention.
        "img_emb.proj.0.{p}": f"{EMBEDDER}.image_embedder.norm1.{{p}}",
        "img_emb.proj.1.{p}": f"{EMBEDDER}.image_embedder.ff.net.0.proj.{{p}}",
        "img_emb.proj.3.{p}": f"{EMBEDDER}.image_embedder.ff.net.2.{{p}}",
        "img_emb.proj.4.{p}": f"{EMBEDDER}.image_embedder.norm2.{{p}}",
        "img_emb.emb_pos": f"{EMBEDDER}.image_embedder.pos_embed",
        f"{CROSS}.k_img.{{p}}": "blocks.{i}.attn2.add_k_proj.{p}",
        f"{CROSS}.v_img.{{p}}": "blocks.{i}.attn2.add_v_proj.{p}",
        f"{CROSS}.norm_k_img.weight": "blocks.{i}.attn2.norm_added_k.weight",
    }
)
MHLA_RULES = (
    Rule(MIXING, ("blocks.{i}.attn1.mixing.weight",), CONVOLUTION_TO_MATRIX),
    Rule(GATE, ("blocks.{i}.attn1.to_gate.weight",)),
    Rule(f"{SELF}.g.bias", ("blocks.{i}.attn1.to_gate.bias",), SHIFTED),
    Rule(NORM_OUT, ("blocks.{i}.attn1.norm_out.weight",)),
    Rule(NORM_PROJECTED, ("blocks.{i}.attn1.norm_projected.weight",)),
    Rule(f"{SELF}.lepe.{{p}}", ("blocks.{i}.attn1.local_conv.{p}",)),
)


def wan_config(shapes: Shapes, read: Callable[[str], torch.Tensor], given: Mapping) -> dict:
    return read_wan(shapes, given, layer_count(WAN, shapes))


def read_wan(shapes: Shapes, given: Mapping, layers: int) -> dict:
    width, channels, *patch = shape_of(shapes, "patch_embedding.weight")
    head_dim = given.get("attention_head_dim", HEAD_DIM)
    heads = given.get("num_attention_heads", width // head_dim)
    if heads * head_dim != width:
        raise ValueError(
            f"a width of {width} does not divide into heads of {head_dim} channels, as every published Wan has them: "
            'give {"num_attention_heads": ..., "attention_head_dim": ...} in a JSON file with --config FILE'
        )
    image_keys = shapes.get("blocks.0.cross_attn.k_img.weight")
    image_norm, image_positions = shapes.get("img_emb.proj.0.weight"), shapes.get("img_emb.emb_pos")
    return {
        "patch_size": list(patch),
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "in_channels": channels,
        "out_channels": shape_of(shapes, "head.head.weight")[0] // math.prod(patch),
        "text_dim": shape_of(shapes, "text_embedding.0.weight")[1],
        "freq_dim": shape_of(shapes, "time_embedding.0.weight")[1],
        "ffn_dim": shape_of(shapes, "blocks.0.ffn.0.weight")[0],
        "num_layers": layers,
        "cross_attn_norm": "blocks.0.norm3.weight" in shapes,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None if image_norm is None else image_norm[0],
        "added_kv_proj_dim": None if image_keys is None else image_keys[1],
        "pos_embed_seq_len": None if image_positions is None else image_positions[1],
    }


def layers_with(text: str, keys: Collection[str]) -> dict[int, str]:
    """The layers that have a key, and that key."""
    found = ((pattern(text).fullmatch(key), key) for key in keys)
    return dict(sorted((int(match["i"]), key) for match, key in found if match))


def mhla_config(shapes: Shapes, read: Callable[[str], torch.Tensor], given: Mapping) -> dict:
    """What the keys tell of the released classes' options; the normaliser, which they do not tell, is off there."""
    layers = layer_count(WAN_MHLA, shapes)
    chosen = layers_with(MIXING, shapes)
    base = read_wan(shapes, given, layers)
    width = base["num_attention_heads"] * base["attention_head_dim"]

    def shape_in_all(text: str) -> tuple[int, ...] | None:
        found = layers_with(text, shapes)
        if found and found.keys() != chosen.keys():
            odd = sorted(found.keys() ^ chosen.keys())
            raise ValueError(
                f"{compressed(found.values())} and {compressed(chosen.values())} are not in the same layers (layer "
                f"{odd[0]} has one of them only): the checkpoint is not complete"
            )
        kinds = {tuple(shapes[key]) for key in found.values()}
        if len(kinds) > 1:
            raise ValueError(f"{compressed(found.values())} differ in shape: {sorted(kinds)}")
        return next(iter(kinds), None)

    norm = shape_in_all(NORM_OUT)
    if norm is not None and norm[0] not in (base["attention_head_dim"], width):
        raise ValueError(
            f"{compressed(layers_with(NORM_OUT, shapes).values())} has {norm[0]} weights: known are norms of each head "
            f"({base['attention_head_dim']}) and over all heads ({width})"
        )
    gated = shape_in_all(GATE) is not None
    if gated and norm is None:
        raise ValueError(
            f"the checkpoint has gates ({compressed(layers_with(GATE, shapes).values())}) but no norm of the output "
            "(g_norm), which every released class with a gate has: it is not complete"
        )
    mixing = shape_in_all(MIXING)
    if mixing[0] != mixing[1]:
        raise ValueError(
            f"{compressed(chosen.values())} has the shape {mixing}: known are as many blocks of queries as of keys"
        )
    convolution = shape_in_all(LOCAL_CONV)
    return base | {
        "mhla_layers": None if len(chosen) == layers else list(chosen),
        "mhla_block_grid": list(released_grid(mixing[0], given.get("mhla_block_grid"))),
        "mhla_normalizer": "none",
        "mhla_feature_eps": 1e-6,
        "mhla_gate": gated,
        "mhla_local_conv": None if convolution is None else convolution[-1],
        "mhla_norm_out": norm is not None,
        "mhla_norm_across_heads": norm is not None and norm[0] != base["attention_head_dim"],
        "mhla_norm_projected": shape_in_all(NORM_PROJECTED) is not None,
        "mhla_mixing_normalization": "column",
    }


def released_grid(blocks: int, given) -> tuple[int, ...]:
    """Blocks per axis of a matrix of that many blocks: the given ones if they are as many, or the released layout."""
    if given is not None and math.prod(check_block_grid(given, axes=3)) == blocks:
        return tuple(given)
    if math.prod(RELEASED_GRID) == blocks:
        return RELEASED_GRID
    raise ValueError(
        f"the checkpoint mixes {blocks} blocks, which does not tell how many there are on each axis "
        f"(the released layout {RELEASED_GRID} has {math.prod(RELEASED_GRID)}): give --block-grid FRAMES,ROWS,COLUMNS "
        f"whose product is {blocks}"
    )


MARKS = ("blocks.{i}.self_attn.q.weight", "blocks.{i}.modulation", "head.modulation")
WAN = Layout(
    name="wan",
    title="the original Wan layout",
    model="WanTransformer3DModel",
    rules=WAN_RULES,
    marks=MARKS,
    foreign=(MIXING,),
    read_config=wan_config,
)
WAN_MHLA = Layout(
    name="wan-mhla",
    title="the released MHLA-Wan layout",
    model="MHLAWanTransformer3DModel",
    rules=WAN_RULES + MHLA_RULES,
    marks=(*MARKS, MIXING),
    read_config=mhla_config,
)
