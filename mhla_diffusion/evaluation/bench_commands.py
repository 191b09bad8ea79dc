"""`mhla bench`: what is typed, checked and handed to the library. Imports nothing heavy before a command runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def add_bench(commands, add_command: Callable, parser_class: type) -> None:
    """Put `bench` and its parts among the subcommands; `add_command` is that of the command line."""
    summary = "Time parts of this package beside their peers in the same run."
    bench = commands.add_parser("bench", help=summary, description=summary)
    parts = bench.add_subparsers(title="parts", metavar="PART", required=True, parser_class=parser_class)
    add_model(parts, add_command)
    add_pipeline(parts, add_command)
    add_operator(parts, add_command)


def add_model(parts, add_command: Callable) -> None:
    parser = add_command(
        parts,
        "model",
        run_bench_model,
        "Time whole transformers, converted beside stock, eager and compiled, forward and training.",
        "The file is written after every row, and a later call measures the rows that it lacks. On a CPU tiny "
        "models only try the program out.",
    )
    add = parser.add_argument
    add("--model", metavar="images|wan-1.3b", help="whose rows (default: those that --rows names, or images)")
    add("--rows", nargs="+", default=[], metavar="TEXT", help="only the rows whose name holds one of these")
    add("--list", action="store_true", help="only print the rows' names")
    add(
        "--profile",
        action="store_true",
        help="in place of times, say where eager forward passes spend theirs",
    )
    add("--minutes", type=float, default=9.0, help="begin no row after this time (default: %(default)s)")
    add("--seconds", type=float, default=2.0, help="how long each model is timed (default: %(default)s)")
    add("--compile-mode", default="default",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        help="mode in which torch.compile compiles each layer (default: %(default)s)")  # fmt: skip
    add(
        "--no-graph",
        action="store_true",
        help="image models: compiled rows kernel by kernel, not as one CUDA graph's replay",
    )
    add("--fuse-qkv", action="store_true", help="ours with fused projections in forward passes")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--out", metavar="FILE", help="JSON (default: outputs/image_models.json, of Wan outputs/wan.json)")


def run_bench_model(args: argparse.Namespace) -> int:
    from mhla_diffusion.evaluation.bench_model import chosen, default_out, run

    if args.list:
        print("\n".join(case.name for case in chosen(args.rows, args.model)))
        return 0
    out = args.out or default_out(args.rows, args.model)
    run(
        Path(out),
        model=args.model,
        rows=args.rows,
        minutes=args.minutes,
        device=args.device,
        compile_mode=args.compile_mode,
        fuse_qkv=args.fuse_qkv,
        graph=not args.no_graph,
        profile=args.profile,
        seconds=args.seconds,
    )
    print(f"{out} written")
    return 0


def add_pipeline(parts, add_command: Callable) -> None:
    parser = add_command(
        parts,
        "pipeline",
        run_bench_pipeline,
        "Time whole calls of Wan's pipeline, stock beside MHLA: transformer, autoencoder, the rest.",
        "Full-size Wan 2.1 1.3B with random weights; captions are given as embeddings. A few steps are measured, and "
        "what 50 would take is extrapolated. On a CPU tiny models only try the program out.",
    )
    add = parser.add_argument
    add("--rows", nargs="+", default=[], metavar="NAME", help="only these, for example stock full")
    add("--list", action="store_true", help="only print the rows' names")
    add("--size", type=int, nargs=3, default=[480, 800, 81], metavar=("HEIGHT", "WIDTH", "FRAMES"),
        help="of the video (default: 480 800 81)")  # fmt: skip
    add("--steps", type=int, default=5, help="denoising steps that are measured (default: %(default)s)")
    add("--guidance", type=float, default=5.0, help="its scale (default: %(default)s)")
    add("--eager", action="store_true", help="without compiling the transformer's layers")
    add("--minutes", type=float, default=3.0, help="begin no row after this time (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--out", default="outputs/wan_pipeline.json", metavar="FILE", help="JSON (default: %(default)s)")


def run_bench_pipeline(args: argparse.Namespace) -> int:
    from mhla_diffusion.evaluation.bench_pipeline import ROWS, run

    if args.list:
        print("\n".join(row.name for row in ROWS))
        return 0
    height, width, frames = args.size
    run(
        Path(args.out),
        size=(frames, height, width),
        steps=args.steps,
        guidance=args.guidance,
        eager=args.eager,
        rows=tuple(args.rows),
        minutes=args.minutes,
        device=args.device,
    )
    print(f"{args.out} written")
    return 0


def add_operator(parts, add_command: Callable) -> None:
    parser = add_command(
        parts,
        "op",
        run_bench_op,
        "Time the attention operator at real models' shapes, beside softmax attention and other peers.",
        "The file is written after every row; another call with the same file measures what it lacks. Without a CUDA "
        "device small shapes only try the program out.",
    )
    add = parser.add_argument
    add("--rows", nargs="+", default=[], metavar="TEXT", help="only the rows whose name holds one of these")
    add("--scaling", action="store_true", help="instead time one shape from 1k to 128k tokens")
    add("--quick", action="store_true", help="few repeats, no compiled peers, only rows and kernels")
    add("--parts", nargs="+", default=[], choices=("rows", "kernels", "first_call", "forms"),
        help="measure only these; the file's other parts stay (default: all)")  # fmt: skip
    add("--again", action="store_true", help="measure also what the file holds already")
    add("--minutes", type=float, default=8.0, help="begin nothing after this time (default: %(default)s)")
    add(
        "--repeats",
        type=int,
        default=30,
        help="timed calls, of which the median counts (default: %(default)s)",
    )
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: %(default)s")
    add(
        "--out",
        metavar="FILE",
        help="JSON (default: outputs/op.json; op_scaling.json with --scaling, op_quick.json with --quick)",
    )


def run_bench_op(args: argparse.Namespace) -> int:
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: give at least 1")

    from mhla_diffusion.evaluation.bench_operator import bench

    kinds = [kind for kind in ("scaling", "quick") if getattr(args, kind)]
    out = Path(args.out or f"outputs/{'_'.join(['op', *kinds])}.json")
    bench(
        out=out,
        rows=args.rows,
        minutes=args.minutes,
        repeats=args.repeats,
        device=args.device,
        quick=args.quick,
        scaling=args.scaling,
        parts=args.parts,
        again=args.again,
    )
    print(f"{out} written")
    return 0
