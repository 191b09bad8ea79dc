"""Attention operators. Needs torch only; Triton is imported when a kernel is first launched."""

from .attention import mhla_attention
from .backends import explain
from .parallel import parallel_mhla_attention
from .rotation import GridRope
from .share import Share

__all__ = ["GridRope", "Share", "explain", "mhla_attention", "parallel_mhla_attention"]
