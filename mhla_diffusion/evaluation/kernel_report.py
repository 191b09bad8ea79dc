"""What each compiled kernel takes of the GPU: registers, spills, shared memory, beside its time alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

from .operator_cases import Case, Inputs
from .timing import milliseconds

__all__ = ["launches", "least_products", "report"]


class _Watched:
    """Stands in for a kernel and keeps what its launches return, which is the compiled kernel."""

    def __init__(self, kernel, found: list[dict]):
        self._kernel, self._found = kernel, found

    def __getitem__(self, grid):
        def start(*args, **kwargs):
            compiled = self._kernel[grid](*args, **kwargs)
            self._found.append(_facts(self._kernel, grid, compiled))
            return compiled

        return start

    def __getattr__(self, name: str):
        return getattr(self._kernel, name)


def _facts(kernel, grid, compiled) -> dict:
    facts = {"kernel": kernel.fn.__name__, "programs": math.prod(grid)}
    metadata = getattr(compiled, "metadata", None)  # Triton's interpreter compiles nothing
    if metadata is not None:
        facts |= {
            "registers": compiled.n_regs,
            "spills": compiled.n_spills,
            "shared_bytes": metadata.shared,
            "warps": metadata.num_warps,
            "stages": metadata.num_stages,
        }
    return facts


@contextlib.contextmanager
def launches() -> Iterator[list[dict]]:
    """Within the block, every kernel that the operator starts adds a line to the list."""
    from ..ops import triton_launch
    from ..ops.triton_configs import override

    found: list[dict] = []
    launch = triton_launch.launch

    def watched(kernel, *args, **kwargs):
        return launch(_Watched(kernel, found), *args, **kwargs)

    triton_launch.launch = watched
    try:
        with override(replay=False):  # a replayed launch would pass unseen
            yield found
    finally:
        triton_launch.launch = launch


def least_products(case: Case, step: str) -> int:
    """FLOP of one step (for dual_query and dual_key: both), without what padding and the split of bfloat16 add."""
    tokens, blocks = math.prod(case.grid), math.prod(case.block_grid)
    lines, square = case.batch * case.heads, case.dim**2
    return {
        "summarise": 2 * lines * tokens * square,
        "mix": 2 * lines * blocks**2 * square,
        "read_out": 2 * lines * tokens * square,
        "query_gradients": 4 * lines * tokens * square,
        "key_gradients": 4 * lines * tokens * square,
        "mix_gradient": 2 * lines * blocks**2 * square,
        "dual_forward": 4 * lines * tokens**2 * case.dim,
    }.get(step, 10 * lines * tokens**2 * case.dim)


def report(case: Case, device: torch.device, dtype: torch.dtype, repeats: int, sets: int = 2) -> list[dict]:
    """Every step of a case alone: time, achieved bandwidth and rate, and what its kernels take."""
    from .tune_operator import kernels_of, least_bytes, stages

    calls = [stages(Inputs(case, device, dtype, seed)) for seed in range(sets)]
    rows = []
    for step in kernels_of(case):
        with launches() as found:
            calls[0][step]()
        ms = milliseconds([call[step] for call in calls], device, repeats)
        rows.append(
            {
                "name": case.name,
                "step": step,
                "ms": ms,
                "gb_per_s": least_bytes(case, step, dtype.itemsize) / ms / 1e6,
                "tflop_per_s": least_products(case, step) / ms / 1e9,
                "launches": list(found),
            }
        )
    return rows
