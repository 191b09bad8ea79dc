"""Launch configurations of the Triton kernels, by kernel, GPU generation, head dim and dtype.

A small fixed table instead of autotuning: the first call is fast and every run takes the same kernel. The first entry
that a GPU can launch is used; `smaller` derives the steps down from it. Blocks shorter than a tile take a shorter tile.
Generation 9 is Hopper and newer (sm_90 and sm_100: 228 KiB of
shared memory; sm_120: 100), 8 everything before (sm_80 and sm_86, sm_89: 164 and 100 KiB, 64 KiB on Turing). Only sm_90
was measured, on one H200; what other parts take is a guess.
"""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

__all__ = [
    "Config", "DualConfig", "MixConfig", "MixGradientConfig", "Warps", "chunk_count", "dual_configs", "head_group",
    "head_parts", "launch_configs", "mix_configs", "overridden", "override", "overriding", "padded",
]  # fmt: skip


class Config(NamedTuple):
    """BN tokens and BV value channels per tile (of the first part, where there are two), warps, pipeline stages.

    maxnreg: registers of a thread at most, so that more programs share a multiprocessor; None: as many as it takes.
    """

    BN: int
    BV: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


class Warps(NamedTuple):
    """Of a kernel that has nothing else to choose."""

    num_warps: int
    num_stages: int = 1


class MixConfig(NamedTuple):
    """Tiles of the mixing GEMM: BM blocks, BP places in a state, BN summed blocks.

    TM: blocks that a program has beyond BM. With BM + TM for all blocks, every state is read by one program only.
    """

    BM: int
    BP: int
    BN: int
    num_warps: int
    num_stages: int
    TM: int = 0


class MixGradientConfig(NamedTuple):
    """Tiles of the GEMM for the coefficients' gradient: BM and BP blocks, BN summed places of their states."""

    BM: int
    BP: int
    BN: int
    num_warps: int
    num_stages: int


class DualConfig(NamedTuple):
    """The dual form: BM rows a program owns, BN columns per step. maxnreg: see `Config`."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


# (generation, bits of the dot operands, largest of the padded head dims) -> configuration.
# A state tile is BD x BV float32 whatever the dtype, hence the narrow tiles at head dim 256; float32 dots run on the
# ordinary cores and keep their operands in registers.
_TABLE = {
    (9, 16, 32): Config(128, 32, 4, 2),
    (9, 16, 64): Config(64, 64, 4, 2),
    (9, 16, 128): Config(64, 128, 8, 2),
    (9, 16, 256): Config(32, 32, 8, 1),
    (9, 32, 32): Config(64, 32, 4, 2),
    (9, 32, 64): Config(32, 32, 4, 2),
    (9, 32, 128): Config(32, 32, 8, 1),
    (9, 32, 256): Config(16, 16, 8, 1),
    (8, 16, 32): Config(64, 32, 4, 2),
    (8, 16, 64): Config(64, 64, 4, 2),
    (8, 16, 128): Config(32, 128, 8, 1),
    (8, 16, 256): Config(16, 32, 8, 1),
    (8, 32, 32): Config(32, 32, 4, 1),
    (8, 32, 64): Config(32, 32, 4, 1),
    (8, 32, 128): Config(16, 32, 8, 1),
    (8, 32, 256): Config(16, 16, 8, 1),
}
# The same key with a kernel's name in front, where that kernel wants something else.
_BY_KERNEL = {
    ("summarise", 9, 16, 128): Config(32, 128, 4, 4),
    ("summarise", 9, 16, 80): Config(64, 64, 4, 2),
    ("read_out", 9, 16, 80): Config(64, 64, 4, 2),
    ("query_gradients", 9, 16, 80): Config(64, 64, 4, 1, 128),
    ("key_gradients", 9, 16, 80): Config(64, 64, 4, 2, 128),
    ("read_out", 9, 16, 128): Config(64, 128, 4, 1),
    ("query_gradients", 9, 16, 128): Config(16, 128, 4, 3),
    ("key_gradients", 9, 16, 128): Config(64, 128, 8, 2, 128),
}
# Instead, where one tile holds a block: with two warps twice as many programs run at once. In a loop over tiles, two
# warps spill.
_ONE_TILE = {("summarise", 9, 16, 80): Config(64, 64, 2, 2)}
# Faster with rows to spare than with tiles too short for Hopper's matrix instructions.
_WHOLE_TILES = {("query_gradients", 9, 16, 80), ("key_gradients", 9, 16, 80)}
_MIX = {16: MixConfig(64, 256, 32, 4, 3), 32: MixConfig(32, 64, 32, 4, 2)}
_MIX_GRADIENT = {16: MixGradientConfig(64, 64, 64, 4, 4), 32: MixGradientConfig(32, 32, 32, 4, 2)}


_OVERRIDES: dict[str, object] = {}


@contextlib.contextmanager
def override(**choices):
    """Within the block, kernels (by name) start with these configurations, and `head_group`, `chunk_count`, `angles`
    (the kept rotation's dtype), `keep_states` or `pdl` take these values: for tuning and for tests. Nothing is replayed
    in it."""
    before = dict(_OVERRIDES)
    _OVERRIDES.update(choices)
    try:
        yield
    finally:
        _OVERRIDES.clear()
        _OVERRIDES.update(before)


def overriding() -> bool:
    return bool(_OVERRIDES)


def overridden(name: str, default):
    return _OVERRIDES.get(name, default)


@functools.cache
def head_parts(dim: int) -> tuple[int, int]:
    """A head dim as one power of two, or as two when that saves padding: 72 -> 64 + 16 (of which 8 are used)."""
    whole = padded(dim)
    first = whole // 2
    rest = padded(dim - first) if dim > first else 0
    return (first, rest) if 16 <= first < dim and first + rest < whole else (whole, 0)


def padded(size: int) -> int:
    """The next power of two, at least 16: tl.dot needs that much on every side."""
    return max(16, 1 << (size - 1).bit_length())


def fitted(config: Config, padded_dim: int, block_size: int) -> Config:
    """A tile no longer than the block needs, with fewer warps where it holds little."""
    tokens = padded(block_size)
    if tokens >= config.BN:
        return config
    # 1024 elements per warp, of the larger of the token tile and the state tile: 32 registers of a thread.
    warps = padded(padded_dim) * max(tokens, config.BV) // 1024
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


def launch_configs(
    generation: int, dot_bits: int, padded_dim: int, block_size: int, kernel: str = ""
) -> tuple[Config, ...]:
    """Configurations to try in order, the preferred one first.

    Args:
        generation: CUDA compute capability's major number (0 under the interpreter, which takes any).
        dot_bits: 16 for bf16 operands, 32 for float32 and tf32.
        padded_dim: the larger of the key and value head dims as `head_parts` pads it, 16 to 256.
        block_size: tokens of the longest block.
        kernel: summarise, read_out, query_gradients or key_gradients.
    """
    if kernel in _OVERRIDES:
        return (_OVERRIDES[kernel],)
    return _launch_configs(generation, dot_bits, max(padded_dim, 32), block_size, kernel)


@functools.cache  # every launch asks
def _launch_configs(
    generation: int, dot_bits: int, padded_dim: int, block_size: int, kernel: str
) -> tuple[Config, ...]:
    place = (9 if generation >= 9 or generation == 0 else 8, dot_bits)
    key = (kernel, *place, padded_dim)
    config: Config | None = _BY_KERNEL.get(key, _TABLE[*place, padded(padded_dim)])
    if key in _ONE_TILE and block_size <= _ONE_TILE[key].BN:
        config = _ONE_TILE[key]
    if key not in _WHOLE_TILES:
        config = fitted(config, padded_dim, block_size)
    configs = []
    while config is not None:
        configs.append(config)
        config = smaller(config)
    return tuple(configs)


def mix_configs(kernel: str, dot_bits: int, blocks: int, summed: int) -> tuple:
    """Tiles for `mix` or `mix_gradient`: no larger than the numbers of blocks ask for, then smaller ones."""
    if kernel in _OVERRIDES:
        return (_OVERRIDES[kernel],)
    return _mix_configs(kernel, dot_bits, blocks, summed)


@functools.cache
def _mix_configs(kernel: str, dot_bits: int, blocks: int, summed: int) -> tuple:
    config = (_MIX if kernel == "mix" else _MIX_GRADIENT)[dot_bits]
    config = config._replace(BM=min(config.BM, _tile(blocks)))
    if kernel == "mix":
        config = config._replace(BN=min(config.BN, _tile(summed)))
    else:
        config = config._replace(BP=min(config.BP, _tile(summed)))
        if blocks > 64:
            config = config._replace(num_stages=min(config.num_stages, 3))
    narrow = config._replace(BP=min(config.BP, 32), num_stages=1)
    return config, narrow, narrow._replace(BN=16)


# (kernel, generation, bits) -> configuration for head dims up to 128.
_DUAL = {
    ("dual_forward", 9, 16): DualConfig(128, 64, 4, 3),
    ("dual_query", 9, 16): DualConfig(64, 32, 4, 2),
    ("dual_key", 9, 16): DualConfig(64, 32, 4, 2),
    ("dual_forward", 9, 32): DualConfig(32, 32, 4, 1),
    ("dual_query", 9, 32): DualConfig(32, 32, 4, 1),
    ("dual_key", 9, 32): DualConfig(32, 32, 4, 1),
    ("dual_forward", 8, 16): DualConfig(64, 64, 4, 2),
    ("dual_query", 8, 16): DualConfig(64, 32, 4, 1),
    ("dual_key", 8, 16): DualConfig(64, 32, 4, 1),
    ("dual_forward", 8, 32): DualConfig(32, 16, 4, 1),
    ("dual_query", 8, 32): DualConfig(16, 16, 4, 1),
    ("dual_key", 8, 32): DualConfig(16, 16, 4, 1),
}
# Tried first up to a padded head dim of 80; at 128 these spill, and ptxas lets no two products overlap.
_NARROW_DUAL = {
    ("dual_query", 9, 16): DualConfig(64, 64, 4, 2, 168),
    ("dual_key", 9, 16): DualConfig(64, 64, 4, 3),
}


def dual_configs(kernel: str, generation: int, dot_bits: int, padded_dim: int) -> tuple[DualConfig, ...]:
    """Configurations of the dual form to try in order. Arguments: see `launch_configs`."""
    if kernel in _OVERRIDES:
        return (_OVERRIDES[kernel],)
    generation = 9 if generation >= 9 or generation == 0 else 8
    return _dual_configs(kernel, generation, dot_bits, padded_dim <= 80)


@functools.cache
def _dual_configs(kernel: str, generation: int, dot_bits: int, narrow: bool) -> tuple[DualConfig, ...]:
    place = kernel, generation, dot_bits
    configs = [_NARROW_DUAL[place]] if narrow and place in _NARROW_DUAL else []
    configs.append(_DUAL[place])
    while configs[-1].BM > 16:
        last = configs[-1]
        configs.append(last._replace(BM=last.BM // 2, BN=min(last.BN, last.BM // 2)))
    # Unpipelined only at the bottom: Triton 3.6 has compiled wrong code for one stage and 64 rows on Hopper.
    return (*configs, configs[-1]._replace(num_stages=1))


def _tile(length: int) -> int:
    return min(128, padded(length))


def head_group(heads: int, head_bytes: int) -> int:
    """Heads that run side by side: many share the angles in L2, few leave their states there for the next step."""
    fitting = [group for group in range(1, heads + 1) if heads % group == 0]
    fitting = [group for group in fitting if group * head_bytes <= 20 << 20 or group <= 4]
    return overridden("head_group", fitting[-1])


def chunk_count(programs: int, block_size: int) -> int:
    """Pieces that a block's tokens are cut into, so that few large blocks still fill the GPU: a power of two."""
    chunks = 1
    while programs * chunks < 264 and block_size > 512 * chunks and chunks < 64:
        chunks *= 2
    return overridden("chunk_count", chunks)
