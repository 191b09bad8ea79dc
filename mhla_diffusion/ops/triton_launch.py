"""Launches the Triton kernels: output buffers, strides, and the way down when a GPU cannot take a configuration."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import triton
from triton.runtime.errors import OutOfResources

from . import fallback
from .partition import Partition
from .triton_configs import Config, launch_configs
from .triton_kernels import pull_back_kernel, read_out_kernel, summarise_kernel

__all__ = ["pull_back", "read_out", "summarise"]

TILES = 4  # token tiles per program: a program loads its state once for all of them
_DOT = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "bf16"}
# Where a kernel stands in its list of configurations: (kernel, device, dtype, dims) -> index, past the end plain torch.
_step: dict[tuple, int] = {}
_warned: set[tuple] = set()


def launch(kernel, grid: tuple[int, ...], config: Config, *args, **constants) -> None:
    """The one place where a kernel starts."""
    kernel[grid](
        *args,
        BN=config.BN,
        BV=config.BV,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
    )


def _warn_once(x: torch.Tensor, value_dim: int, outcome: str, error: OutOfResources | None) -> None:
    key = (str(x.device), x.dtype, x.shape[-1], value_dim, outcome)
    if key not in _warned:
        _warned.add(key)
        gpu = torch.cuda.get_device_name(x.device) if x.is_cuda else f"Triton's interpreter on {x.device}"
        warnings.warn(
            f"the MHLA kernels at head dims {x.shape[-1]} and {value_dim} in {x.dtype} need more than {gpu} has "
            f"(Triton {triton.__version__}: {error}): continuing with {outcome}",
            stacklevel=2,
        )


def _start(name: str, x: torch.Tensor, value_dim: int, start: Callable[[Config], None]) -> bool:
    """Start a kernel with the first configuration that fits. False: none does, so plain torch has to do it."""
    generation = torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0
    dot_bits = 16 if x.dtype == torch.bfloat16 else 32
    configs = launch_configs(generation, dot_bits, triton.next_power_of_2(max(x.shape[-1], value_dim)))
    key = (name, str(x.device), x.dtype, x.shape[-1], value_dim)
    error = None
    for step in range(_step.get(key, 0), len(configs)):
        _step[key] = step
        try:
            with torch.cuda.device_of(x):  # Triton launches on the current device, x may live on another
                start(configs[step])
        except OutOfResources as caught:
            error = caught
            continue
        if error is not None:
            _warn_once(x, value_dim, "a smaller launch configuration", error)
        return True
    _step[key] = len(configs)
    _warn_once(x, value_dim, "plain torch", error)
    return False


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _new(part: Partition, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer with one row per token; a table that was never checked may leave tokens out, these read as zero."""
    if part.trusted:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)


def _angles(rope, x: torch.Tensor):
    # Without a rotation the kernel never reads the two pointers.
    return (x, x) if rope is None else tuple(angle.float().contiguous() for angle in rope)


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))  # tl.dot needs at least 16 on every side


def summarise(x, y, part: Partition, rope, feature_eps: float, *, mass: bool, rows=None) -> torch.Tensor:
    """States `(B, H, M, D * Dv [+ D])` float32 of x (B, N, H, D) and y (B, N, H, Dv).

    mass: append z. rows: (scale of y, weight in z), float32 `(B, N, H)` each.
    """
    x, y = _unit_stride(x), _unit_stride(y)
    batch, _, heads, dim = x.shape
    value_dim = y.shape[-1]
    size = dim * value_dim + (dim if mass else 0)
    state = torch.empty(batch, heads, part.num_blocks, size, dtype=torch.float32, device=x.device)
    scale, weight = (x, x) if rows is None else rows

    def start(config: Config) -> None:
        grid = (batch * heads * part.num_blocks, triton.cdiv(value_dim, config.BV))
        launch(
            summarise_kernel, grid, config,
            x, y, part.table, *_angles(rope, x), scale, weight, state,
            *x.stride()[:3], *y.stride()[:3],
            part.num_tokens, part.num_blocks, part.block_size, size, heads, feature_eps,
            D=dim, DV=value_dim, BD=_padded(dim),
            HAS_ROPE=rope is not None, HAS_MASS=mass, HAS_ROWS=rows is not None, DOT=_DOT[x.dtype],
        )  # fmt: skip

    if not _start("summarise", x, value_dim, start):
        return fallback.summarise(x, y, part, rope, feature_eps, mass=mass, rows=rows)
    return state


def read_out(
    x, state, value_dim: int, part: Partition, rope, feature_eps: float, *, divide: bool, denominator_eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """`(B, N, H, Dv)` contiguous in out_dtype: phi(x) S, divided by phi(x) . z + denominator_eps if `divide`."""
    x = _unit_stride(x)
    batch, tokens, heads, dim = x.shape
    out = _new(part, (batch, tokens, heads, value_dim), out_dtype, x.device)

    def start(config: Config) -> None:
        runs = triton.cdiv(part.block_size, config.BN * TILES)
        grid = (batch * heads * part.num_blocks, triton.cdiv(value_dim, config.BV), runs)
        launch(
            read_out_kernel, grid, config,
            x, part.table, *_angles(rope, x), state, out,
            *x.stride()[:3],
            part.num_tokens, part.num_blocks, part.block_size, state.shape[-1], heads, feature_eps, denominator_eps,
            D=dim, DV=value_dim, BD=_padded(dim), TILES=TILES,
            HAS_ROPE=rope is not None, DIVIDE=divide, DOT=_DOT[x.dtype],
        )  # fmt: skip

    if not _start("read_out", x, value_dim, start):
        return fallback.read_out(
            x, state, value_dim, part, rope, feature_eps,
            divide=divide, denominator_eps=denominator_eps, out_dtype=out_dtype,
        )  # fmt: skip
    return out


def pull_back(
    x, grad, state, part: Partition, rope, feature_eps: float, *, role: str, denominator_eps: float = 0.0
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Gradient of x (B, N, H, D), contiguous in its dtype, from grad (B, N, H, Dv), through phi and the rotation.

    role: "plain" no denominator · "divide" x are queries with one; also returns the row weights (1 / den, d den),
    float32 `(B, N, H)` each, for `summarise` · "add_mass" x are keys whose z has a gradient, kept in the state's tail.
    """
    x, grad = _unit_stride(x), _unit_stride(grad)
    batch, tokens, heads, dim = x.shape
    value_dim = grad.shape[-1]
    dx = _new(part, (batch, tokens, heads, dim), x.dtype, x.device)
    rows = None
    if role == "divide":
        rows = tuple(_new(part, (batch, tokens, heads), torch.float32, x.device) for _ in range(2))
    scale, weight = (x, x) if rows is None else rows

    def start(config: Config) -> None:
        grid = (batch * heads * part.num_blocks, triton.cdiv(part.block_size, config.BN * TILES))
        launch(
            pull_back_kernel, grid, config,
            x, grad, part.table, *_angles(rope, x), state, dx, scale, weight,
            *x.stride()[:3], *grad.stride()[:3],
            part.num_tokens, part.num_blocks, part.block_size, state.shape[-1], heads, feature_eps, denominator_eps,
            D=dim, DV=value_dim, BD=_padded(dim), TILES=TILES,
            HAS_ROPE=rope is not None, DIVIDE=role == "divide", ADD_MASS=role == "add_mass", DOT=_DOT[x.dtype],
        )  # fmt: skip

    if not _start("pull_back", x, value_dim, start):
        return fallback.pull_back(
            x, grad, state, part, rope, feature_eps, role=role, denominator_eps=denominator_eps
        )
    return dx, rows
