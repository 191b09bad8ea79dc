"""MHLA in Wan's self-attention slot: the rotation is stock's, the output is what the formula says."""

import pytest
import torch
import torch.nn.functional as F
from model_checks import relative, stirred
from tiny_wan import EVERYTHING, model

from mhla_diffusion.ops.partition import grid_partition
from mhla_diffusion.ops.rotation import angle_tables, exact_dtype, three_axes


@pytest.mark.parametrize("head_dim", [128, 12, 72])
def test_the_rotation_is_the_stock_table(head_dim):
    """Of Wan 2.1 and 2.2 alike, image to video included: their positions are those of the latents' own grid."""
    ours = model(attention_head_dim=head_dim, num_layers=1, mhla_layers=[])
    grid = (21, 30, 52)
    cos, sin, frequencies, places = ours.rope(torch.empty(1, 4, 21, 60, 104))
    assert tuple(places.shape) == (0, *grid) and frequencies.shape == (3, head_dim // 2)
    part = grid_partition(grid, (3, 5, 10), 21 * 30 * 52, None)
    mine = angle_tables((three_axes(frequencies), None), part)
    for own, stock in zip(mine, (cos[0, :, 0, 0::2], sin[0, :, 0, 1::2]), strict=True):
        assert relative(own, stock) < 1e-6
    assert exact_dtype(torch.device("mps")) == torch.float32  # has no float64
    assert exact_dtype(torch.device("cpu")) == torch.float64


OPTION_SETS = {
    "default": {},
    "everything": EVERYTHING,
    "paper": {"mhla_normalizer": "paper", "mhla_gate": True},
    "across heads": {"mhla_norm_across_heads": True, "mhla_gate": True, "mhla_local_conv": 3},
}


@torch.no_grad()
@pytest.mark.parametrize("name", OPTION_SETS)
def test_one_attention_computes_what_its_formula_says(name):
    """Spelled out in float64 over all pairs of tokens, on a grid that no axis of the blocks divides."""
    options = OPTION_SETS[name]
    attention = stirred(model(num_layers=1, **options)).double().blocks[0].attn1
    rope = model().rope
    grid, blocks, heads, width = (5, 7, 8), (2, 2, 3), 2, 12
    tokens = grid[0] * grid[1] * grid[2]
    x = torch.randn(2, tokens, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = rope(torch.empty(1, 4, 5, 14, 16))

    def norm(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weight

    def turned(y: torch.Tensor) -> torch.Tensor:
        """With complex numbers: pair c of the token at (t, r, s) turns by its axis' place times 10000^(-2i/4)."""
        places = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64) for size in grid))
        angle = torch.cat(
            [places[:, axis : axis + 1] * torch.tensor([1.0, 1e-2]).double() for axis in range(3)], 1
        )
        spun = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * torch.exp(1j * angle)[:, None]
        return torch.view_as_real(spun).flatten(-2)

    q, k = (
        norm(project(x), scale.weight).unflatten(-1, (heads, width)).relu() + 1e-6
        for project, scale in ((attention.to_q, attention.norm_q), (attention.to_k, attention.norm_k))
    )
    v = attention.to_v(x).unflatten(-1, (heads, width))
    edges = [[i * size // count for i in range(count + 1)] for size, count in zip(grid, blocks, strict=True)]
    own = [
        torch.bucketize(torch.arange(n), torch.tensor(e[1:]), right=True)
        for n, e in zip(grid, edges, strict=True)
    ]
    block = (own[0][:, None, None] * 6 + own[1][:, None] * 3 + own[2]).flatten()
    weights = attention.mixing().double()[..., block, :][..., block]  # of query token and key token
    core = torch.einsum("bnhd,bmhd->bhnm", turned(q), turned(k)) * weights
    if attention.normalizer == "paper":
        core = core / (torch.einsum("bnhd,bmhd->bhnm", q, k) * weights).sum(-1, keepdim=True)
    core = torch.einsum("bhnm,bmhd->bnhd", core, v)
    if attention.norm_across_heads:
        core = norm(core.flatten(2), attention.norm_out.weight).unflatten(-1, (heads, width))
    elif attention.norm_out is not None:
        core = norm(core, attention.norm_out.weight)
    if attention.to_gate is not None:
        core = core * F.silu(attention.to_gate(x) + 1.2784645).unflatten(-1, (heads, width))
    core = core.flatten(2)
    if attention.local_conv is not None:
        core = core + attention.local_conv(v.flatten(2).mT.unflatten(-1, grid)).flatten(2).mT
    expected = attention.to_out[0](core)
    if attention.norm_projected is not None:
        expected = norm(expected, attention.norm_projected.weight)
    assert relative(attention(x, None, None, positions), expected) < 1e-6  # float32 frequencies
    single = attention.float()(x.float(), None, None, positions)
    assert relative(single.double(), expected) < 1e-5


def test_an_attention_is_told_where_the_tokens_are():
    attention = model().blocks[0].attn1
    x = torch.zeros(1, 120, 24)
    with pytest.raises(ValueError, match="needs the token grid"):
        attention(x)
    with pytest.raises(ValueError, match="neither"):
        attention(x, x)
