"""Operators of the dispatcher with no Python between, and gradients through them where nothing is compiled.

A `torch.library.custom_op` with gradients takes the host several times as long to call as the dispatcher alone, in its
own part of autograd and in checks of what it returns: of small tensors more than their kernels take. A compiler needs
it, to see one node with known gradients; an eager call does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .replay import on_its_device, replayed

__all__ = ["differentiable", "plain_operator"]

_LIBRARY = torch.library.Library("mhla_diffusion", "FRAGMENT")


def plain_operator(
    name: str,
    call: Callable,
    fake: Callable,
    *,
    run: Callable | None = None,
    first: bool = False,
    repeat: bool = True,
):
    """The operator `mhla_diffusion::<name>` without gradients, with the arguments and the results of `call`.

    fake: `call` on tensors without data. run: what computes it, `call` unless given. first: it returns the first result
    alone. repeat: its launches are written down and repeated, see `replay`.
    """
    run = run or call

    def computed(*args, **kwargs):
        return run(*args, **kwargs)[0] if first else run(*args, **kwargs)

    def unseen(*args, **kwargs):
        return fake(*args, **kwargs)[0] if first else fake(*args, **kwargs)

    kernel = functools.wraps(call)(computed)
    arguments, _, results = torch.library.infer_schema(call, mutates_args=()).partition(" -> ")
    _LIBRARY.define(
        f"{name}{arguments} -> {'Tensor' if first else results}", tags=(torch.Tag.pt2_compliant_tag,)
    )
    _LIBRARY.impl(name, on_its_device(replayed(kernel) if repeat else kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"mhla_diffusion::{name}", unseen, lib=_LIBRARY)
    return getattr(torch.ops.mhla_diffusion, name).default


def differentiable(compiled: Callable, eager: Callable, setup: Callable, backward: Callable) -> Callable:
    """A function of an operator's arguments that returns its first (or only) result, with gradients.

    compiled: the custom operator, for a compiler. eager: the same without gradients. setup, backward: as
    `register_autograd` takes them, of all results, of which none but the first gets a gradient.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            outputs = eager(*inputs)
            setup(ctx, inputs, outputs)
            return outputs if isinstance(outputs, torch.Tensor) else outputs[0]

        @staticmethod
        def backward(ctx, grad):
            return backward(ctx, grad)

    def call(*inputs):
        if torch.compiler.is_compiling():
            outputs = compiled(*inputs)
            return outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        return Function.apply(*inputs)

    return call
