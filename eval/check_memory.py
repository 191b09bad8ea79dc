"""Every kernel of the operators once, forward and backward, at small odd shapes under NVIDIA's memory checker.

    python eval/check_memory.py --out eval/results/memcheck_h200.txt

Needs `compute-sanitizer`. The kernels are compiled first, by several processes without the checker. Exit status 1 when
the checker found something, or did not run.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch

from mhla_diffusion.blocks import block_table
from mhla_diffusion.ops import mhla_attention
from mhla_diffusion.ops.depthwise import gated_depthwise
from mhla_diffusion.ops.local_convolution import local_convolution
from mhla_diffusion.ops.triton_configs import override
from mhla_diffusion.provenance import versions

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# name: (grid, block_grid, head dim, value dim, dtype, options)
CALLS = {
    "ragged, rotated, two parts": ((5, 7), (2, 3), 72, 72, BF16, {"rope": True, "normalizer": "none"}),
    "denominator in the spare channel": ((5, 7), (2, 3), 72, 72, BF16, {}),
    "table, rotated": ((3, 5, 7), (2, 2, 3), 128, 128, BF16, {"rope": True, "table": True}),
    "a table cut out of another": ((3, 5, 7), (2, 2, 3), 32, 32, BF16, {"table": True, "cut": True}),
    "float16, matrices per head": ((7, 5), (3, 2), 24, 40, FP16, {"per_head": True}),
    "float32": ((7, 5), (3, 2), 40, 24, FP32, {"rope": True}),
    "wide heads": ((5, 5), (2, 2), 136, 136, BF16, {}),
    "long blocks in chunks": ((601,), (1,), 32, 32, BF16, {"chunk_count": 4}),
    "a last block of one token": ((7,), (6,), 32, 32, BF16, {"strided": True}),
    "other blocks for the keys": ((5, 7), (2, 3), 32, 32, BF16, {"keys": (23, 4)}),
    "dual": ((8, 8), (2, 4), 72, 72, BF16, {"form": "dual"}),
    "dual, ragged": ((7, 9), (2, 2), 32, 32, BF16, {"form": "dual", "rope": True, "normalizer": "none"}),
    "dual, float32": ((8, 6), (2, 2), 24, 24, FP32, {"form": "dual"}),
    "all steps fused, norm over all heads": ((5, 7), (2, 3), 32, 32, BF16, {"fused": "all", "rope": True}),
    "all steps fused, norm over each head": ((5, 7), (2, 3), 72, 72, BF16, {"fused": "each"}),
}
DEPTHWISE = {
    "gated depthwise": (2, 40, 5, 19),
    "gated depthwise, one row": (1, 130, 1, 3),
}  # of x: (B, 2C, h, w)
LOCAL = {
    "local convolution": (2, (2, 5, 19), 24),
    "local convolution, one row": (1, (1, 3), 130),
}  # batch, grid, channels
NAMES = [*CALLS, *DEPTHWISE, *LOCAL]


def run(name: str, device: torch.device) -> None:
    """One call, and its gradients where it has any; raises when something is not finite."""
    kind = run_depthwise if name in DEPTHWISE else run_local if name in LOCAL else run_attention
    results = kind(name, device)
    if not all([bool(torch.isfinite(x).all()) for x in results]):
        raise SystemExit(f"{name}: a result is not finite")


@torch.no_grad()
def run_depthwise(name: str, device: torch.device) -> list[torch.Tensor]:
    dtype = FP32 if device.type == "cpu" else BF16
    batch, channels, rows, columns = DEPTHWISE[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, rows, columns, channels, generator=generator).to(device, dtype).permute(0, 3, 1, 2)
    weight = torch.randn(channels, 1, 3, 3, generator=generator).to(device, dtype)
    bias = torch.randn(channels, generator=generator).to(device, dtype)
    return [gated_depthwise(x, weight, given) for given in (bias, None)]


def run_local(name: str, device: torch.device) -> list[torch.Tensor]:
    dtype = FP32 if device.type == "cpu" else BF16
    batch, grid, channels = LOCAL[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, *grid, channels, generator=generator).to(device, dtype).movedim(-1, 1)
    weight = torch.randn(channels, 1, *(3,) * len(grid), generator=generator).to(device, dtype)
    bias = torch.randn(channels, generator=generator).to(device, dtype)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    out = local_convolution(*leaves)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def run_attention(name: str, device: torch.device) -> list[torch.Tensor]:
    grid, block_grid, dim, value_dim, dtype, options = CALLS[name]
    if device.type == "cpu":
        dtype = FP32  # all that Triton's interpreter is trusted with
    options = dict(options)
    generator = torch.Generator().manual_seed(0)
    table, heads = block_table(grid, block_grid), 3
    tokens = int((table >= 0).sum())
    keys, key_blocks = options.pop("keys", (tokens, len(table)))
    # An odd stride between tokens: nothing is aligned by chance.
    spare = 1 if options.pop("strided", False) else 0

    def random(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape[:-1], shape[-1] + spare, generator=generator).to(device, dtype)
        return x[..., : shape[-1]].detach()

    q, k, v = random(2, tokens, heads, dim), random(2, keys, heads, dim), random(2, keys, heads, value_dim)
    per_head = (heads,) if options.pop("per_head", False) else ()
    mixing = (0.1 + torch.rand(*per_head, len(table), key_blocks, generator=generator)).to(device)
    if options.pop("rope", False):
        angles = torch.randn(tokens, dim // 2, generator=generator)
        options["rope"] = (angles.cos().to(device), angles.sin().to(device))
    cut = options.pop("cut", False)
    if options.pop("table", False) or keys != tokens:
        options["block_table"] = table.to(device)
        if cut:
            options["block_table"] = options["block_table"].repeat_interleave(2, dim=1)[:, ::2]
        if keys != tokens:
            options["key_block_table"] = block_table((keys,), (key_blocks,)).to(device)
    else:
        options |= {"grid": grid, "block_grid": block_grid}
    fused = options.pop("fused", None)
    if fused:
        over = (heads, dim) if fused == "all" else (dim,)
        options |= {
            "query_norm": (random(*over), 1e-6), "key_norm": (random(*over), 1e-6), "norm_weight": random(value_dim),
            "gate": random(2, tokens, heads, value_dim), "gate_bias": 1.0, "local": random(2, tokens, heads, value_dim),
        }  # fmt: skip
    options.setdefault("form", "states")
    chunks = options.pop("chunk_count", None)
    leaves = [x if fused else x.requires_grad_() for x in (q, k, v, mixing)]
    with override(**({} if chunks is None else {"chunk_count": chunks})):
        out = mhla_attention(*leaves, backend="triton", **options)
        return [out] if fused else [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def compile_all(line: list[str]) -> None:
    """Run the calls in several processes at once: their compiled kernels stay on disk."""
    count = min(len(NAMES), max(1, (os.cpu_count() or 2) - 2))
    parts = [
        subprocess.Popen([*line, "--calls", *NAMES[i::count]], stdout=subprocess.DEVNULL)
        for i in range(count)
    ]
    if any([part.wait() for part in parts]):
        raise SystemExit("a call failed without the checker: see above")


def check(tool: str, out: Path) -> int:
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        raise SystemExit("compute-sanitizer not found: it comes with the CUDA toolkit; put it on PATH")
    line = [sys.executable, __file__]
    begin = time.monotonic()
    compile_all(line)
    compiled = time.monotonic() - begin
    checker = [program, "--tool", tool, "--print-limit", "20", "--error-exitcode", "9"]
    # Each tensor an allocation of its own: what lies beyond its end belongs to nobody.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*checker, *line, "--calls", *NAMES], capture_output=True, text=True, env=environment
    )
    checked = time.monotonic() - begin - compiled
    print(done.stdout[-8000:], done.stderr[-4000:], sep="\n")
    said = [row for row in (done.stdout + done.stderr).splitlines() if row.startswith("=========")]
    summary = [row for row in said if "ERROR SUMMARY" in row or "RACECHECK SUMMARY" in row]
    ran = [row for row in done.stdout.splitlines() if row.startswith("ran ")]
    clean = done.returncode == 0 and bool(summary) and len(ran) == len(NAMES)
    version = (
        subprocess.run([program, "--version"], capture_output=True, text=True).stdout.strip().splitlines()
    )
    known = ", ".join([f"{name} {versions()[name]}" for name in ("torch", "triton")])
    text = [
        f"{' '.join(['compute-sanitizer', *checker[1:]])} python eval/check_memory.py --calls ...",
        f"{torch.cuda.get_device_name()}, {known}, {version[-1] if version else 'unknown version'}",
        f"compiled in {compiled:.0f} s, checked in {checked:.0f} s, exit status {done.returncode}",
        *ran,
        *([] if clean else said[:60]),
        *summary,
        f"{tool}: {'clean' if clean else 'NOT CLEAN'}, {len(ran)} of {len(NAMES)} calls ran",
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(text) + "\n")
    print(text[-1], f"({out} written)")
    return 0 if clean else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Run every kernel under NVIDIA's memory checker.")
    parser.add_argument(
        "--tool", choices=("memcheck", "racecheck", "initcheck", "synccheck"), default="memcheck"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/memcheck.txt"), metavar="FILE")
    parser.add_argument(
        "--calls", nargs="+", choices=NAMES, metavar="CALL", help="only run these, without the checker"
    )
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.calls:
        warnings.filterwarnings("error", "the (MHLA )?kernels")  # a kernel that gave way was not checked
        for name in options.calls:
            run(name, device)
            print(f"ran {name}", flush=True)
        return 0
    if device.type == "cpu":
        raise SystemExit("the memory checker needs a CUDA device; --calls tries the calls out without it")
    return check(options.tool, options.out)


if __name__ == "__main__":
    raise SystemExit(main())
