"""Time of calls on a GPU or a CPU, by medians over rotating inputs; the device's own limits, measured alike."""

from __future__ import annotations

import datetime
import functools
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

__all__ = [
    "about",
    "copy_bandwidth",
    "earlier_result",
    "graphed",
    "host_milliseconds",
    "milliseconds",
    "peak_extra_bytes",
    "product_rate",
]


def about(device: torch.device) -> dict:
    """Device, versions and date, as every result file begins."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        import triton

        versions.update(
            triton=triton.__version__, cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version()
        )
        name = torch.cuda.get_device_name(device)
    return {"device": name, "versions": versions, "date": datetime.date.today().isoformat()}


def earlier_result(out: Path, start: dict) -> dict | None:
    """What the result file `out` holds, to be gone on with; None where there is none.

    Raises ValueError where its device, versions or settings are others than those in `start`.
    """
    if not out.is_file():
        return None
    found = json.loads(out.read_text(encoding="utf-8"))
    if any(found.get(name) != start[name] for name in ("device", "versions", "settings")):
        raise ValueError(f"{out} holds rows of another device, version or setting: give another file")
    return found


def milliseconds(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int = 30) -> float:
    """Median time of one call. `calls` do the same on different inputs and take turns, so that caches stay cold.

    On a GPU the calls are queued behind a pause: what is timed is the device's work, without gaps of the host.
    """
    for call in (*calls, *calls):
        call()
    if device.type != "cuda":
        times = []
        for step in range(repeats):
            start = time.perf_counter()
            calls[step % len(calls)]()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    times = []
    group = min(10, repeats)
    start = time.perf_counter()
    calls[0]()
    # Some 2 GHz, half as long again as the host needs to queue a group.
    pause = int(2e9 * max(2e-3, 1.5 * group * (time.perf_counter() - start)))
    for first in range(0, repeats, group):
        torch.cuda.synchronize(device)
        torch.cuda._sleep(pause)  # the host is done queueing before the device starts
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(group)]
        for step, (start, end) in enumerate(events, first):
            start.record()
            calls[step % len(calls)]()
            end.record()
        torch.cuda.synchronize(device)
        times += [start.elapsed_time(end) for start, end in events]
    return statistics.median(times)


def host_milliseconds(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median time the host needs to issue a call, without waiting for the device."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all captures on a device: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


def graphed(call: Callable[[], object], device: torch.device | None = None) -> Callable[[], object]:
    """The call as a CUDA graph's replay, on the inputs that it was captured with.

    A replay gives the tensors of the capture, overwritten: copy what is to outlive the next one. Where capturing
    fails, that call's error is raised and work goes on on the stream that was the current one.

    Args:
        call: waits for nothing on the host, and does the same each time.
        device: the current CUDA device when None.
    """
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        side = _side_stream(torch.cuda.current_device())
        graph = torch.cuda.CUDAGraph()
        try:
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(3):  # what a first call compiles or chooses does not belong into a graph
                    call()
            current.wait_stream(side)
            with torch.cuda.graph(graph, stream=side):
                kept = call()
        finally:
            torch.cuda.set_stream(current)  # an aborted capture would leave its own

    def replay() -> object:
        graph.replay()
        return kept

    replay.captured = call  # its weights and compiled kernels, which the graph reads, live as long
    return replay


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most memory that a call holds at once, beyond what was there and the tensors that it returns."""
    if device.type != "cuda":
        return None
    call()
    gc.collect()  # or what others left behind is freed in between, and counts as this call's
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    out = call()
    torch.cuda.synchronize(device)
    results = out if isinstance(out, tuple) else (out,)
    size = sum([x.numel() * x.element_size() for x in results if isinstance(x, torch.Tensor)])
    return torch.cuda.max_memory_allocated(device) - before - size


def copy_bandwidth(device: torch.device, megabytes: int = 1024) -> float:
    """Bytes read and written per second by a large copy: the ceiling of what only moves memory."""
    source = torch.empty(megabytes << 18, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / (1e-3 * milliseconds([lambda: target.copy_(source)], device, 10))


def product_rate(device: torch.device, dtype: torch.dtype, side: int = 8192) -> float:
    """FLOP per second of a large square matmul: the ceiling of what only multiplies."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / (1e-3 * milliseconds([lambda: a @ b], device, 10))
