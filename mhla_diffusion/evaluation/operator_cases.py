"""The shapes at which the operator is measured, and random inputs for them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..mixing import initial_mixing
from ..ops import mhla_attention
from ..ops.rotation import GridRope

__all__ = ["CASES", "EVEN", "FORM_CASES", "SCALING", "Case", "Inputs", "floors", "shape_of", "small"]


class Case(NamedTuple):
    """One shape.

    fused: q and k before their norms, output norm and gate in the store. graph: timed as a CUDA graph's replay.
    target, ratio: of forward and of both directions, at most ms, at least times faster than cuDNN's softmax.
    memory: at most MB that a forward pass takes beside its output. like: the case whose time for a token counts.
    """

    name: str
    batch: int
    heads: int
    grid: tuple[int, ...]
    block_grid: tuple[int, ...]
    dim: int
    normalizer: str = "paper"
    rope: bool = False
    fused: bool = False
    graph: bool = False
    backward: bool = False
    target: tuple[float | None, float | None] = (None, None)
    ratio: tuple[float | None, float | None] = (None, None)
    memory: float | None = None
    like: str = ""


WAN = {"heads": 12, "block_grid": (3, 5, 10), "dim": 128, "rope": True, "normalizer": "none"}
EVEN = "wan 480x800x81"
CASES = [
    Case(EVEN, 1, grid=(21, 30, 50), backward=True, target=(0.20, 0.90), ratio=(50, 44), memory=140, **WAN),
    Case(f"{EVEN}, paper", 1, grid=(21, 30, 50), target=(0.24, None), **{**WAN, "normalizer": "paper"}),
    Case(f"{EVEN}, norms and gate", 1, grid=(21, 30, 50), fused=True, target=(0.28, None), **WAN),
    Case("wan 480x832x81, ragged", 1, grid=(21, 30, 52), like=EVEN, **WAN),
    Case("wan 720p", 1, grid=(21, 45, 80), target=(0.45, None), ratio=(130, None), **WAN),
    Case("sana 4K", 2, 36, (128, 128), (8, 8), 32, backward=True, target=(0.12, 0.50)),
    Case("sana 1K, graph", 2, 36, (32, 32), (4, 4), 32, graph=True, target=(0.020, None), ratio=(1, None)),
    Case("dit 256", 32, 16, (16, 16), (4, 4), 72, backward=True, ratio=(1, 1)),
    Case("dit 512", 16, 16, (32, 32), (4, 4), 72, backward=True, ratio=(2, 2)),
]
# Both forms at each, to fit the rule that chooses between them; of large grids those between the forms.
FORM_CASES = [
    Case(f"{side}^2 tokens, {n}^2 blocks, {dim}", batch, 16, (side, side), (n, n), dim, backward=True)
    for side, batch in ((8, 64), (16, 32), (24, 16), (32, 16), (48, 4))
    for n in (2, 4, 8)
    for dim in (32, 72, 128)
    if side * side // n**2 >= 4 and (side <= 16 or dim == 72 or (n, dim) in ((2, 32), (8, 128)))
]
# Time against the number of tokens, at Wan's heads.
SCALING = [
    Case(f"{rows * columns} tokens", 1, 12, (rows, columns), (8, 8), 128)
    for rows, columns in (
        (32, 32), (64, 32), (64, 64), (128, 64), (128, 128), (256, 128), (256, 256), (512, 256),
    )
]  # fmt: skip


def small(case: Case) -> Case:
    """The case at a size that a CPU computes at once, to try a program out."""
    if case in SCALING:
        grid = tuple([length // 4 for length in case.grid])
        name = f"{math.prod(grid)} tokens"
    else:
        axes = zip(case.grid, case.block_grid, strict=True)
        grid = tuple([min(length, 2 * count + length % count) for length, count in axes])
        name = f"{case.name}, small"
    nothing = (None, None)
    return case._replace(
        name=name, batch=1, heads=2, grid=grid, dim=min(case.dim, 24), graph=False, target=nothing, ratio=nothing,
        memory=None, like="",
    )  # fmt: skip


def shape_of(case: Case) -> dict[str, int]:
    return {
        "B": case.batch, "H": case.heads, "N": math.prod(case.grid), "D": case.dim, "M": math.prod(case.block_grid),
    }  # fmt: skip


def floors(case: Case, item: int, bandwidth: float, rate: float, backward: bool = False) -> dict[str, float]:
    """Least traffic (inputs read once, results written once) and least arithmetic of a call, in MB and GFLOP, and the
    ms that they take at the device's measured bandwidth (bytes/s) and rate of products (FLOP/s)."""
    tokens, blocks, lines = math.prod(case.grid), math.prod(case.block_grid), case.batch * case.heads
    # Forward: q, k, v, the output (and the gate). Backward: q, k, v, the output's gradient and three gradients.
    rows = (5 if case.fused else 4) + (7 if backward else 0)
    moved = rows * lines * tokens * case.dim * item
    states = lines * (4 * tokens + 2 * blocks**2) * case.dim**2
    products = min(states, 4 * lines * tokens**2 * case.dim) * (3 if backward else 1)
    return {
        "bytes_mb": moved / 1e6,
        "byte_floor_ms": 1e3 * moved / bandwidth,
        "gflop": products / 1e9,
        "flop_floor_ms": 1e3 * products / rate,
    }


class Inputs:
    """Random inputs of a case, and our calls on them."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype, seed: int):
        self.case = case
        generator = torch.Generator(device).manual_seed(seed)
        tokens = math.prod(case.grid)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        shape = (case.batch, tokens, case.heads, case.dim)
        self.q, self.k, self.v, self.grad = (random(*shape) for _ in range(4))
        self.mixing = initial_mixing(case.block_grid).to(device).float()
        self.mixing = self.mixing * (0.5 + torch.rand(self.mixing.shape, generator=generator, device=device))
        self.options: dict = {"grid": case.grid, "block_grid": case.block_grid, "normalizer": case.normalizer}
        if case.rope:
            self.options["rope"] = GridRope(axial_frequencies(len(case.grid), case.dim).to(device))
        if case.fused:
            weights = [(1 + 0.1 * random(case.heads, case.dim), 1e-6) for _ in range(2)]
            self.options.update(
                query_norm=weights[0], key_norm=weights[1], gate=random(*shape), gate_bias=1.2784645
            )
            self.options["norm_weight"] = 1 + 0.1 * random(case.dim)

    def leaves(self, backward: bool) -> list[torch.Tensor]:
        """q, k, v, mixing, as fresh leaves when gradients are wanted."""
        tensors = [self.q, self.k, self.v, self.mixing]
        return [x.detach().requires_grad_() for x in tensors] if backward else tensors

    def forward(self, **choices) -> torch.Tensor:
        return mhla_attention(self.q, self.k, self.v, self.mixing, **self.options, **choices)

    def both(self, **choices) -> tuple[torch.Tensor, ...]:
        leaves = self.leaves(True)
        return torch.autograd.grad(mhla_attention(*leaves, **self.options, **choices), leaves, self.grad)

    def error(self, backward: bool) -> float:
        """Largest relative error of the output (and of dq, dk, dv) of one head of one item against float64."""
        tensors = [x[:1, :, :1].double().requires_grad_() for x in (self.q, self.k, self.v)]
        options = {name: _double(x) for name, x in self.options.items()}
        if self.case.fused:
            # The norms run over all heads: give the slice its share as an already normed input.
            for i, name in ((0, "query_norm"), (1, "key_norm")):
                x, (weight, eps) = (self.q, self.k)[i].double()[:1], options.pop(name)
                normed = x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + eps) * weight
                tensors[i] = normed[:, :, :1].clone().requires_grad_()
            options["gate"] = options["gate"][:1, :, :1]
        truth = mhla_attention(*tensors, self.mixing.double(), backend="reference", **options)
        pairs = [(self.forward()[:1, :, :1], truth)]
        if backward:
            pairs += zip(
                (x[:1, :, :1] for x in self.both()[:3]),
                torch.autograd.grad(truth, tensors, self.grad[:1, :, :1].double()),
                strict=True,
            )
        return max(float(((got - want).norm() / want.norm()).detach()) for got, want in pairs)


def axial_frequencies(axes: int, dim: int, base: float = 10000.0) -> torch.Tensor:
    """`(axes, dim / 2)` float32: each pair of channels follows one axis, with a geometric series on each, as in Wan."""
    pairs = [dim // 2 // axes + (axis < dim // 2 % axes) for axis in range(axes)]
    frequencies, begin = torch.zeros(axes, dim // 2), 0
    for axis, count in enumerate(pairs):
        frequencies[axis, begin : begin + count] = base ** -(torch.arange(count) / count)
        begin += count
    return frequencies


def _double(x):
    if isinstance(x, GridRope):
        return x
    if isinstance(x, tuple):
        return tuple(map(_double, x))
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
