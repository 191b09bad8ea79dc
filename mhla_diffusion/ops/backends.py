"""Which backend computes a call, and why."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

__all__ = [
    "BACKENDS", "MAX_HEAD_DIM", "choose_backend", "explain", "has_tangent", "is_ordinary_call",
    "is_plain_call", "refuse_mapped_axes", "refuse_rotation_gradients", "refuse_tangents", "refuse_transforms",
    "wants_gradient",
]  # fmt: skip

BACKENDS = ("auto", "triton", "eager", "reference")
MAX_HEAD_DIM = 256


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook or a stub module forbids it
        return False


# Read once: Triton itself looks at the variable when kernels are defined, not at each call.
_HAS_TRITON = _installed("triton")
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def _why_not_triton(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the Triton kernels cannot take a call, or None when they can."""
    if not _HAS_TRITON:
        return "Triton is not installed"
    if head_dim > MAX_HEAD_DIM:
        return f"head dim {head_dim} is above the kernels' limit of {MAX_HEAD_DIM}"
    if _INTERPRETED:
        if dtype != torch.float32:
            return f"Triton's interpreter is wrong for {dtype}, it is trusted with torch.float32 only"
        return None
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device, q is on {device}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the Triton kernels take float32, bfloat16 and float16, not {dtype}"
    return None


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """`(name, reason)`; raises ValueError for an unknown backend or a Triton request that cannot be met."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: choose one of {', '.join(BACKENDS)}")
    if backend in ("eager", "reference"):
        return backend, "asked for"
    obstacle = _why_not_triton(device, dtype, head_dim)
    if backend == "triton":
        if obstacle is not None:
            raise ValueError(f"backend='triton' cannot run here: {obstacle}; use backend='auto' or 'eager'")
        return "triton", "asked for"
    if obstacle is not None:
        return "eager", obstacle
    if device.type != "cuda":
        return "eager", f"q is on {device}, where plain torch is the fast path"
    return "triton", f"q is on {device}"


def explain(
    q_or_device: torch.Tensor | torch.device | str,
    *,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    head_dim: int | None = None,
) -> str:
    """One line: the backend `mhla_attention` would take, and why.

    Args:
        q_or_device: the query tensor (its device, dtype and head dim count), or only a device.
        backend, dtype, head_dim: as in the call; dtype is float32 and head_dim 64 when nothing is known.
    """
    if isinstance(q_or_device, torch.Tensor):
        device = q_or_device.device
        dtype = q_or_device.dtype if dtype is None else dtype
        head_dim = q_or_device.shape[-1] if head_dim is None else head_dim
    else:
        device = torch.device(q_or_device)
    name, reason = choose_backend(backend, device, dtype or torch.float32, head_dim or 64)
    return f"{name}: {reason}"


def is_plain_call(x: torch.Tensor, *weights: torch.Tensor | None) -> bool:
    """Whether a kernel that has no gradients and casts nothing may compute a call in torch's place.

    Gradients and tangents (jvp) are not wanted, autocast is off, and all are plain tensors of one dtype and
    device: quantised weights and those of a distributed model are subclasses. x lies on a device that has autocast.
    """
    if torch.is_autocast_enabled(x.device.type) or wants_gradient(x, *weights):
        return False
    return forward_ad._current_level < 0 and _plain(x, *weights)


def is_ordinary_call(x: torch.Tensor, *weights: torch.Tensor | None) -> bool:
    """`is_plain_call` for a kernel that has gradients, if none for torch.func, and reads weights of any dtype.

    Without autocast the dtypes must agree, as torch wants it.
    """
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return forward_ad._current_level < 0 and _plain(
        x, *weights, any_dtype=torch.is_autocast_enabled(x.device.type)
    )


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records what is computed of them."""
    return torch.is_grad_enabled() and any([each is not None and each.requires_grad for each in tensors])


def _plain(x: torch.Tensor, *weights: torch.Tensor | None, any_dtype: bool = False) -> bool:
    return all(
        [
            type(each) in (torch.Tensor, torch.nn.Parameter)
            and each.device == x.device
            and (any_dtype or each.dtype == x.dtype)
            for each in (x, *weights)
            if each is not None
        ]
    )


def has_tangent(*tensors: torch.Tensor) -> bool:
    """Whether one of them carries a forward-mode gradient."""
    return forward_ad._current_level >= 0 and any(
        [forward_ad.unpack_dual(x).tangent is not None for x in tensors]
    )


def refuse_tangents(tensors: Sequence[torch.Tensor], instead: str) -> None:
    """ValueError where one of them carries a forward-mode gradient, which the Triton kernels would drop."""
    if has_tangent(*tensors):
        raise ValueError(
            "the Triton kernels have no forward-mode gradients (jvp, dual numbers), which would come out as zero: "
            f"{instead}"
        )


def _transformed(tensors: Sequence[torch.Tensor | None], kind: str) -> bool:
    """Whether one of them is a `kind` ("batched", "gradtracking") tensor of torch.func, however its transforms nest."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return False
    functorch = torch._C._functorch
    is_kind = getattr(functorch, f"is_{kind}tensor")
    for x in tensors:
        while x is not None and functorch.is_functorch_wrapped_tensor(x):
            if is_kind(x):
                return True
            x = functorch.get_unwrapped(x)
    return False


def refuse_mapped_axes(tensors: Sequence[torch.Tensor | None]) -> None:
    """ValueError where one of them has an axis that torch.func.vmap maps over."""
    if _transformed(tensors, "batched"):
        raise ValueError(
            "mhla_attention inside torch.func.vmap: put the mapped axis into the batch axis of q, k and v"
        )


def refuse_transforms(tensors: Sequence[torch.Tensor | None]) -> None:
    """ValueError where torch.func asks for a gradient, which it cannot get of an operator from outside torch."""
    if torch.is_grad_enabled() and _transformed(tensors, "gradtracking"):
        raise ValueError(
            "the Triton kernels have no gradients for torch.func (grad, vjp, jacrev): take torch.autograd.grad, or "
            "pass backend='eager'"
        )


def refuse_rotation_gradients(rope, instead: str) -> None:
    """ValueError where a gradient of the rotation is wanted, of which the Triton kernels have none."""
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in rope or ()]):
        raise ValueError(
            "rope requires a gradient, and the Triton kernels compute none for it: pass it with .detach(), or "
            f"{instead}"
        )
