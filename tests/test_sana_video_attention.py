"""Attention in SANA-Video's slot: spelled out over all pairs of tokens, and told where the tokens are."""

import pytest
import torch
import torch.nn.functional as F
from model_checks import relative, stirred
from tiny_sana_video import model

from mhla_diffusion.sana_video_attention import MHLASanaVideoAttnProcessor
from mhla_diffusion.wan_attention import MHLAWanAttnProcessor

GRID, BLOCKS = (3, 5, 4), (2, 2, 3)
HEADS, WIDTH = 2, 12


def turned(x: torch.Tensor) -> torch.Tensor:
    """`(B, N, H, D)` with complex numbers: pair c turns by its axis' place times 10000^(-2i/4)."""
    places = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64) for size in GRID))
    angle = torch.cat(
        [places[:, axis : axis + 1] * torch.tensor([1.0, 1e-2]).double() for axis in range(3)], 1
    )
    spun = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.exp(1j * angle)[:, None]
    return torch.view_as_real(spun).flatten(-2)


def blocks_of_tokens() -> torch.Tensor:
    own = [torch.arange(n) for n in GRID]
    # Block b of n tokens in m blocks begins at floor(b n / m).
    own = [
        sum((place >= b * n // m).long() for b in range(1, m))
        for place, n, m in zip(own, GRID, BLOCKS, strict=True)
    ]
    return (own[0][:, None, None] * 6 + own[1][:, None] * 3 + own[2]).flatten()


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", ["rms_norm_across_heads", None])
@pytest.mark.parametrize("core", ["paper", "none", "softmax"])
def test_one_attention_computes_what_its_formula_says(qk_norm, core):
    options = {"mhla_gate": True, "mhla_local_conv": 3, "mhla_block_grid": BLOCKS, "qk_norm": qk_norm}
    if core == "softmax":
        options |= {"mhla_layers": [], "mhla_other_layers": "softmax"}
    else:
        options |= {"mhla_normalizer": core, "mhla_feature_eps": 0.0, "mhla_denominator_eps": 1e-15}
    made = stirred(model(num_layers=1, **options))
    attention = made.transformer_blocks[0].attn1.double()
    positions = made.rope(torch.empty(1, 4, GRID[0], 2 * GRID[1], 2 * GRID[2]))
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, 60, 24, dtype=torch.float64, generator=draw)

    def norm(y: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight

    q, k = attention.to_q(x), attention.to_k(x)
    if qk_norm is not None:
        q, k = norm(q, attention.norm_q.weight, 1e-5), norm(k, attention.norm_k.weight, 1e-5)
    q, k, v = (y.unflatten(-1, (HEADS, WIDTH)) for y in (q, k, attention.to_v(x)))
    if core == "softmax":
        weights = torch.einsum("bnhd,bmhd->bhnm", turned(q), turned(k)).div(WIDTH**0.5).softmax(-1)
    else:
        q, k, block = q.relu(), k.relu(), blocks_of_tokens()
        mixed = attention.mixing().double()[block][:, block]  # of query token and key token
        weights = torch.einsum("bnhd,bmhd->bhnm", turned(q), turned(k)) * mixed
        if core == "paper":
            weights = weights / (torch.einsum("bnhd,bmhd->bhnm", q, k) * mixed).sum(-1, keepdim=True)
    out = torch.einsum("bhnm,bmhd->bnhd", weights, v)
    if core == "none":
        out = norm(out, attention.norm_out.weight, 1e-6)
    out = out * F.silu(attention.to_gate(x) + 1.2784645).unflatten(-1, (HEADS, WIDTH))
    out = out.flatten(2) + attention.local_conv(v.flatten(2).mT.unflatten(-1, GRID)).flatten(2).mT
    expected = attention.to_out[0](out)
    assert relative(attention(x, rotary_emb=positions), expected) < 1e-6  # float32 frequencies
    single = attention.float()(x.float(), rotary_emb=positions)
    assert relative(single.double(), expected) < 1e-5


def test_an_attention_is_told_where_the_tokens_are_and_takes_its_own_processor_only():
    attention = model().transformer_blocks[0].attn1
    x = torch.zeros(1, 120, 24)
    with pytest.raises(ValueError, match="needs the token grid.* of an MHLASanaVideoTransformer3DModel"):
        attention(x)
    with pytest.raises(ValueError, match="neither"):
        attention(x, x)
    with pytest.raises(ValueError, match="takes a MHLASanaVideoAttnProcessor only"):
        attention.set_processor(MHLAWanAttnProcessor())
    attention.set_processor(MHLASanaVideoAttnProcessor())
