"""The rotation in the form the kernels read, kept as long as what it was made from is unchanged.

A model passes the same (cos, sin) to every layer and step: they are brought into shape once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .triton_configs import overridden

__all__ = ["derived", "interleaved_angles"]

# source -> (version of the source, {key: derived tensor})
_KEPT = WeakIdKeyDictionary()
# Of one source. Angles of a long video take tens of megabytes, and a program that serves any size meets ever new ones.
MOST = 8


def derived(source: torch.Tensor, key: Hashable, build: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`build()`, or its result of an earlier call if `source` was not written to since; the last `MOST` of them.

    Not kept: what comes from an inference tensor, which does not tell when it was written to, and what is made while
    a CUDA graph is captured, because that buffer is the graph's. Not meant for weights: optimizers write to `.data`,
    which leaves no trace.
    """
    if source.is_inference() or (source.is_cuda and torch.cuda.is_current_stream_capturing()):
        return build()
    kept = _KEPT.get(source)
    if kept is None or kept[0] != source._version:
        kept = _KEPT[source] = (source._version, {})
    # A view made anew at each call finds nothing and is forgotten with its object.
    found = kept[1].get(key)
    if found is None:
        found = build()
        for oldest in list(kept[1])[: 1 - MOST]:
            kept[1].pop(oldest, None)  # another thread may drop it, too
        kept[1][key] = found
    return found


def interleaved_angles(rope: tuple[torch.Tensor, torch.Tensor], inputs: torch.dtype) -> torch.Tensor:
    """`(N, D)` contiguous: cos, sin, cos, sin, ... of each token, the form in which the kernels read a rotation.

    All heads of a token read its row from L2, so at float32 the angles would be half of a call's traffic there. Next to
    half-precision inputs they are kept as float16: an error of 2e-4 of a feature's length, where rounding the turned
    features to bfloat16 adds 1.7e-3. Float32 inputs keep float32 angles.
    """
    cos, sin = rope
    dtype = overridden("angles", torch.float32 if inputs == torch.float32 else torch.float16)

    def build() -> torch.Tensor:
        return torch.stack((cos.detach().to(dtype), sin.detach().to(dtype)), dim=-1).flatten(1)

    if sin.is_inference():
        return build()
    # Only the dictionary's key keeps its owner apart by identity; the partner is told by a weak reference.
    return derived(cos, (dtype, weakref.ref(sin), sin._version), build)
