"""One step of Wan2.1 1.3B on one and several GPUs: its time, and what each process sends in a layer.

    python eval/several_gpus.py --gpus 1,2,4 --out outputs/wan_gpus.json
    python eval/several_gpus.py --gpus 1,2 --device cpu --out outputs/tiny.json   # tries the program: tiny, gloo

Compares stock with Ulysses and with ring attention, the hybrid with Ulysses, and MHLA in all layers, on the same random
weights. Bytes are counted where the collectives are called, not estimated. The file is written after every number of
GPUs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from torch.utils._python_dispatch import TorchDispatchMode

from mhla_diffusion.evaluation import wan_rows
from mhla_diffusion.evaluation.model_steps import How, wait
from mhla_diffusion.evaluation.timing import about
from mhla_diffusion.models.convert import convert

ROW = wan_rows.Case((81, 720, 1280), mode="eager")  # 21 x 45 x 80 tokens
# layers of MHLA (none: equal to stock), kind of parallel softmax, and the layer whose messages are counted.
VARIANTS = {
    "stock_ulysses": ([], "ulysses", 1),
    "stock_ring": ([], "ring", 1),
    "hybrid": ("2/3", "ulysses", 0),
    "full": ("all", "ulysses", 1),
}


class Messages(TorchDispatchMode):
    """Bytes that this process sends in collectives, by kind, with the algorithms that send least.

    all_reduce: a ring of reduce-scatter and all-gather. all_to_all: all but its own piece. all_gather: its piece to
    each of the others.
    """

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks, self.sent = ranks, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith("_c10d_functional::"):
            factors = {
                "all_reduce": 2 * (self.ranks - 1) / self.ranks,
                "all_to_all": (self.ranks - 1) / self.ranks,
                "all_gather": self.ranks - 1,
            }
            for kind, factor in factors.items():
                if kind in name:
                    size = args[0].numel() * args[0].element_size()
                    self.sent[kind] = self.sent.get(kind, 0) + round(factor * size)
        return func(*args, **(kwargs or {}))


def bytes_sent(model, inputs: dict, layer: int, ranks: int) -> dict[str, int]:
    """What this process sends in one layer of one forward pass."""
    counted, block = Messages(ranks), model.blocks[layer]
    forward = block.forward

    def watched(*arguments, **named):
        with counted:
            return forward(*arguments, **named)

    block.forward = watched
    try:
        model(**inputs, return_dict=False)
    finally:
        block.forward = forward
    return counted.sent


def slowest(number: float) -> float:
    """The largest of all processes' numbers; none goes on before all have theirs."""
    found = torch.tensor([number])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def step_ms(model, inputs: dict, device: torch.device, seconds: float) -> float:
    """Median over steps of the slowest process's milliseconds, after two steps to warm up."""

    def timed() -> float:
        wait(device)
        slowest(0.0)
        start = time.perf_counter()
        model(**inputs, return_dict=False)
        wait(device)
        return slowest(1e3 * (time.perf_counter() - start))

    timed()
    steps = min(50, max(3, int(1e3 * seconds / timed())))  # the same number in every process
    return statistics.median(timed() for _ in range(steps))


@torch.no_grad()
def measured(variant: str, args, device: torch.device, ranks: int) -> dict:
    how = How(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    layers, kind, counted_layer = VARIANTS[variant]
    torch.manual_seed(0)
    stock = wan_rows.stock_model(ROW, how).eval()
    model = convert(stock, wan_rows.TINY_BLOCK_GRID if how.tiny else wan_rows.BLOCK_GRID, layers=layers)
    if not how.tiny:
        model.set_attention_backend("_native_cudnn")
    if ranks > 1:
        model.enable_parallelism(config=ContextParallelConfig(**{f"{kind}_degree": ranks}))
    inputs = wan_rows.model_inputs(ROW, model.config, how)
    row = {"variant": variant, "gpus": ranks}
    if ranks > 1:
        row["sent_per_layer"] = bytes_sent(model, inputs, counted_layer, ranks)
        if variant == "hybrid":
            row["sent_per_mhla_layer"] = bytes_sent(model, inputs, 1, ranks)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    row["eager_ms"] = step_ms(model, inputs, device, args.seconds)
    if args.compile:
        model.compile_repeated_blocks(dynamic=False)
        row["compiled_ms"] = step_ms(model, inputs, device, args.seconds)
    if device.type == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    return row


def worker(args) -> None:
    """One process of a run; the first one prints a line of JSON for each variant."""
    rank, ranks = args.rank, args.ranks
    backend, device = "cpu:gloo", torch.device("cpu")
    if args.device == "cuda":
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=args.meeting, rank=rank, world_size=ranks)
    for variant in args.variants.split(","):
        if ranks == 1 and variant == "stock_ring":
            continue  # one GPU has no ring: the row would repeat the other
        try:
            row = measured(variant, args, device, ranks)
        except ValueError as error:
            # A kernel of softmax that takes no part in a ring says so in every process.
            row = {"variant": variant, "gpus": ranks, "error": str(error)[:300]}
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if rank == 0:
            print("ROW " + json.dumps({**row, "about": about(device)}), flush=True)
    dist.destroy_process_group()


def launch(args, ranks: int) -> list[dict]:
    """All variants on a number of GPUs, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--ranks", str(ranks)]
        command += ["--meeting", f"file://{folder}/meeting"]
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        others = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(1, ranks)
        ]
        first = subprocess.Popen(
            [*command, "--rank", "0"], env=environment, stdout=subprocess.PIPE, text=True
        )
        said = first.communicate()[0]
        codes = [first.returncode, *(process.wait() for process in others)]
    if any(codes):
        raise SystemExit(f"a process of {ranks} failed with exit status {max(codes, key=abs)}: see above")
    return [json.loads(line[4:]) for line in said.splitlines() if line.startswith("ROW ")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", default="1,2,4", help="numbers of processes, each with a GPU")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a variant is timed")
    parser.add_argument("--compile", action="store_true", help="also with each layer compiled")
    for name, kind in (("rank", int), ("ranks", int), ("meeting", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = set(args.variants.split(",")) - set(VARIANTS)
    if unknown:
        parser.error(f"no variant {min(unknown)!r}: choose among {', '.join(VARIANTS)}")
    if args.rank is not None:
        worker(args)
        return
    rows = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for ranks in map(int, args.gpus.split(",")):
        if args.device == "cuda" and ranks > torch.cuda.device_count():
            raise SystemExit(
                f"{ranks} GPUs asked for, {torch.cuda.device_count()} are here: give --gpus with less"
            )
        rows += launch(args, ranks)
        head = rows[0]["about"]
        result = {
            **head,
            "settings": {
                "size": "tiny" if args.device == "cpu" else ROW.pixels,
                "batch": 1,
                "seconds": args.seconds,
            },
            "rows": [{name: x for name, x in row.items() if name != "about"} for row in rows],
        }
        args.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
        for row in result["rows"]:
            if row["gpus"] == ranks:
                print(as_line(row), flush=True)


def as_line(row: dict) -> str:
    times = [f"{name[:-3]} {row[name]:.1f} ms" for name in ("eager_ms", "compiled_ms") if name in row]
    sent = [f"a layer sends {x / 1e6:.3g} MB by {kind}" for kind, x in row.get("sent_per_layer", {}).items()]
    return f"{row['gpus']} GPUs, {row['variant']}: {row.get('error') or ', '.join(times + sent)}"


if __name__ == "__main__":
    main()
