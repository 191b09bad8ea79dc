"""Launches the Triton kernels: output buffers, strides, and the way down when a configuration cannot be compiled or
takes more than the GPU has."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from . import fallback
from .partition import Partition
from .triton_configs import Config, launch_configs, padded
from .triton_kernels import pull_back_kernel, read_out_kernel, summarise_kernel

__all__ = ["pull_back", "read_out", "summarise"]

TILES = 4  # token tiles per program of a long block: a program loads its state once for all of them
_DOT = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "bf16"}
# Where a kernel stands in its list of configurations: call -> index, past the end plain torch.
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


def _generation(x: torch.Tensor) -> int:
    """Major number of the GPU's compute capability, 0 under the interpreter."""
    return torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0


def _configuration_fails(error: Exception) -> bool:
    """Whether this launch configuration is at fault, so that another may do: too large, or Triton cannot compile it.

    The compiler's passes fail with a bare RuntimeError, as a broken launch does: where it was raised tells them apart.
    """
    if isinstance(error, OutOfResources | CompilationError):
        return True
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame
        if code.f_globals.get("__name__") == "triton.compiler.compiler" and code.f_code.co_name == "compile":
            return True
        frame = frame.tb_next
    return False


def _warn_once(x: torch.Tensor, value_dim: int, outcome: str, error: Exception | None) -> None:
    key = (str(x.device), x.dtype, x.shape[-1], value_dim, outcome)
    if key in _warned:
        return
    gpu = torch.cuda.get_device_name(x.device) if x.is_cuda else f"Triton's interpreter on {x.device}"
    fault = f"need more than {gpu} has" if isinstance(error, OutOfResources) else f"do not compile for {gpu}"
    text = " ".join(str(error).split())[:300]
    warnings.warn(
        f"the MHLA kernels at head dims {x.shape[-1]} and {value_dim} in {x.dtype} {fault} "
        f"(Triton {triton.__version__}: {text}): continuing with {outcome}",
        stacklevel=2,
    )
    _warned.add(key)  # last: a warning that was made an error stays one


def _start(
    name: str,
    x: torch.Tensor,
    value_dim: int,
    part: Partition,
    options: tuple,
    start: Callable[[Config], None],
) -> bool:
    """Start a kernel with the first configuration that works. False: none does, so plain torch has to do it.

    options: what else the kernel is compiled for, so that one variant's failure does not slow the others down.
    """
    dot_bits = 16 if x.dtype == torch.bfloat16 else 32
    padded_dim = padded(max(x.shape[-1], value_dim))
    configs = launch_configs(_generation(x), dot_bits, padded_dim, part.block_size)
    key = (
        name,
        str(x.device),
        x.dtype,
        x.shape[-1],
        value_dim,
        configs[0],
        part.block_size > configs[0].BN,
        options,
    )
    error = None
    for step in range(_step.get(key, 0), len(configs)):
        try:
            with torch.cuda.device_of(x):  # Triton launches on the current device, x may live on another
                start(configs[step])
        except Exception as caught:
            if not _configuration_fails(caught):
                raise
            error = caught
            continue
        if error is not None:
            _warn_once(x, value_dim, "a smaller launch configuration", error)
            _step[key] = step
        return True
    _warn_once(x, value_dim, "plain torch", error)
    _step[key] = len(configs)
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


def _ceil(size: int, step: int) -> int:
    return -(-size // step)


def _tiles(part: Partition, config: Config) -> int:
    return 1 if part.block_size <= config.BN else TILES


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
        grid = (batch * heads * part.num_blocks, _ceil(value_dim, config.BV))
        launch(
            summarise_kernel, grid, config,
            x, y, part.table, *_angles(rope, x), scale, weight, state,
            *x.stride()[:3], *y.stride()[:3],
            part.num_tokens, part.num_blocks, part.block_size, size, heads, feature_eps,
            D=dim, DV=value_dim, BD=padded(dim), ONE_TILE=part.block_size <= config.BN,
            HAS_ROPE=rope is not None, HAS_MASS=mass, HAS_ROWS=rows is not None, DOT=_DOT[x.dtype],
        )  # fmt: skip

    options = (y.dtype, rope is None, mass, rows is None)
    if not _start("summarise", x, value_dim, part, options, start):
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
        tiles = _tiles(part, config)
        runs = _ceil(part.block_size, config.BN * tiles)
        grid = (batch * heads * part.num_blocks, _ceil(value_dim, config.BV), runs)
        launch(
            read_out_kernel, grid, config,
            x, part.table, *_angles(rope, x), state, out,
            *x.stride()[:3],
            part.num_tokens, part.num_blocks, part.block_size, state.shape[-1], heads, feature_eps, denominator_eps,
            D=dim, DV=value_dim, BD=padded(dim), TILES=tiles,
            HAS_ROPE=rope is not None, DIVIDE=divide, DOT=_DOT[x.dtype],
        )  # fmt: skip

    if not _start("read_out", x, value_dim, part, (out_dtype, rope is None, divide), start):
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
        tiles = _tiles(part, config)
        grid = (batch * heads * part.num_blocks, _ceil(part.block_size, config.BN * tiles))
        launch(
            pull_back_kernel, grid, config,
            x, grad, part.table, *_angles(rope, x), state, dx, scale, weight,
            *x.stride()[:3], *grad.stride()[:3],
            part.num_tokens, part.num_blocks, part.block_size, state.shape[-1], heads, feature_eps, denominator_eps,
            D=dim, DV=value_dim, BD=padded(dim), TILES=tiles,
            HAS_ROPE=rope is not None, DIVIDE=role == "divide", ADD_MASS=role == "add_mass", DOT=_DOT[x.dtype],
        )  # fmt: skip

    if not _start("pull_back", x, value_dim, part, (grad.dtype, rope is None, role), start):
        return fallback.pull_back(
            x, grad, state, part, rope, feature_eps, role=role, denominator_eps=denominator_eps
        )
    return dx, rows
