"""What the operator is timed beside, on the same inputs in the same run.

Softmax attention of torch with each of its fast backends, plain linear attention (one summary of all tokens), MHLA
spelled out in matmuls, and the chunked linear attention of the `fla` package where it is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..ops.eager import (
    epilogue,
    features,
    from_blocks,
    mask_padding,
    mix_states,
    normalise,
    read_out,
    rotate,
    row_sums,
    summarise,
    to_blocks,
)
from ..ops.partition import grid_partition
from ..ops.rotation import angle_tables, three_axes
from .operator_cases import Inputs
from .timing import graphed, milliseconds

__all__ = ["COMPILED", "CUDNN", "mhla_by_matmuls", "peer_names", "plain_linear", "time_peers"]

CUDNN = "SDPA cuDNN"
FLASH = "SDPA FlashAttention-2"
FLA = "FLA chunked (causal)"
LINEAR, MATMULS = "plain linear", "MHLA by matmuls"
COMPILED = (f"{LINEAR}, compiled", f"{MATMULS}, compiled")
LIMIT_MS = 1000.0  # a peer whose call takes longer is not timed further, nor at more tokens


def peer_names(device: torch.device) -> list[str]:
    softmax = [CUDNN, FLASH] if device.type == "cuda" else ["SDPA"]
    return [*softmax, f"{LINEAR}, eager", f"{MATMULS}, eager", FLA, *COMPILED]


# Each takes q, k, v, mixing and the options of our call on them, and returns the output.


def softmax(q, k, v, mixing, options: dict) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def plain_linear(q, k, v, mixing, options: dict) -> torch.Tensor:
    """One summary of all keys: same feature map and denominator, in the inputs' dtype."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k = F.relu(q) + 1e-6, F.relu(k) + 1e-6
    out = q @ (k.transpose(-1, -2) @ v)
    if options["normalizer"] != "none":
        out = out / (q * k.float().sum(-2, keepdim=True).to(q.dtype)).sum(-1, keepdim=True)
    return out.transpose(1, 2)


def mhla_by_matmuls(q, k, v, mixing, options: dict) -> torch.Tensor:
    """The same function as ours in torch's matmuls, everything in the inputs' dtype, as autocast would have it."""
    part = grid_partition(options["grid"], options["block_grid"], q.shape[1], q.device)
    rope, dtype, divide = options.get("rope"), v.dtype, options["normalizer"] == "paper"
    rope = None if rope is None else angle_tables((three_axes(rope.frequencies), None), part)
    q, k = normalise(q, options.get("query_norm")), normalise(k, options.get("key_norm"))
    phi_q = features(q, part, 1e-6, dtype)
    phi_k = mask_padding(features(k, part, 1e-6, dtype), part)
    state = mix_states(mixing.to(dtype), summarise(rotate(phi_k, rope, part), to_blocks(v, part)))
    out = read_out(rotate(phi_q, rope, part), state)
    if divide:
        out = out / row_sums(phi_q, mix_states(mixing.to(dtype), phi_k.sum(dim=-2)))
    out = from_blocks(out, part)
    after = {name: options.get(name) for name in ("norm_weight", "gate", "gate_bias", "local")}
    return epilogue(out, norm_eps=1e-6, **after).to(dtype)


def chunked_linear(q, k, v, mixing, options: dict) -> torch.Tensor:
    """Causal, which ours is not, without a denominator, and with features given: what its kernels can do at best."""
    attend = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    return attend(q, k, v, scale=1.0, normalize=False)[0]


def _call(function: Callable, inputs: Inputs, backward: bool) -> Callable[[], object]:
    def run() -> object:
        leaves = inputs.leaves(backward)
        out = function(*leaves, inputs.options)
        if not backward:
            return out
        return torch.autograd.grad(out, leaves, inputs.grad, allow_unused=True)  # most have no mixing

    return run


def _peer(name: str) -> tuple[Callable, SDPBackend | None]:
    """The function of a peer and the backend of softmax attention that it asks for."""
    if name.startswith("SDPA"):
        return softmax, {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}.get(name)
    if name == FLA:
        return chunked_linear, None
    function = plain_linear if name.startswith(LINEAR) else mhla_by_matmuls
    if name in COMPILED:
        torch.compiler.reset()
        function = torch.compile(function, fullgraph=True, dynamic=False)
    return function, None


def _seconds_of_one(call: Callable[[], object], device: torch.device) -> float:
    for _ in range(2):  # the first compiles and warms up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "not installed"
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).splitlines() or [type(error).__name__]
    return f"does not run: {lines[0]}"[:200]


def time_peers(
    names: Sequence[str], sets: Sequence[Inputs], backward: bool, device: torch.device, repeats: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Median milliseconds of each peer that runs, and for the others why they were not timed."""
    times, reasons = {}, {}
    for name in names:
        try:
            if name == FLA and device.type != "cuda":
                importlib.import_module("fla")
                raise RuntimeError("it needs a CUDA device")
            function, backend = _peer(name)
            calls = [_call(function, inputs, backward) for inputs in sets]
            with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                if sets[0].case.graph and device.type == "cuda":
                    calls = [graphed(call) for call in calls]
                one = 1e3 * _seconds_of_one(calls[0], device)
                if one > LIMIT_MS:
                    reasons[name] = f"stopped: one call took {one:.0f} ms"
                else:
                    times[name] = milliseconds(calls, device, repeats if one < 30 else min(repeats, 5))
        except Exception as error:  # a peer that fails must not cost the others' measurements
            reasons[name] = _reason(error)
    return times, reasons
