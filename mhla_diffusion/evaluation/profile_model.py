"""Where the time of one eager step goes: kernels, the host that launches them, and which part of the model asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .timing import host_milliseconds

__all__ = ["profile_step"]

# Submodules of a layer that are told apart, by their name's end; the innermost one counts.
PARTS = {
    ".attn1": "self-attention core",
    ".attn1.to_q": "self-attention projections",
    ".attn1.to_k": "self-attention projections",
    ".attn1.to_v": "self-attention projections",
    ".attn1.to_out.0": "self-attention projections",
    ".attn1.mixing": "mixing matrix",
    ".attn2": "cross-attention",
    ".ff": "feed-forward",
    ".ffn": "feed-forward",
}
REST = "norms, modulation, residuals, embeddings"
MARK = "part of the model: "
STEPS = 3


@contextmanager
def marked_parts(model: torch.nn.Module) -> Iterator[None]:
    """While inside, every call of a part stands in the profile under the part's name."""
    handles, open_ranges = [], []

    def begin(name: str):
        def hook(module, arguments) -> None:
            open_ranges.append(record_function(MARK + name))
            open_ranges[-1].__enter__()

        return hook

    def end(module, arguments, output) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for path, module in model.named_modules():
        part = next((PARTS[suffix] for suffix in PARTS if f".{path}".endswith(suffix)), None)
        if part is not None:
            handles += [module.register_forward_pre_hook(begin(part)), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def part_of(event) -> str:
    while event is not None:
        if event.name.startswith(MARK):
            return event.name.removeprefix(MARK)
        event = event.cpu_parent
    return REST


def profile_step(
    step: Callable[[], object], model: torch.nn.Module, device: torch.device, wall_ms: float
) -> dict:
    """Take an eager step apart.

    Args:
        step: runs it, already warm.
        model: whose submodules are told apart.
        wall_ms: time of a step without a profiler.

    Returns, each for one step: `wall_ms`; `host_ms` until everything is issued; `kernels` and `device_ms`, their
    time (None on a CPU); `launch_bound_share`, the share of `wall_ms` in which the device waits for the host;
    `operators` that PyTorch dispatches; `parts`, by part of the model kernels, device time and host time under the
    profiler (which slows the host); `top_host`, the operators that cost the host most; and a `summary` in words.
    """
    cuda = device.type == "cuda"
    host_ms = host_milliseconds(step, device, 5)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with marked_parts(model):
        step()
        with profile(activities=activities) as trace:
            for _ in range(STEPS):
                step()
            if cuda:
                torch.cuda.synchronize(device)
    kernels, device_us, host_us, operators = Counter(), Counter(), Counter(), Counter()
    all_kernels, all_device_us = 0, 0.0
    for event in trace.events():
        if event.device_type != torch.autograd.DeviceType.CPU:
            if not event.name.startswith(MARK):  # a part's range stands among the device's events as well
                all_kernels += 1
                all_device_us += event.time_range.elapsed_us()
            continue
        part = part_of(event)
        host_us[part] += event.self_cpu_time_total
        operators[part] += event.name.startswith(("aten::", "mhla"))
        for kernel in event.kernels:
            if not kernel.name.startswith(MARK):
                kernels[part] += 1
                device_us[part] += kernel.duration
    device_ms = all_device_us / 1e3 / STEPS if cuda else None
    waiting = max(0.0, 1.0 - device_ms / wall_ms) if cuda else None
    found = {
        "wall_ms": wall_ms,
        "host_ms": host_ms,
        "kernels": all_kernels / STEPS if cuda else None,
        "device_ms": device_ms,
        "launch_bound_share": waiting,
        "operators": sum(operators.values()) / STEPS,
        "parts": {
            part: {
                "kernels": kernels[part] / STEPS,
                "device_ms": device_us[part] / 1e3 / STEPS,
                "host_ms_profiled": host_us[part] / 1e3 / STEPS,
                "operators": operators[part] / STEPS,
            }
            for part, _ in host_us.most_common()
        },
        "top_host": [
            {"name": row.key, "calls": row.count / STEPS, "host_ms_profiled": row.self_cpu_time_total / 1e3 / STEPS}
            for row in sorted(trace.key_averages(), key=lambda row: -row.self_cpu_time_total)[:12]
            if not row.key.startswith(MARK)
        ],
    }  # fmt: skip
    return found | {"summary": in_words(found)}


def in_words(found: dict) -> str:
    dispatched = f"{found['operators']:.0f} operators"
    if found["device_ms"] is None:
        return f"{found['wall_ms']:.2f} ms a step, {dispatched}"
    return (
        f"{found['wall_ms']:.2f} ms a step, {dispatched}, {found['kernels']:.0f} kernels that run for "
        f"{found['device_ms']:.2f} ms; the host needs {found['host_ms']:.2f} ms to issue them, and the device "
        f"waits for it {100 * found['launch_bound_share']:.0f} % of the time"
    )
