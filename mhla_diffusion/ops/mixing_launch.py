"""Launches the kernels that mix block states, and the one for the coefficients' gradient."""

from __future__ import annotations

import torch

from . import fallback, replay, triton_launch
from .states_mixing import mix_gradient_kernel, mix_kernel, spread_kernel
from .triton_configs import MixConfig, MixGradientConfig, Warps, mix_configs
from .triton_launch import ceil_div, power_of_two, start_first_fitting

__all__ = ["mix", "mix_gradient"]

_MIX_DOT = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "split"}


def _spread(matrix: torch.Tensor, columns: int, tile: int, width: int, split: bool) -> torch.Tensor:
    """The coefficients padded to whole tiles of rows and a power of two of columns, at least `width`,
    `([2,] matrices, rows, columns)`. Not kept: weights change unnoticed."""
    rows = matrix.shape[-2]
    padded_rows = ceil_div(rows, tile) * tile
    width = power_of_two(max(columns, width))
    matrices = matrix.shape[0] if matrix.ndim == 3 else 1
    shape = ((2,) if split else ()) + (matrices, padded_rows, width)
    out = replay.empty(shape, torch.bfloat16 if split else torch.float32, matrix.device)
    triton_launch.launch(
        spread_kernel, (padded_rows, matrices), Warps(1), matrix, out,
        matrix.stride(0) if matrix.ndim == 3 else 0, *matrix.stride()[-2:], rows, columns,
        columns // matrix.shape[-1], padded_rows, matrices, WIDTH=width, SPLIT=split,
    )  # fmt: skip
    return out


def _all_rows(config: MixConfig, rows: int) -> MixConfig:
    """The configuration with the rows beyond BM only where they make one program's rows all of them."""
    return config if config.BM < rows <= config.BM + config.TM else config._replace(TM=0)


def mix(
    matrix: torch.Tensor, states: torch.Tensor, x: torch.Tensor, value_dim: int, *, overwrite: bool = False
) -> torch.Tensor:
    """(Mq, Mk) or (H, Mq, Mk) float32 times states (B, H, Mk * chunks, K), in the states' dtype. x: dtype and dims.

    overwrite: the states are needed no more. Where a program has a state's place of every block, the result takes their
    memory: half of what the operator holds at its peak, and what fits into L2 is found there again.
    """
    batch, heads, columns, size = states.shape
    rows = matrix.shape[-2]
    split = states.dtype == x.dtype == torch.bfloat16
    configs = [_all_rows(config, rows) for config in mix_configs("mix", 16 if split else 32, rows, columns)]
    in_place = overwrite and rows == columns and all([rows <= config.BM + config.TM for config in configs])
    mixed = states if in_place else replay.empty((batch, heads, rows, size), states.dtype, states.device)
    kind = _MIX_DOT[x.dtype] if states.dtype == x.dtype else "tf32"

    def start(config: MixConfig) -> None:
        tile = config.BM + config.TM
        spread = _spread(matrix, columns, tile, config.BN, split)
        part = spread.numel() // (1 + split)
        sizes = (part // heads if matrix.ndim == 3 else 0, part, heads, rows, columns)
        grid = (ceil_div(rows, tile) * ceil_div(size, config.BP) * batch * heads,)
        triton_launch.launch(
            mix_kernel, grid, config, spread, states, mixed,
            *sizes, SIZE=size, WIDTH=spread.shape[-1], REVERSE=True, DOT=kind,
        )  # fmt: skip

    if not start_first_fitting("mix", x, value_dim, tuple(configs), (kind,), start):
        return fallback.mix(matrix, states, columns // matrix.shape[-1])
    return mixed


def mix_gradient(
    left: torch.Tensor, right: torch.Tensor, matrix, x: torch.Tensor, value_dim: int
) -> torch.Tensor:
    """Gradient of the coefficients: <gradient of mixed state i, state j>, summed over batch (and heads), float32.

    left (B, H, Mq * chunks, K), right (B, H, Mk * chunks, K); the result has the shape of `matrix`.
    """
    batch, heads, left_rows, size = left.shape
    right_rows = right.shape[2]
    kind = _MIX_DOT[x.dtype] if left.dtype == x.dtype else "tf32"
    configs = mix_configs("mix_gradient", 16 if kind == "split" else 32, left_rows, right_rows)
    run = min(4096, power_of_two(size))
    parts = ceil_div(size, run)
    matrix_ndim = matrix.ndim  # a plan must not keep the matrix
    out = replay.empty((batch, heads, parts, left_rows, right_rows), torch.float32, x.device)

    def start(config: MixGradientConfig) -> None:
        tiles = ceil_div(left_rows, config.BM) * ceil_div(right_rows, config.BP)
        triton_launch.launch(
            mix_gradient_kernel, (tiles * batch * heads * parts,), config, left, right, out,
            left_rows, right_rows, parts, SIZE=size, RUN=max(run, config.BN), DOT=kind,
        )  # fmt: skip

    if not start_first_fitting("mix_gradient", x, value_dim, configs, (kind,), start):
        out = (left.float() @ right.float().transpose(-1, -2))[:, :, None]
    rows, columns = matrix.shape[-2:]
    chunks = (rows, left_rows // rows, columns, right_rows // columns)

    def summed(x: torch.Tensor) -> torch.Tensor:
        x = x.sum(dim=(0, 2) if matrix_ndim == 3 else (0, 1, 2))
        return x.view(*x.shape[:-2], *chunks).sum(dim=(-3, -1))

    return replay.computed(summed, out)
