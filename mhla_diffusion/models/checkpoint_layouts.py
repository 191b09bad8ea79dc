"""The layouts that `checkpoints.py` reads: DiT, SANA's three, the released MHLA code for DiT, and Wan's two.

To add one, write its rules and a function that reads the model's arguments off the shapes, and list it in
`LAYOUTS`.
"""

import math
from collections.abc import Callable, Collection, Mapping

import torch

from .checkpoints import (
    CONVOLUTION_TO_MATRIX,
    Layout,
    Rule,
    any_match,
    layer_count,
    pattern,
    rules,
    shape_of,
)
from .dit_presets import DIT_WIDTHS
from .sana_presets import SANA_MODELS
from .sana_video_presets import SANA_VIDEO_MODELS, SANA_VIDEO_WIDTH
from .wan_layouts import WAN, WAN_MHLA

__all__ = ["LAYOUTS", "LAYOUT_NAMES", "find_layout"]

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[str], torch.Tensor]

# Width of the published DiT models (S, B, L, XL) -> heads; the shapes alone cannot tell.
DIT_HEADS = {
    preset["num_attention_heads"] * preset["attention_head_dim"]: preset["num_attention_heads"]
    for preset in DIT_WIDTHS.values()
}
SANA_HEADS = {
    preset["cross_attention_dim"]: {name: preset[name] for name in preset if "head" in name}
    for preset in SANA_MODELS.values()
}
SANA_VIDEO_HEADS = {
    SANA_VIDEO_WIDTH["cross_attention_dim"]: {
        name: size for name, size in SANA_VIDEO_WIDTH.items() if "head" in name
    }
}


def query_key_value(end: str) -> tuple[str, ...]:
    return tuple(f"transformer_blocks.{{i}}.attn1.to_{x}.{end}" for x in "qkv")


DIT_BODY = rules(
    {
        "x_embedder.proj.{p}": "pos_embed.proj.{p}",
        "t_embedder.mlp.0.{p}": "transformer_blocks.{all}.norm1.emb.timestep_embedder.linear_1.{p}",
        "t_embedder.mlp.2.{p}": "transformer_blocks.{all}.norm1.emb.timestep_embedder.linear_2.{p}",
        "y_embedder.embedding_table.weight": "transformer_blocks.{all}.norm1.emb.class_embedder.embedding_table.weight",
        "blocks.{i}.adaLN_modulation.1.{p}": "transformer_blocks.{i}.norm1.linear.{p}",
        "blocks.{i}.mlp.fc1.{p}": "transformer_blocks.{i}.ff.net.0.proj.{p}",
        "blocks.{i}.mlp.fc2.{p}": "transformer_blocks.{i}.ff.net.2.{p}",
        "final_layer.adaLN_modulation.1.{p}": "proj_out_1.{p}",
        "final_layer.linear.{p}": "proj_out_2.{p}",
    }
)
DIT_SOFTMAX = rules(
    {
        "blocks.{i}.attn.qkv.{p}": query_key_value("{p}"),
        "blocks.{i}.attn.proj.{p}": "transformer_blocks.{i}.attn1.to_out.0.{p}",
    }
)
DIT_OFFICIAL = rules(
    {
        "blocks.{i}.attn.norm.{p}": "transformer_blocks.{i}.attn1.norm_in.{p}",
        "blocks.{i}.attn.to_qkv.{p}": query_key_value("{p}"),
        "blocks.{i}.attn.lepe.{p}": "transformer_blocks.{i}.attn1.local_conv.{p}",
        "blocks.{i}.attn.to_out.0.{p}": "transformer_blocks.{i}.attn1.to_out.0.{p}",
    }
) + (
    Rule(
        "blocks.{i}.attn.piece_attn.conv.weight",
        ("transformer_blocks.{i}.attn1.mixing.weight",),
        CONVOLUTION_TO_MATRIX,
    ),
)


def sana_rules(time: str, guidance: str | None, patches: str = "patch_embed.proj") -> tuple[Rule, ...]:
    """SANA's rules; `time`, `guidance` and `patches` are where the embedders are: Sprint and the video model differ."""
    embedders = {f"t_embedder.mlp.{n}.{{p}}": f"{time}.linear_{n // 2 + 1}.{{p}}" for n in (0, 2)}
    if guidance is not None:
        embedders |= {f"cfg_embedder.mlp.{n}.{{p}}": f"{guidance}.linear_{n // 2 + 1}.{{p}}" for n in (0, 2)}
    block = "transformer_blocks.{i}"
    return rules(
        {
            "x_embedder.proj.{p}": f"{patches}.{{p}}",
            **embedders,
            "t_block.1.{p}": "time_embed.linear.{p}",
            "y_embedder.y_proj.fc1.{p}": "caption_projection.linear_1.{p}",
            "y_embedder.y_proj.fc2.{p}": "caption_projection.linear_2.{p}",
            "attention_y_norm.weight": "caption_norm.weight",
            "blocks.{i}.scale_shift_table": f"{block}.scale_shift_table",
            "blocks.{i}.attn.qkv.{p}": query_key_value("{p}"),
            "blocks.{i}.attn.q_norm.weight": f"{block}.attn1.norm_q.weight",
            "blocks.{i}.attn.k_norm.weight": f"{block}.attn1.norm_k.weight",
            "blocks.{i}.attn.proj.{p}": f"{block}.attn1.to_out.0.{{p}}",
            "blocks.{i}.cross_attn.q_linear.{p}": f"{block}.attn2.to_q.{{p}}",
            "blocks.{i}.cross_attn.kv_linear.{p}": (f"{block}.attn2.to_k.{{p}}", f"{block}.attn2.to_v.{{p}}"),
            "blocks.{i}.cross_attn.q_norm.weight": f"{block}.attn2.norm_q.weight",
            "blocks.{i}.cross_attn.k_norm.weight": f"{block}.attn2.norm_k.weight",
            "blocks.{i}.cross_attn.proj.{p}": f"{block}.attn2.to_out.0.{{p}}",
            "blocks.{i}.mlp.inverted_conv.conv.{p}": f"{block}.ff.conv_inverted.{{p}}",
            "blocks.{i}.mlp.depth_conv.conv.{p}": f"{block}.ff.conv_depth.{{p}}",
            "blocks.{i}.mlp.point_conv.conv.weight": f"{block}.ff.conv_point.weight",
            "final_layer.linear.{p}": "proj_out.{p}",
            "final_layer.scale_shift_table": "scale_shift_table",
        }
    )


def side_of(shapes: Shapes, given: Mapping, patch: int, otherwise: int) -> int:
    """Latents per side that the position table is made for."""
    if "pos_embed" not in shapes:
        return given.get("sample_size", otherwise)
    tokens = shape_of(shapes, "pos_embed")[-2]
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise ValueError(
            f"pos_embed holds {tokens} positions, which form no square: such a model is not known"
        )
    return side * patch


def head_message(width: int, known: Mapping, fields: str) -> str:
    return (
        f"a width of {width} is none of the published ones ({', '.join(map(str, known))}), and the shapes do "
        f"not tell the number of heads: give {fields} in a JSON file with --config FILE"
    )


def read_dit(shapes: Shapes, given: Mapping, layers: int) -> dict:
    width, channels, patch, _ = shape_of(shapes, "x_embedder.proj.weight")
    heads = given.get("num_attention_heads", DIT_HEADS.get(width))
    if heads is None:
        raise ValueError(head_message(width, DIT_HEADS, '{"num_attention_heads": ...}'))
    if width % heads:
        raise ValueError(
            f"num_attention_heads={heads} does not divide the width {width}: give another number"
        )
    return {
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "in_channels": channels,
        "out_channels": shape_of(shapes, "final_layer.linear.weight")[0] // patch**2,
        "num_layers": layers,
        "sample_size": side_of(shapes, given, patch, 32),
        "patch_size": patch,
        # The last row is the null class.
        "num_embeds_ada_norm": shape_of(shapes, "y_embedder.embedding_table.weight")[0] - 1,
        "norm_eps": 1e-6,  # the original code's
    }


def dit_config(shapes: Shapes, read: Read, given: Mapping) -> dict:
    return read_dit(shapes, given, layer_count(DIT, shapes))


def official_config(shapes: Shapes, read: Read, given: Mapping) -> dict:
    """The released code's numerics: its denominator, epsilons of 1e-6, inner norm, and the original DiT's time
    frequencies, which Diffusers' DiT has shifted."""
    kernels = [
        shape[-1] for key, shape in shapes.items() if pattern("blocks.{i}.attn.lepe.weight").fullmatch(key)
    ]
    blocks = {shape[0] for key, shape in shapes.items() if pattern(MIXING_KEY).fullmatch(key)}
    side = math.isqrt(max(blocks))
    if len(blocks) > 1 or side * side not in blocks:
        raise ValueError(
            f"the checkpoint mixes {', '.join(map(str, sorted(blocks)))} blocks: its code knows square block "
            "grids, the same in each layer, such as 16 blocks (4, 4)"
        )
    return read_dit(shapes, given, layer_count(OFFICIAL, shapes)) | {
        "mhla_layers": None,
        "mhla_block_grid": [side, side],
        "mhla_normalizer": "official",
        "mhla_feature_eps": 1e-6,
        "mhla_denominator_eps": 1e-6,
        "mhla_local_conv": kernels[0] if kernels else None,
        "mhla_norm_in": any_match("blocks.{i}.attn.norm.weight", shapes),
        "mhla_mixing_normalization": "column",
        "mhla_time_shift": 0,
    }


def read_sana(shapes: Shapes, given: Mapping, patch: tuple[int, ...], known: Mapping[int, Mapping]) -> dict:
    """What SANA and SANA-Video tell alike; `known` has the heads by width."""
    width, channels = shape_of(shapes, "x_embedder.proj.weight")[:2]
    names = (
        "num_attention_heads",
        "attention_head_dim",
        "num_cross_attention_heads",
        "cross_attention_head_dim",
    )
    heads = {name: given[name] for name in names if name in given} or known.get(width)
    if heads is None or set(heads) != set(names):
        fields = "{" + ", ".join(f'"{name}": ...' for name in names) + "}"
        raise ValueError(head_message(width, known, fields))
    hidden = shape_of(shapes, "blocks.0.mlp.point_conv.conv.weight")[1]
    return dict(heads) | {
        "in_channels": channels,
        "out_channels": shape_of(shapes, "final_layer.linear.weight")[0] // math.prod(patch),
        "num_layers": layer_count(SANA, shapes),
        "cross_attention_dim": width,
        "caption_channels": shape_of(shapes, "y_embedder.y_proj.fc1.weight")[1],
        "mlp_ratio": hidden / width,
        "attention_bias": "blocks.0.attn.qkv.bias" in shapes,
        "qk_norm": "rms_norm_across_heads" if "blocks.0.attn.q_norm.weight" in shapes else None,
    }


def sana_config(shapes: Shapes, read: Read, given: Mapping) -> dict:
    patch = shape_of(shapes, "x_embedder.proj.weight")[2]
    return read_sana(shapes, given, (patch, patch), SANA_HEADS) | {
        "sample_size": side_of(shapes, given, patch, 32),
        "patch_size": patch,
        "interpolation_scale": position_scale(shapes, read, given),
        "guidance_embeds": "cfg_embedder.mlp.0.weight" in shapes,
    }


def sana_video_config(shapes: Shapes, read: Read, given: Mapping) -> dict:
    patch = tuple(shape_of(shapes, "x_embedder.proj.weight")[2:])
    # What the pipeline takes a model's trained sizes from; the published models differ in their patches.
    sizes = {tuple(preset["patch_size"]): preset["sample_size"] for preset in SANA_VIDEO_MODELS.values()}
    return read_sana(shapes, given, patch, SANA_VIDEO_HEADS) | {
        "patch_size": list(patch),
        "sample_size": given.get("sample_size", sizes.get(patch, 30)),
    }


def position_scale(shapes: Shapes, read: Read, given: Mapping) -> float | None:
    """How far SANA's position table is stretched; None for a table of zeros, which models up to 1K have."""
    if "interpolation_scale" in given or "pos_embed" not in shapes or shape_of(shapes, "pos_embed")[-2] < 2:
        return given.get("interpolation_scale")
    table = read("pos_embed")[0]
    if not table[:2].any():
        return None
    # The first channel of the second position is sin(1 / scale).
    sine = float(table[1, 0])
    return round(1 / math.asin(sine), 2) if 0 < sine < 1 else 1.0


MIXING_KEY = "blocks.{i}.attn.piece_attn.conv.weight"
QK_NORM_REFUSED = "queries and keys normalised inside the attention (qk_norm) are not supported"
UNUSED = "used in training only"
DIT = Layout(
    name="dit",
    title="the original DiT layout",
    model="DiTTransformer2DModel",
    rules=DIT_BODY + DIT_SOFTMAX,
    marks=(
        "blocks.{i}.attn.qkv.weight",
        "blocks.{i}.adaLN_modulation.1.weight",
        "y_embedder.embedding_table.weight",
    ),
    read_config=dit_config,
    positions="pos_embed",
)
OFFICIAL = Layout(
    name="official",
    title="the released MHLA-DiT layout",
    model="MHLADiTTransformer2DModel",
    rules=DIT_BODY + DIT_OFFICIAL,
    marks=("blocks.{i}.attn.to_qkv.weight", MIXING_KEY, "y_embedder.embedding_table.weight"),
    read_config=official_config,
    refused={
        "blocks.{i}.attn.q_norm.weight": QK_NORM_REFUSED,
        "blocks.{i}.attn.k_norm.weight": QK_NORM_REFUSED,
        "blocks.{i}.dw_conv.{p}": "a convolution behind the MLP (dwconv) over permuted tokens is not supported",
    },
    positions="pos_embed",
)
SANA_LEFT_OUT = {
    "y_embedder.y_embedding": "stands for dropped captions in training; the pipelines encode an empty prompt",
    "logvar_linear.{p}": UNUSED,
}
TEMPORAL = "blocks.{i}.mlp.t_conv.weight"  # which SANA-Video alone has
SANA_MARKS = ("t_block.1.weight", "blocks.{i}.cross_attn.q_linear.weight", "blocks.{i}.attn.qkv.weight")
SANA = Layout(
    name="sana",
    title="the original SANA layout",
    model="SanaTransformer2DModel",
    rules=sana_rules("time_embed.emb.timestep_embedder", None),
    marks=SANA_MARKS,
    foreign=("cfg_embedder.mlp.0.weight", TEMPORAL),
    read_config=sana_config,
    left_out=SANA_LEFT_OUT,
    positions="pos_embed",
)
SPRINT = Layout(
    name="sana-sprint",
    title="the original SANA-Sprint layout",
    model="SanaTransformer2DModel",
    rules=sana_rules("time_embed.timestep_embedder", "time_embed.guidance_embedder"),
    marks=(*SANA_MARKS, "cfg_embedder.mlp.0.weight"),
    read_config=sana_config,
    left_out=SANA_LEFT_OUT,
    positions="pos_embed",
)
SANA_VIDEO = Layout(
    name="sana-video",
    title="the original SANA-Video layout",
    model="SanaVideoTransformer3DModel",
    rules=sana_rules("time_embed.emb.timestep_embedder", None, "patch_embedding")
    + rules({TEMPORAL: "transformer_blocks.{i}.ff.conv_temp.weight"}),
    marks=(*SANA_MARKS, TEMPORAL),
    read_config=sana_video_config,
    left_out={**SANA_LEFT_OUT, "pos_embed": "SANA-Video rotates queries and keys in its place"},
)
LAYOUTS = (DIT, OFFICIAL, SANA, SPRINT, SANA_VIDEO, WAN, WAN_MHLA)
LAYOUT_NAMES = tuple(layout.name for layout in LAYOUTS)
# Layouts that are met but not read, by a key that gives them away, and what to do.
STRANGERS = {
    "transformer_blocks.{i}.attn1.to_q.weight": (
        "Diffusers' layout: give the folder with its config.json instead of the single file"
    ),
}


def find_layout(keys: Collection[str], name: str = "auto") -> Layout:
    """The layout that a checkpoint with these keys is in; `name` limits the choice.

    Raises ValueError when it is in none, or in another than `name` says.
    """
    if name not in ("auto", *LAYOUT_NAMES):
        raise ValueError(f"layout {name!r}: choose one of auto, {', '.join(LAYOUT_NAMES)}")
    found = next((layout for layout in LAYOUTS if layout.recognises(keys)), None)
    if found is None:
        stranger = next((what for mark, what in STRANGERS.items() if any_match(mark, keys)), None)
        what = f"it is in {stranger}" if stranger else f"its keys are {', '.join(sorted(keys)[:3])}, ..."
        titles = ", ".join(layout.title.removeprefix("the ") for layout in LAYOUTS)
        raise ValueError(f"the checkpoint is in none of the layouts known ({titles}): {what}")
    if name not in ("auto", found.name):
        raise ValueError(
            f"the checkpoint is in {found.title}, not in {name!r}: give --from {found.name}, or leave it out"
        )
    return found
