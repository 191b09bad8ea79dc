"""Launch configurations of the Triton kernels, by GPU generation, head dim and dtype.

A small fixed table instead of autotuning: the first call is fast and every run takes the same kernel. The first entry
that a GPU can launch is used; `smaller` derives the steps down from it. Blocks shorter than a tile take a shorter tile.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

__all__ = ["Config", "launch_configs", "padded"]


class Config(NamedTuple):
    """BN tokens and BV value channels per tile, warps per program, stages of the software pipeline."""

    BN: int
    BV: int
    num_warps: int
    num_stages: int


# (generation, bits of the dot operands, largest of the padded head dims) -> configuration.
# Generation 9 is Hopper and newer (228 KiB of shared memory), 8 everything before (100 to 164 KiB, 64 KiB on Turing).
# A state tile is BD x BV float32 whatever the dtype, hence the narrow tiles at head dim 256; float32 dots run on the
# ordinary cores and keep their operands in registers.
_TABLE = {
    (9, 16, 32): Config(128, 32, 4, 2),
    (9, 16, 64): Config(64, 64, 4, 2),
    (9, 16, 128): Config(64, 64, 8, 2),
    (9, 16, 256): Config(32, 32, 8, 1),
    (9, 32, 32): Config(64, 32, 4, 2),
    (9, 32, 64): Config(32, 32, 4, 2),
    (9, 32, 128): Config(32, 32, 8, 1),
    (9, 32, 256): Config(16, 16, 8, 1),
    (8, 16, 32): Config(64, 32, 4, 2),
    (8, 16, 64): Config(64, 32, 4, 2),
    (8, 16, 128): Config(32, 32, 4, 2),
    (8, 16, 256): Config(16, 32, 8, 1),
    (8, 32, 32): Config(32, 32, 4, 1),
    (8, 32, 64): Config(32, 32, 4, 1),
    (8, 32, 128): Config(16, 32, 8, 1),
    (8, 32, 256): Config(16, 16, 8, 1),
}


def padded(size: int) -> int:
    """The next power of two, at least 16: tl.dot needs that much on every side."""
    return max(16, 1 << (size - 1).bit_length())


def fitted(config: Config, padded_dim: int, block_size: int) -> Config:
    """A tile no longer than the block needs, with fewer warps where it holds little."""
    tokens = padded(block_size)
    if tokens >= config.BN:
        return config
    # 1024 elements per warp, of the larger of the token tile and the state tile: 32 registers of a thread.
    warps = padded_dim * max(tokens, config.BV) // 1024
    return config._replace(BN=tokens, num_warps=min(config.num_warps, max(1, warps)))


def smaller(config: Config) -> Config | None:
    """The next configuration down in shared memory, or None at the bottom."""
    if config.num_stages > 1:
        return config._replace(num_stages=1)
    if config.BN > 16:
        return config._replace(BN=config.BN // 2)
    if config.BV > 16:
        return config._replace(BV=config.BV // 2)
    return None


@cache  # every launch asks
def launch_configs(generation: int, dot_bits: int, padded_dim: int, block_size: int) -> tuple[Config, ...]:
    """Configurations to try in order, the preferred one first.

    Args:
        generation: CUDA compute capability's major number (0 under the interpreter, which takes any).
        dot_bits: 16 for bf16 operands, 32 for float32 and tf32.
        padded_dim: the larger of the key and value head dims, rounded up to a power of two, 16 to 256.
        block_size: tokens of the longest block.
    """
    padded_dim = max(padded_dim, 32)
    config: Config | None = fitted(
        _TABLE[9 if generation >= 9 or generation == 0 else 8, dot_bits, padded_dim], padded_dim, block_size
    )
    configs = []
    while config is not None:
        configs.append(config)
        config = smaller(config)
    return tuple(configs)
