"""Launch configurations that the tuning program tries, likely ones first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..ops.triton_configs import Config, DualConfig, MixConfig, MixGradientConfig

__all__ = ["candidates", "kind_of", "with_fewer_registers"]

# Registers of a thread with which 3, 4, 5 and 6 programs of 4 warps (or 2 and 3 of 8) fit a multiprocessor.
REGISTERS = {4: (168, 128, 96, 80), 8: (128, 80)}


def candidates(kernel: str, dim: int) -> Iterator:
    """Configurations worth a try, likely ones first."""
    if kernel.startswith("dual"):
        yield from (
            DualConfig(rows, columns, warps, depth)
            for depth, rows, columns, warps in itertools.product(
                (2, 3), (64, 128), (32, 64, 128, 256), (4, 8)
            )
            if rows * columns <= 32 * 32 * warps * (4 if kernel == "dual_forward" else 2)
        )
    elif kernel == "mix":
        yield from (
            MixConfig(128, places, summed, warps, depth, 64)  # all of 129 to 192 blocks
            for places, summed, warps, depth in (
                (128, 32, 8, 3), (128, 32, 8, 2), (128, 64, 8, 2),
                (128, 32, 16, 3), (64, 32, 4, 3), (64, 32, 8, 3), (128, 16, 8, 4),
            )
        )  # fmt: skip
        yield from (
            MixConfig(rows, places, summed, warps, depth)
            for rows, places, summed, warps, depth in itertools.product(
                (64, 128), (64, 128, 256), (32, 64), (4, 8), (2, 3, 4)
            )
            if rows * places // warps in (1024, 2048, 4096)
        )
    elif kernel == "mix_gradient":
        yield from (
            MixGradientConfig(rows, columns, places, warps, depth)
            for rows, columns, places, warps, depth in itertools.product(
                (32, 64, 128), (32, 64, 128), (64, 128), (4, 8), (3, 4)
            )
            if rows * columns // warps in (512, 1024, 2048)
        )
    else:
        values = 32 if dim <= 32 else 64 if dim <= 96 else 128
        yield from (
            Config(tokens, values, warps, depth)
            for tokens, warps, depth in itertools.product((32, 64, 128, 16), (4, 8), (2, 3, 4, 1))
            if tokens * depth <= 256 and not (kernel == "read_out" and tokens < 32)
        )
        if values < 128:  # below four warps there are no warp-group products, but more programs at once
            yield from (
                Config(tokens, values, warps, depth)
                for tokens, warps, depth in itertools.product((32, 64), (2, 1), (2, 1, 3))
            )
        if values == 128:  # twice the warps, as many programs: only a limit on their registers allows both
            yield from (Config(tokens, values, 8, depth, 128) for tokens in (32, 64) for depth in (2, 3))
        if kernel == "read_out" and values > 32:
            yield from (Config(64, values // 2, 4, depth) for depth in (2, 3))


def kind_of(kernel: str) -> type:
    kinds = {"mix": MixConfig, "mix_gradient": MixGradientConfig}
    return DualConfig if kernel.startswith("dual") else kinds.get(kernel, Config)


def with_fewer_registers(rows: list[dict]) -> list:
    """The two fastest configurations again, with limits on a thread's registers that let more programs run at once."""
    kind = kind_of(rows[0]["kernel"])
    best = [row["config"] for row in rows if "ms" in row and row["config"] != "table"][:2]
    if kind in (MixConfig, MixGradientConfig):
        return []
    return [kind(*config)._replace(maxnreg=most) for config in best for most in REGISTERS.get(config[2], ())]
