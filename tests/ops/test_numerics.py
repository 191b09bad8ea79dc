"""Half precision at its limits: nothing active, large magnitudes, non-finite input, autocast."""

import pytest
import torch

from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.ops import mhla_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])


def attend(q, k, v, grid=(128, 128), block_grid=(4, 4), **options):
    mixing = initial_mixing(block_grid).to(q.device)
    return mhla_attention(q, k, v, mixing, grid=grid, block_grid=block_grid, **options)


@dtypes
@pytest.mark.parametrize("block_grid", [(4, 4), (3, 5)])
def test_all_features_off_gives_the_mean_value(device, dtype, block_grid):
    # Every feature is feature_eps: all keys weigh the same, whatever the dtype.
    q = torch.full((1, 16384, 2, 64), -1.0, dtype=dtype, device=device)
    out = attend(q, q, torch.ones_like(q), block_grid=block_grid)
    assert out.dtype == dtype and (out.float() - 1).abs().max() <= 3e-3


@dtypes
@pytest.mark.parametrize("block_grid", [(4, 4), (3, 5)])
def test_magnitude_30_at_16k_tokens_neither_overflows_nor_drifts(device, dtype, block_grid):
    q = torch.full((1, 16384, 2, 64), 30.0, dtype=dtype, device=device)
    out = attend(q, q, torch.ones_like(q), block_grid=block_grid)
    assert (out.float() - 1).abs().max() <= 3e-3


@dtypes
def test_random_magnitude_30_at_16k_tokens_equals_float64(device, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = ((30 * torch.randn(1, 16384, 1, 64, generator=generator)).to(device, dtype) for _ in range(3))
    v = v + 60  # values that do not average out, as sums of them overflow first
    truth = attend(q.double(), k.double(), v.double(), backend="reference")
    out = attend(q, k, v)
    assert (out.double() - truth).norm() <= 3e-3 * truth.norm()


@dtypes
def test_gradients_stay_finite_at_the_limits(device, dtype):
    for fill in (-1.0, 30.0):
        q, k = (
            torch.full((1, 1024, 1, 32), fill, dtype=dtype, device=device).requires_grad_() for _ in range(2)
        )
        v = torch.ones_like(q).requires_grad_()
        out = attend(q, k, v, grid=(32, 32))
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_float16_without_denominator_needs_an_output_norm(device):
    q = torch.full((1, 16384, 1, 64), 30.0, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="pass norm_weight for an output norm") as error:
        attend(q, q, q, normalizer="none")
    assert "\n" not in str(error.value)
    weight = torch.ones(64, device=device, dtype=torch.float16)
    out = attend(q, q, q, normalizer="none", norm_weight=weight)
    assert out.dtype == torch.float16 and (out.float() - 1).abs().max() <= 3e-3


@dtypes
def test_a_nan_is_never_hidden(device, dtype):
    for name in ("q", "k", "v"):
        tensors = {x: torch.ones(1, 16, 1, 16, dtype=dtype, device=device) for x in ("q", "k", "v")}
        tensors[name][0, 3, 0, 5] = float("nan")
        assert attend(**tensors, grid=(4, 4), block_grid=(2, 2)).isnan().any(), name


def test_autocast_never_rounds_the_coefficients(device):
    q, k, v = torch.randn(3, 1, 64, 2, 16, generator=torch.Generator().manual_seed(1)).to(device)
    mixing = initial_mixing((4, 4)).to(device).requires_grad_()
    plain = mhla_attention(q, k, v, mixing, grid=(8, 8), block_grid=(4, 4))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        cast = mhla_attention(q, k, v, mixing, grid=(8, 8), block_grid=(4, 4))
        (gradient,) = torch.autograd.grad(cast.sum(), mixing)
    assert torch.equal(cast, plain) and gradient.dtype == torch.float32
