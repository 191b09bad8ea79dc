"""Speed of the operator beside its peer, softmax attention, measured in the same run.

`python -m mhla_diffusion.evaluation.speed` measures 4096 tokens, 8 heads of 64 channels; options are in `--help`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from ..mixing import initial_mixing
from ..ops import explain, mhla_attention

__all__ = ["operator_vs_sdpa"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of a call, after two that warm caches and compile kernels."""
    times = []
    for step in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if step >= 2:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _versions(device: torch.device) -> str:
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if device.type == "cuda":
        import triton

        parts.append(f"Triton {triton.__version__}")
    return ", ".join(parts)


def _floors(grid, block_grid, heads: int, head_dim: int, batch: int, dtype: torch.dtype) -> dict[str, float]:
    """Least traffic (q, k, v read once, the output written once) and the arithmetic of both operators, forward."""
    tokens, blocks = math.prod(grid), math.prod(block_grid)
    item = torch.finfo(dtype).bits // 8
    lines = batch * heads
    return {
        "megabytes": 4 * lines * tokens * head_dim * item / 1e6,
        "mhla_gflop": lines * (4 * tokens * head_dim**2 + 2 * blocks**2 * head_dim * (head_dim + 1)) / 1e9,
        "sdpa_gflop": 4 * lines * tokens**2 * head_dim / 1e9,
    }


def operator_vs_sdpa(
    grid: Sequence[int] = (64, 64),
    block_grid: Sequence[int] = (8, 8),
    *,
    heads: int = 8,
    head_dim: int = 64,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backward: bool = False,
    repeats: int = 5,
    backend: str = "auto",
) -> dict:
    """Time `mhla_attention` and `scaled_dot_product_attention` on the same random inputs and print both.

    Args:
        grid, block_grid: token grid and blocks per axis.
        heads, head_dim, batch, dtype, device: of q, k and v.
        backward: also time the gradients of q, k and v.
        repeats: timed calls, of which the median is taken.

    Returns:
        The printed figures: settings, `ratio` = SDPA's time / ours, per pass `{"mhla_ms", "sdpa_ms", "ratio"}`.
    """
    device = torch.device(device)
    shape = (batch, math.prod(grid), heads, head_dim)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
    mixing = initial_mixing(block_grid).to(device)
    grad = torch.randn(shape, generator=generator).to(device, dtype)

    def mhla() -> torch.Tensor:
        return mhla_attention(q, k, v, mixing, grid=grid, block_grid=block_grid, backend=backend)

    def sdpa() -> torch.Tensor:
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2)

    result = {
        "device": _device_name(device),
        "versions": _versions(device),
        "shape": shape,
        "block_grid": tuple(block_grid),
        "dtype": str(dtype).removeprefix("torch."),
        "backend": explain(q, backend=backend),
        "peer": "torch.nn.functional.scaled_dot_product_attention",
        **_floors(grid, block_grid, heads, head_dim, batch, dtype),
    }
    with torch.inference_mode():
        ours, theirs = (_milliseconds(call, device, repeats) for call in (mhla, sdpa))
    result["forward"] = {"mhla_ms": ours, "sdpa_ms": theirs, "ratio": theirs / ours}
    if backward:
        inputs = [x.requires_grad_() for x in (q, k, v)]

        def both(call: Callable[[], torch.Tensor]) -> Callable[[], object]:
            return lambda: torch.autograd.grad(call(), inputs, grad)

        ours, theirs = (_milliseconds(both(call), device, repeats) for call in (mhla, sdpa))
        result["forward+backward"] = {"mhla_ms": ours, "sdpa_ms": theirs, "ratio": theirs / ours}
    result["ratio"] = result["forward"]["ratio"]
    _print(result)
    return result


def _print(result: dict) -> None:
    print(f"{result['device']} · {result['versions']}")
    print(
        f"(batch, tokens, heads, head dim) = {result['shape']} · blocks {result['block_grid']} · {result['dtype']} · "
        f"{result['backend']}"
    )
    print(
        f"floors, forward: {result['megabytes']:.1f} MB in and out · "
        f"{result['mhla_gflop']:.2f} GFLOP MHLA, {result['sdpa_gflop']:.2f} GFLOP softmax"
    )
    for name in ("forward", "forward+backward"):
        if name in result:
            row = result[name]
            print(
                f"{name:>16}: MHLA {row['mhla_ms']:.2f} ms · {result['peer'].rsplit('.', 1)[1]} {row['sdpa_ms']:.2f} ms"
                f" · ratio {row['ratio']:.1f}x"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time MHLA beside softmax attention on this machine.")
    parser.add_argument("--grid", type=int, nargs="+", default=[64, 64], help="tokens per axis")
    parser.add_argument("--block-grid", type=int, nargs="+", default=[8, 8], help="blocks per axis")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads of torch (its own choice by default)")
    parser.add_argument("--backward", action="store_true", help="time forward plus backward as well")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    result = operator_vs_sdpa(
        options.grid,
        options.block_grid,
        heads=options.heads,
        head_dim=options.head_dim,
        batch=options.batch,
        dtype=DTYPES[options.dtype],
        device=options.device,
        backward=options.backward,
        repeats=options.repeats,
    )
    if options.out:
        options.out.write_text(json.dumps({**result, "threads": torch.get_num_threads()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
