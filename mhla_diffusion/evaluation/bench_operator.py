"""The operator at the shapes of real models, beside softmax attention and plain linear attention in the same run.

`python -m mhla_diffusion.evaluation.bench_operator --out results --minutes 6` writes `op.json` after every row, so that
a run that is cut short keeps what it measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..mixing import initial_mixing
from ..ops import mhla_attention
from ..ops.dispatch import dual_obstacle, form_costs
from ..ops.partition import grid_partition
from .timing import copy_bandwidth, graphed, host_milliseconds, milliseconds, peak_extra_bytes

__all__ = ["CASES", "DISPATCH", "Case", "run"]


class Case(NamedTuple):
    """One shape. fused: q and k before their norms, output norm and gate in the store. target: forward, both, in ms."""

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


WAN = {"heads": 12, "block_grid": (3, 5, 10), "dim": 128, "rope": True, "normalizer": "none"}
CASES = [
    Case("wan 480x800x81", 1, grid=(21, 30, 50), backward=True, target=(0.20, 0.90), **WAN),
    Case(
        "wan 480x800x81, paper", 1, grid=(21, 30, 50), target=(0.24, None), **{**WAN, "normalizer": "paper"}
    ),
    Case("wan 480x800x81, norms and gate", 1, grid=(21, 30, 50), fused=True, target=(0.28, None), **WAN),
    Case("wan 480x832x81, ragged", 1, grid=(21, 30, 52), **WAN),
    Case("wan 720p", 1, grid=(21, 45, 80), target=(0.45, None), **WAN),
    Case("sana 4K", 2, 36, (128, 128), (8, 8), 32, backward=True, target=(0.12, 0.50)),
    Case("sana 1K, graph", 2, 36, (32, 32), (4, 4), 32, graph=True, target=(0.020, None)),
    Case("dit 256", 32, 16, (16, 16), (4, 4), 72, backward=True),
    Case("dit 512", 16, 16, (32, 32), (4, 4), 72, backward=True),
]
# Both forms at each, to fit the rule that chooses between them.
DISPATCH = [
    Case(
        f"{side}^2 tokens, {blocks}^2 blocks, {dim}",
        batch,
        16,
        (side, side),
        (blocks, blocks),
        dim,
        backward=True,
    )
    for side, batch in ((8, 64), (16, 32), (24, 16), (32, 16), (48, 4))
    for blocks in (2, 4, 8)
    for dim in (32, 72, 128)
    if side * side // blocks**2 >= 4
]


class Inputs:
    """Random inputs of a case, and the calls on them."""

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
            angles = torch.rand(tokens, case.dim // 2, generator=generator, device=device) * (2 * math.pi)
            self.options["rope"] = (angles.cos(), angles.sin())
        if case.fused:
            weights = [(1 + 0.1 * random(case.heads, case.dim), 1e-6) for _ in range(2)]
            self.options.update(
                query_norm=weights[0], key_norm=weights[1], gate=random(*shape), gate_bias=1.2784645
            )
            self.options["norm_weight"] = 1 + 0.1 * random(case.dim)

    def forward(self, **choices) -> torch.Tensor:
        return mhla_attention(self.q, self.k, self.v, self.mixing, **self.options, **choices)

    def both(self, **choices) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v, self.mixing)]
        out = mhla_attention(*leaves, **self.options, **choices)
        return torch.autograd.grad(out, leaves, self.grad)

    def softmax(self, backward: bool) -> object:
        leaves = [x.detach().requires_grad_(backward) for x in (self.q, self.k, self.v)]
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves)).transpose(1, 2)
        return torch.autograd.grad(out, leaves, self.grad) if backward else out

    def plain_linear(self, backward: bool) -> object:
        """Global linear attention with the same feature map and denominator, in the inputs' dtype."""
        leaves = [x.detach().requires_grad_(backward) for x in (self.q, self.k, self.v)]
        q, k, v = (x.transpose(1, 2) for x in leaves)
        q, k = F.relu(q) + 1e-6, F.relu(k) + 1e-6
        out = q @ (k.transpose(-1, -2) @ v)
        if self.case.normalizer != "none":
            out = out / (q * k.float().sum(-2, keepdim=True).to(q.dtype)).sum(-1, keepdim=True)
        out = out.transpose(1, 2)
        return torch.autograd.grad(out, leaves, self.grad) if backward else out

    def error(self, backward: bool) -> float:
        """Largest relative error of the output (and of dq, dk, dv) of one head of one item against float64."""
        tensors = [x[:1, :, :1].double().requires_grad_() for x in (self.q, self.k, self.v)]
        options = {name: double(x) for name, x in self.options.items()}
        if (
            self.case.fused
        ):  # the norms run over all heads: give the slice its share as an already normed input
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


def double(x):
    if isinstance(x, tuple):
        return tuple(map(double, x))
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def floors(case: Case, item: int, bandwidth: float) -> dict[str, float]:
    """Least traffic and arithmetic of a forward pass."""
    tokens, blocks, lines = math.prod(case.grid), math.prod(case.block_grid), case.batch * case.heads
    moved = (5 if case.fused else 4) * lines * tokens * case.dim * item
    return {
        "bytes_mb": moved / 1e6,
        "byte_floor_ms": 1e3 * moved / bandwidth,
        "gflop": lines * (4 * tokens + 2 * blocks**2) * case.dim**2 / 1e9,
    }


def peers_of(
    sets: list[Inputs], backward: bool, device: torch.device, repeats: int
) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, backend in (
        ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("SDPA FlashAttention-2", SDPBackend.FLASH_ATTENTION),
    ):
        if device.type != "cuda":
            break
        try:
            with sdpa_kernel(backend):
                calls = [lambda inputs=inputs: inputs.softmax(backward) for inputs in sets]
                found[name] = milliseconds(calls, device, repeats)
        except RuntimeError as error:
            found[name] = f"does not run: {str(error).splitlines()[0]}"
    if device.type != "cuda":
        found["SDPA"] = milliseconds([lambda: sets[0].softmax(backward)], device, repeats)
    found["plain linear, eager"] = milliseconds(
        [lambda inputs=inputs: inputs.plain_linear(backward) for inputs in sets], device, repeats
    )
    return found


def measure(
    case: Case, device: torch.device, dtype: torch.dtype, bandwidth: float, repeats: int
) -> list[dict]:
    size = 4 * case.batch * math.prod(case.grid) * case.heads * case.dim * dtype.itemsize
    # Together larger than the L2 cache: a call never finds its inputs there, as in a model.
    sets = [Inputs(case, device, dtype, seed) for seed in range(max(2, min(8, -(-(200 << 20) // size))))]
    rows = []
    for backward in (False, True) if case.backward else (False,):
        name = "both" if backward else "forward"
        calls: list[Callable[[], object]] = [getattr(inputs, name) for inputs in sets]
        if case.graph and device.type == "cuda":
            calls = [graphed(call) for call in calls]
        ours = milliseconds(calls, device, repeats)
        peers = peers_of(sets, backward, device, 10 if math.prod(case.grid) > 10000 else repeats)
        cudnn = peers.get("SDPA cuDNN")
        extra = peak_extra_bytes(sets[0].forward, device) if not backward else None
        limits = floors(case, dtype.itemsize, bandwidth)
        rows.append(
            {
                "name": case.name,
                "shape": {
                    "B": case.batch, "H": case.heads, "N": math.prod(case.grid), "D": case.dim,
                    "M": math.prod(case.block_grid),
                },
                "direction": "forward_backward" if backward else "forward",
                "ours_ms": ours,
                "host_ms": host_milliseconds(calls[0], device),
                "target_ms": case.target[backward],
                "peers_ms": peers,
                "ratio_vs_cudnn": cudnn / ours if isinstance(cudnn, float) else None,
                **limits,
                "achieved_gb_per_s": limits["bytes_mb"] / ours,
                "extra_memory_mb": None if extra is None else extra / 1e6,
                "form": chosen_form(sets[0]),
                "error_vs_float64": sets[0].error(backward),
            }
        )  # fmt: skip
    return rows


def chosen_form(inputs: Inputs) -> str:
    if inputs.q.device.type != "cuda":
        return "plain torch"
    costs = expected(inputs)
    return min(costs, key=costs.get)


def expected(inputs: Inputs) -> dict[str, float]:
    part = grid_partition(inputs.case.grid, inputs.case.block_grid, inputs.q.shape[1], inputs.q.device)
    costs = form_costs(inputs.q, inputs.v, part, part, 2 if inputs.q.dtype == torch.bfloat16 else 4)
    if dual_obstacle(inputs.q, inputs.v, inputs.options.get("rope"), inputs.case.normalizer, part, part):
        del costs["dual"]
    return costs


def compare_forms(case: Case, device: torch.device, dtype: torch.dtype, repeats: int) -> dict:
    """Both forms in both directions; regret: the chosen form's forward time over the better one's, less 1."""
    sets = [Inputs(case, device, dtype, seed) for seed in range(2)]
    times = {}
    for form in ("states", "dual"):
        for name in ("forward", "both"):
            calls = [lambda x=x, name=name, form=form: getattr(x, name)(form=form) for x in sets]
            times[f"{form}_{name}_ms"] = milliseconds(calls, device, repeats)
    chosen = chosen_form(sets[0])
    best = min(times["states_forward_ms"], times["dual_forward_ms"])
    return {
        "name": case.name,
        "shape": {
            "B": case.batch, "H": case.heads, "N": math.prod(case.grid), "D": case.dim, "M": math.prod(case.block_grid),
        },
        **times,
        "expected_us": expected(sets[0]),
        "chosen": chosen,
        "regret": times[f"{chosen}_forward_ms"] / best - 1 if chosen in ("states", "dual") else None,
    }  # fmt: skip


def about(device: torch.device) -> dict:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        import triton

        versions.update(
            triton=triton.__version__, cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version()
        )
        name = torch.cuda.get_device_name(device)
    return {"device": name, "versions": versions, "date": datetime.date.today().isoformat()}


def run(
    cases: Sequence[Case], dispatch: Sequence[Case], device: torch.device, out: Path, *, minutes: float = 8.0,
    repeats: int = 30, dtype: torch.dtype = torch.bfloat16,
) -> dict:  # fmt: skip
    """Measure what fits into the time, writing `out/op.json` after every case."""
    end = time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    bandwidth = copy_bandwidth(device, 1024 if device.type == "cuda" else 16)
    result = {
        **about(device),
        "copy_bandwidth_gb_per_s": bandwidth / 1e9,
        "rows": [],
        "dispatch": [],
        "left_out": [],
    }
    for kind, chosen in (("rows", cases), ("dispatch", dispatch)):
        for case in chosen:
            if time.monotonic() > end:
                result["left_out"].append(case.name)
                continue
            try:
                if kind == "rows":
                    found = measure(case, device, dtype, bandwidth, repeats)
                else:
                    found = [compare_forms(case, device, dtype, repeats)]
            except Exception as error:  # one shape that fails must not cost the others' measurements
                found = [{"name": case.name, "error": f"{type(error).__name__}: {error}"[:500]}]
            result[kind] += found
            for row in found:
                print(
                    json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}),
                    flush=True,
                )
            (out / "op.json").write_text(json.dumps(result, indent=1))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    (out / "op.json").write_text(json.dumps(result, indent=1))
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time the MHLA operator at real models' shapes.")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for op.json")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no shape after this time")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", default="", help="shapes whose name holds this text")
    parser.add_argument("--no-dispatch", action="store_true", help="leave the comparison of both forms out")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [case for case in CASES if options.only in case.name]
    dispatch = [] if options.no_dispatch else [case for case in DISPATCH if options.only in case.name]
    run(cases, dispatch, device, options.out, minutes=options.minutes, repeats=options.repeats)


if __name__ == "__main__":
    main()
