"""The rotation's (cos, sin) in the form the kernels read: one row of interleaved pairs per token.

All heads of a token read the same row from L2, so at float32 the angles would be half of a call's traffic there. Next to
half-precision inputs they are kept as float16: an error of 1.4e-4 (rms), where rounding the rotated features to bfloat16
adds 1.7e-3. Float32 inputs keep float32 angles.
"""

from __future__ import annotations

import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["interleaved_angles"]

# cos -> (weak reference to sin, both versions, dtype, packed); a model passes the same pair to every layer and step.
_PACKED = WeakIdKeyDictionary()


def _pack(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack((cos.detach().to(dtype), sin.detach().to(dtype)), dim=-1).flatten(1)


def interleaved_angles(rope, x: torch.Tensor) -> torch.Tensor | None:
    """`(N, D)` contiguous: cos, sin, cos, sin, ... of each token; None without a rotation."""
    if rope is None:
        return None
    cos, sin = rope
    dtype = torch.float32 if x.dtype == torch.float32 else torch.float16
    # An inference tensor does not tell when it was written to; a buffer made during a graph capture is the graph's.
    if cos.is_inference() or sin.is_inference() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        found = _PACKED.get(cos)
        return found[3] if _fits(found, cos, sin, dtype) else _pack(cos, sin, dtype)
    found = _PACKED.get(cos)
    if not _fits(found, cos, sin, dtype):
        found = (weakref.ref(sin), (cos._version, sin._version), dtype, _pack(cos, sin, dtype))
        _PACKED[cos] = found
    return found[3]


def _fits(found, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> bool:
    if found is None or cos.is_inference() or sin.is_inference():
        return False
    return found[0]() is sin and found[1] == (cos._version, sin._version) and found[2] == dtype
