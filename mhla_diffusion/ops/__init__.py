"""Attention operators. Needs torch only; Triton is imported when a kernel is first launched."""

from .attention import mhla_attention
from .backends import explain

__all__ = ["explain", "mhla_attention"]
