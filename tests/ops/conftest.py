"""Random operator calls and their float64 truth, shared by the operator tests."""

import math
from dataclasses import dataclass, field

import pytest
import torch

from mhla_diffusion.blocks import block_table
from mhla_diffusion.ops import mhla_attention

NAMES = ("q", "k", "v", "mixing", "norm_weight", "gate", "local")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Where there is a GPU, every test that uses `device` runs on it: `pytest -m gpu` then takes them all."""
    if torch.cuda.is_available():
        for item in items:
            if "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    """A CUDA device where there is one, so that the same tests run Triton for real there."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned_buffers(monkeypatch):
    """Fill fresh buffers with NaN, integers with their largest value: what is left unwritten shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        buffer = empty(*args, **kwargs)
        if buffer.is_floating_point():
            return buffer.fill_(float("nan"))
        return buffer if buffer.dtype == torch.bool else buffer.fill_(torch.iinfo(buffer.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)


@dataclass
class Call:
    """Inputs of one call in the tested dtype; `options` go to `mhla_attention` unchanged."""

    tensors: dict[str, torch.Tensor]
    options: dict = field(default_factory=dict)
    grad: torch.Tensor | None = None

    def run(self, backend: str, dtype: torch.dtype | None = None, **overrides) -> dict[str, torch.Tensor]:
        """Output and all gradients. dtype: cast the inputs first (float64 for the truth).

        Triton takes the states form unless `form` says otherwise: the tiny shapes of tests would all be dual.
        """
        if backend == "triton":
            overrides.setdefault("form", "states")
        tensors = {
            name: (x.detach() if dtype is None else x.detach().to(dtype)).requires_grad_()
            for name, x in self.tensors.items()
        }
        out = mhla_attention(**tensors, backend=backend, **{**self.options, **overrides})
        grads = torch.autograd.grad(out, list(tensors.values()), self.grad.to(out.dtype))
        return {"out": out.detach(), **dict(zip(tensors, grads, strict=True))}

    def check(self, result: dict[str, torch.Tensor], tolerance: float) -> None:
        """Compare output and every gradient with the float64 reference on the same (rounded) inputs."""
        truth = self.run("reference", torch.float64)
        assert result.keys() == truth.keys()
        for name, expected in truth.items():
            got = result[name]
            assert got.shape == expected.shape and torch.isfinite(got).all(), name
            assert got.is_contiguous() or name != "out"
            error = relative_error(got, expected, self.grad)
            assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"


def relative_error(got: torch.Tensor, expected: torch.Tensor, grad: torch.Tensor) -> float:
    """‖got - expected‖ / ‖expected‖. Some gradients are 0 by symmetry (a lone coefficient cancels out of the normalised
    output); then rounding has to be small against the incoming gradient instead."""
    scale, reference = grad.double().norm(), expected.double().norm()
    return float(
        (got.double() - expected.double()).norm() / torch.where(reference > 1e-4 * scale, reference, scale)
    )


@pytest.fixture
def make_call(device):
    """Factory of random calls: grid, block_grid and head dims, with every option switched by keyword."""

    def make(
        grid, block_grid, dim, value_dim=None, *, batch=2, heads=2, dtype=torch.float32, rope=False, per_head=False,
        epilogue=False, as_table=False, key_blocks=None, seed=0, **options,
    ) -> Call:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator)

        value_dim = dim if value_dim is None else value_dim
        tokens = math.prod(grid)
        table = block_table(grid, block_grid)
        key_tokens, key_count = (tokens, len(table)) if key_blocks is None else key_blocks
        mixing = torch.rand(*((heads,) if per_head else ()), len(table), key_count, generator=generator)
        mixing = mixing.double() if dtype == torch.float64 else mixing
        tensors = {
            "q": random(batch, tokens, heads, dim).to(dtype),
            "k": random(batch, key_tokens, heads, dim).to(dtype),
            "v": random(batch, key_tokens, heads, value_dim).to(dtype),
            "mixing": mixing / mixing.sum(-1, keepdim=True),
        }
        if epilogue:
            tensors["norm_weight"] = 1 + 0.1 * random(value_dim)
            tensors["gate"] = random(batch, tokens, heads, value_dim).to(dtype)
            tensors["local"] = random(batch, tokens, heads, value_dim).to(dtype)
        if as_table or key_blocks is not None:
            options["block_table"] = table.to(device)
        else:
            options.update(grid=grid, block_grid=block_grid)
        if key_blocks is not None:
            options["key_block_table"] = block_table((key_tokens,), (key_count,)).to(device)
        if rope:
            angles = random(tokens, dim // 2)
            options["rope"] = (angles.cos().to(device), angles.sin().to(device))
            if key_tokens != tokens:
                angles = random(key_tokens, dim // 2)
                options["key_rope"] = (angles.cos().to(device), angles.sin().to(device))
        grad = random(batch, tokens, heads, value_dim).to(dtype)
        tensors = {name: x.to(device) for name, x in tensors.items()}
        return Call(tensors, options, grad.to(device))

    return make
