"""Attention operators. Needs torch only; Triton is imported when a kernel is first launched."""

from .attention import mhla_attention
from .backends import explain
from .rotation import GridRope

__all__ = ["GridRope", "explain", "mhla_attention"]
