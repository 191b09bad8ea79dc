"""Writers of the layouts in which Wan and the released MHLA code for Wan keep their weights, and that code's formula.

They are written from those codes' module names, without the package's own rules, which they check.
"""

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from model_checks import stirred
from original_layouts import linear
from tiny_wan import stock_transformer

HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
GRID = (3, 5, 10)  # the released layout


def attention(state: dict, name: str, module: torch.nn.Module) -> None:
    for old, new in (("q", module.to_q), ("k", module.to_k), ("v", module.to_v), ("o", module.to_out[0])):
        linear(state, f"{name}.{old}", new)
    state[f"{name}.norm_q.weight"] = module.norm_q.weight
    state[f"{name}.norm_k.weight"] = module.norm_k.weight


def wan_state(model: WanTransformer3DModel) -> dict[str, torch.Tensor]:
    """The state dict that the original Wan code has for the same weights."""
    state = {}
    embedder = model.condition_embedder
    linear(state, "patch_embedding", model.patch_embedding)
    linear(state, "text_embedding.0", embedder.text_embedder.linear_1)
    linear(state, "text_embedding.2", embedder.text_embedder.linear_2)
    linear(state, "time_embedding.0", embedder.time_embedder.linear_1)
    linear(state, "time_embedding.2", embedder.time_embedder.linear_2)
    linear(state, "time_projection.1", embedder.time_proj)
    if embedder.image_embedder is not None:
        image = embedder.image_embedder
        for place, part in (
            (0, image.norm1),
            (1, image.ff.net[0].proj),
            (3, image.ff.net[2]),
            (4, image.norm2),
        ):
            linear(state, f"img_emb.proj.{place}", part)
        if image.pos_embed is not None:
            state["img_emb.emb_pos"] = image.pos_embed
    for i, block in enumerate(model.blocks):
        name = f"blocks.{i}"
        state[f"{name}.modulation"] = block.scale_shift_table
        attention(state, f"{name}.self_attn", block.attn1)
        attention(state, f"{name}.cross_attn", block.attn2)
        if block.attn2.add_k_proj is not None:
            linear(state, f"{name}.cross_attn.k_img", block.attn2.add_k_proj)
            linear(state, f"{name}.cross_attn.v_img", block.attn2.add_v_proj)
            state[f"{name}.cross_attn.norm_k_img.weight"] = block.attn2.norm_added_k.weight
        if hasattr(block.norm2, "weight"):
            linear(state, f"{name}.norm3", block.norm2)
        linear(state, f"{name}.ffn.0", block.ffn.net[0].proj)
        linear(state, f"{name}.ffn.2", block.ffn.net[2])
    state["head.modulation"] = model.scale_shift_table
    linear(state, "head.head", model.proj_out)
    return {name: tensor.detach().clone() for name, tensor in state.items()}


# The released classes by the name that selects them: which modules each has besides the matrix.
RELEASED = {
    "mhla_uni": ("g_norm",),
    "mhla_uni gated": ("g_norm", "g"),
    "gated_mhla_lepe": ("g_norm", "g", "lepe"),
    "gated_mhla": ("g_norm of all heads", "g"),
    "mhla": ("out_rmsnorm",),
    "mhla_lepe": ("out_rmsnorm", "lepe"),
}


def released_state(
    model: WanTransformer3DModel, kind: str, layers=None, blocks: int = 150, seed: int = 5
) -> dict[str, torch.Tensor]:
    """Weights as the released MHLA code names them: those of a Wan, and random ones where it has more."""
    draw = torch.Generator().manual_seed(seed)
    state, parts, width = wan_state(model), RELEASED[kind], 24
    for i in range(len(model.blocks)) if layers is None else layers:
        name = f"blocks.{i}.self_attn"
        # Never clipped in that code: some entries are negative.
        state[f"{name}.block_attn.conv.weight"] = torch.rand(blocks, blocks, 1, 1, generator=draw) - 0.1
        if "g_norm" in parts:
            state[f"{name}.g_norm.weight"] = 1 + 0.2 * torch.randn(12, generator=draw)
        if "g_norm of all heads" in parts:
            state[f"{name}.g_norm.weight"] = 1 + 0.2 * torch.randn(width, generator=draw)
        if "g" in parts:
            state[f"{name}.g.weight"] = 0.2 * torch.randn(width, width, generator=draw)
            state[f"{name}.g.bias"] = 0.2 * torch.randn(width, generator=draw)
        if "lepe" in parts:
            state[f"{name}.lepe.weight"] = 0.2 * torch.randn(width, 1, 3, 3, 3, generator=draw)
            state[f"{name}.lepe.bias"] = 0.2 * torch.randn(width, generator=draw)
        if "out_rmsnorm" in parts:
            state[f"{name}.out_rmsnorm.weight"] = 1 + 0.2 * torch.randn(width, generator=draw)
    return state


def released_attention(
    state: dict,
    name: str,
    x: torch.Tensor,
    grid: tuple[int, int, int],
    layout=GRID,
    normalised: bool = False,
) -> torch.Tensor:
    """What the released code computes in one self-attention: equal blocks only, the rotation by complex numbers.

    normalised: with its denominator, which its Wan settings switch off.
    """
    own = {
        key.removeprefix(f"{name}."): value.double()
        for key, value in state.items()
        if key.startswith(f"{name}.")
    }
    x, heads = x.double(), 2
    batch, tokens, width = x.shape

    def norm(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def turned(y: torch.Tensor) -> torch.Tensor:
        """Pairs of channels: the last two thirds, rounded down, follow rows and columns, the first ones frames."""
        pairs = width // heads // 2
        share = pairs // 3
        counts, places = (
            (pairs - 2 * share, share, share),
            torch.meshgrid(*map(torch.arange, grid), indexing="ij"),
        )
        angles = [
            place.flatten()[:, None].double() / 10000 ** (torch.arange(count).double() / count)
            for place, count in zip(places, counts, strict=True)
        ]
        turn = torch.polar(torch.ones(tokens, pairs).double(), torch.cat(angles, dim=1))
        return torch.view_as_real(
            torch.view_as_complex(y.reshape(batch, tokens, heads, -1, 2)) * turn[:, None]
        ).flatten(3)

    def split(y: torch.Tensor) -> torch.Tensor:  # (B, H, M, tokens of a block, D)
        sizes = [size for g, m in zip(grid, layout, strict=True) for size in (m, g // m)]
        y = y.reshape(batch, *sizes, heads, width // heads).permute(0, 7, 1, 3, 5, 2, 4, 6, 8)
        return y.flatten(5, 7).flatten(2, 4)

    q, k = (
        torch.relu(norm(F.linear(x, own[f"{n}.weight"], own[f"{n}.bias"]), own[f"norm_{n}.weight"])) + 1e-6
        for n in "qk"
    )
    v = F.linear(x, own["v.weight"], own["v.bias"])
    q, k = (y.unflatten(-1, (heads, -1)) for y in (q, k))
    mixing = own["block_attn.conv.weight"][:, :, 0, 0]
    summaries = split(turned(k)).mT @ split(v.unflatten(-1, (heads, -1)))
    out = split(turned(q)) @ torch.einsum("ij,bhjde->bhide", mixing, summaries)
    if (
        normalised
    ):  # the query of block j at the same place s, in place of the one that is answered; not turned
        masses = split(k).sum(dim=3)
        out = out / (torch.einsum("ij,bhjsd,bhjd->bhis", mixing, split(q), masses) + 1e-6)[..., None]
    sizes = [g // m for g, m in zip(grid, layout, strict=True)]
    out = (
        out.unflatten(3, sizes)
        .unflatten(2, layout)
        .permute(0, 2, 5, 3, 6, 4, 7, 1, 8)
        .reshape(batch, tokens, width)
    )
    if "g_norm.weight" in own:
        weight = own["g_norm.weight"]
        out = norm(out.unflatten(-1, (-1, len(weight))), weight).flatten(2)
    if "g.weight" in own:
        out = out * F.silu(F.linear(x, own["g.weight"], own["g.bias"]))
    if "lepe.weight" in own:
        video = v.mT.unflatten(-1, grid)
        out = (
            out + F.conv3d(video, own["lepe.weight"], own["lepe.bias"], padding=1, groups=width).flatten(2).mT
        )
    out = F.linear(out, own["o.weight"], own["o.bias"])
    return norm(out, own["out_rmsnorm.weight"]) if "out_rmsnorm.weight" in own else out


def stock_wan(seed: int = 0, **changes) -> WanTransformer3DModel:
    """A Wan whose weights are all off their start."""
    return stirred(stock_transformer(seed, **changes))
