"""Starting kernels: strides, buffers, and the way down when a configuration cannot be compiled or takes more than the
GPU has."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from . import replay
from .derived import interleaved_angles
from .machine_code import LostDescriptor, check_when_loaded
from .partition import Partition
from .triton_configs import Config, head_parts, launch_configs, overridden

__all__ = [
    "DOT",
    "ceil_div",
    "contiguous",
    "dot_bits",
    "launch",
    "new_rows",
    "start_first_fitting",
    "states_configs",
    "strides_of",
    "turning_angles",
]

DOT = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "bf16"}
# Where a kernel stands in its list of configurations: (kernel, device, dtype, dims) -> index, past the end plain torch.
_step: dict[tuple, int] = {}
_warned: set[tuple] = set()


def launch(kernel, grid: tuple[int, ...], config, *args, **constants) -> None:
    """The one place where a kernel starts.

    Kernels that take PDL may, from Hopper on, start while the launch before finishes (programmatic dependent launch).
    """
    overlap = {}
    if _generation(args[0]) >= 9:
        check_when_loaded(kernel.__name__)
        if "PDL" in kernel.arg_names and overridden("pdl", True):
            overlap = {"launch_pdl": True}
    if "PDL" in kernel.arg_names:
        constants["PDL"] = bool(overlap)
    options = config._asdict() | constants
    compiled = kernel[grid](*args, **options, **overlap)
    if not replay.recording():
        return
    if compiled is None:  # Triton's interpreter
        replay.started(lambda *again: kernel[grid](*again, **options), args)
    else:  # a compiled kernel takes the constants, too, and three sizes of a grid
        constants = [options[name] for name in kernel.arg_names[len(args) :]]
        replay.started(compiled[(*grid, 1, 1)[:3]], (*args, *constants), _stream)


def _stream(device: int) -> int:
    return driver.active.get_current_stream(device)


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _generation(x: torch.Tensor) -> int:
    """Major number of the GPU's compute capability, 0 under the interpreter."""
    return _capability(x.device) if x.is_cuda else 0


def _configuration_fails(error: Exception) -> bool:
    """Whether this launch configuration is at fault, so that another may do: too large, or not compiled (rightly).

    The compiler's passes fail with a bare RuntimeError, as a broken launch does: where it was raised tells them apart.
    A machine without a C compiler fails while Triton builds what it launches kernels with.
    """
    if isinstance(error, OutOfResources | CompilationError | LostDescriptor):
        return True
    frame = error.__traceback__
    while frame is not None:
        module, function = frame.tb_frame.f_globals.get("__name__"), frame.tb_frame.f_code.co_name
        if module == "triton.runtime.build" or (module, function) == ("triton.compiler.compiler", "compile"):
            return True
        frame = frame.tb_next
    return False


def _warn_once(x: torch.Tensor, what: str, outcome: str, error: Exception | None) -> None:
    key = (str(x.device), x.dtype, what, outcome)
    if key in _warned:
        return
    gpu = torch.cuda.get_device_name(x.device) if x.is_cuda else f"Triton's interpreter on {x.device}"
    fault = f"need more than {gpu} has" if isinstance(error, OutOfResources) else f"do not compile for {gpu}"
    text = " ".join(str(error).split())[:300]
    warnings.warn(
        f"the {what} in {x.dtype} {fault} (Triton {triton.__version__}: {text}): continuing with {outcome}",
        stacklevel=2,
    )
    _warned.add(key)  # last: a warning that was made an error stays one


def dot_bits(x: torch.Tensor) -> int:
    return 16 if x.dtype == torch.bfloat16 else 32


def states_configs(name: str, x: torch.Tensor, value_dim: int, part: Partition) -> tuple[Config, ...]:
    widest = max(sum(head_parts(x.shape[-1])), sum(head_parts(value_dim)))
    return launch_configs(_generation(x), dot_bits(x), widest, part.block_size, name)


def start_first_fitting(
    name: str,
    x: torch.Tensor,
    value_dim: int,
    configs: tuple,
    options: tuple,
    start: Callable,
    what: str = "",
) -> bool:
    """Start a kernel with the first configuration that works. False: none does, so plain torch has to do it.

    options: what else the kernel is compiled for, so that one variant's failure does not slow the others down.
    what: the kernels' name in warnings, in the plural; MHLA's at these head dims unless given.
    """
    what = what or f"MHLA kernels at head dims {x.shape[-1]} and {value_dim}"
    key = (name, x.device, x.dtype, x.shape[-1], value_dim, configs[0], options)
    error = None
    for step in range(_step.get(key, 0), len(configs)):
        try:
            start(configs[step])
        except Exception as caught:
            if not _configuration_fails(caught):
                raise
            error = caught
            replay.spoil()
            continue
        if error is not None:
            if not isinstance(
                error, LostDescriptor
            ):  # no fault of the GPU, and nobody can do anything about it
                _warn_once(x, what, "a smaller launch configuration", error)
            _step[key] = step
        return True
    _warn_once(x, what, "plain torch", error)
    _step[key] = len(configs)
    replay.spoil()
    return False


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() else replay.computed(torch.Tensor.contiguous, x)


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else contiguous(x)


def ceil_div(length: int, tile: int) -> int:
    return -(-length // tile)


def power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()


def strides_of(*tensors: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Strides of batch, tokens and heads of all tensors, in units of the second result."""
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    # A kernel takes a number of up to 31 bits as 32 bits, and multiplies it by the step in as many.
    step = 1 if any([stride % 8 or stride >= 2**31 for stride in strides]) else 8
    return tuple([stride // step for stride in strides]), step


def turning_angles(rope: tuple[torch.Tensor, torch.Tensor], inputs: torch.dtype) -> torch.Tensor:
    return replay.computed(lambda cos, sin: interleaved_angles((cos, sin), inputs), *rope)


def new_rows(
    part: Partition, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A buffer with one row per token; a table that was never checked may leave tokens out, these read as zero."""
    return replay.empty(shape, dtype, device, zero=not part.trusted)
