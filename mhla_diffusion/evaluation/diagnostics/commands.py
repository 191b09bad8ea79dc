"""`mhla eval attention`: what is typed, checked and handed to the library. Imports nothing heavy before it runs."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ...weights import DEFAULT_PIPELINE

# Drawn when no prompts are given: by a text pipeline, and by a class-conditional one.
PROMPTS = ("a 3D emoji of a red apple", "a flat emoji of a whale")
CLASSES = ("0", "1")


def whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers joined by commas") from None


def add_attention(parts, add_command: Callable) -> None:
    parser = add_command(
        parts,
        "attention",
        run_attention,
        "Rank, entropy and mixing coefficients of the attention in every layer, while a pipeline draws.",
        "For softmax, linear and MHLA layers of DiT, SANA and Wan, ours and stock. No N x N matrix is kept. Several "
        "pipelines stand in one table, beside the published figures of DeiT-T.",
    )
    add = parser.add_argument
    add("pipelines", nargs="*", metavar="PIPELINE", help=f"folders or names (default: {DEFAULT_PIPELINE})")
    add("--prompts", metavar="FILE", help="one a line (default: two of the emoji's); of a DiT, classes")
    add(
        "--seed", type=int, default=0, help="of the first drawing, the others count on (default: %(default)s)"
    )
    add("--steps", type=int, help="denoising steps (default: the pipeline's)")
    add(
        "--at",
        type=whole_numbers,
        metavar="N[,N...]",
        help="steps to look at, 0 is the first (default: the middle)",
    )
    add("--height", type=int, help="pixels (default: the pipeline's)")
    add("--width", type=int, help="pixels (default: the pipeline's)")
    add("--frames", type=int, help="of a video (default: the pipeline's)")
    add("--layers", type=whole_numbers, metavar="N[,N...]", help="only these layers")
    add("--heads", type=whole_numbers, metavar="N[,N...]", help="only these heads")
    add("--threshold", type=float,
        help="of the rank, a share of the largest singular value (default: N times float32's epsilon)")  # fmt: skip
    add("--exact-limit", type=int, default=4096, metavar="SIDE",
        help="estimate the spectra of matrices larger than this (default: %(default)s)")  # fmt: skip
    add("--probes", type=int, default=16, help="random vectors of an estimate (default: %(default)s)")
    add("--lanczos-steps", type=int, default=64, help="of each (default: %(default)s)")
    add("--entropy-rows", type=int, default=4096, metavar="N",
        help="rows that the entropy is taken of, at most (default: %(default)s)")  # fmt: skip
    add("--one-block", action="store_true",
        help="also linear attention of the same queries and keys in MHLA layers")  # fmt: skip
    add("--every-row", action="store_true", help="also store the figures of every single matrix")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    add("--out", default="outputs/attention", metavar="FOLDER", help="default: %(default)s")


def check_numbers(args: argparse.Namespace) -> None:
    for name, least in (("exact_limit", 2), ("probes", 2), ("lanczos_steps", 2), ("entropy_rows", 2)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: give at least {least}")


def run_attention(args: argparse.Namespace) -> int:
    from ...folders import check_writable
    from ...pipelines.requests import check_numbers as check_steps
    from ...pipelines.requests import read_prompts
    from ...weights import find_pipeline

    check_numbers(args)
    check_steps(args.steps, None, None)
    if args.threshold is not None:
        from .spectrum import check_thresholds

        check_thresholds([args.threshold])
    names = args.pipelines or [DEFAULT_PIPELINE]
    folders = {label: find_pipeline(name) for label, name in zip(labels(names), names, strict=True)}
    prompts = read_prompts(args.prompts) if args.prompts else None
    out = Path(args.out)
    check_writable(out, "--out")

    from .study import Options

    options = Options(
        threshold=args.threshold,
        exact_limit=args.exact_limit,
        probes=args.probes,
        lanczos_steps=args.lanczos_steps,
        entropy_rows=args.entropy_rows,
        seed=args.seed,
        layers=tuple(args.layers) if args.layers else None,
        heads=tuple(args.heads) if args.heads else None,
        one_block=args.one_block,
    )
    results = {}
    for label, folder in folders.items():
        results[label] = diagnose(
            folder,
            out=out,
            stem=label,
            prompts=prompts,
            seed=args.seed,
            sizes={"steps": args.steps, "height": args.height, "width": args.width, "frames": args.frames},
            at=args.at,
            options=options,
            device=args.device,
            dtype=args.dtype,
            every_row=args.every_row,
        )
        for note in results[label]["warnings"]:
            print(f"mhla: {label}: {note}", file=sys.stderr)
    from .report import table_of_kinds, write_report

    write_report(results, out / "attention.md")
    for line in table_of_kinds(results):
        print(line)
    print(f"{out / 'attention.md'} written, with a JSON and pictures of each pipeline")
    return 0


def labels(names: Sequence[str]) -> list[str]:
    """A short name for each pipeline, unlike the others."""
    found: list[str] = []
    for name in names:
        path = Path(name)
        short = path.name if path.name != "pipeline" else path.absolute().parent.name
        label, number = short, 2
        while label in found:
            label, number = f"{short}-{number}", number + 1
        found.append(label)
    return found


def diagnose(
    folder: Path,
    *,
    out: Path,
    stem: str,
    prompts: Sequence[str] | None = None,
    seed: int = 0,
    sizes: dict | None = None,
    at: Sequence[int] | None = None,
    options=None,
    device: str = "auto",
    dtype: str = "auto",
    every_row: bool = False,
) -> dict:
    """Load a pipeline, look at its attention, and write `<stem>.json`, `<stem>_rows.png`, `<stem>_mixing.png`.

    Args:
        prompts: one drawing each, together in one batch; drawing i has the seed `seed + i`.
        sizes: steps, height, width, frames; None or left out: the pipeline's.
        at, options: see `study`.

    Returns the result. Raises ValueError for what cannot be drawn.
    """
    import torch

    from ...pipelines.painter import Painter, choose_device, choose_dtype
    from ...pipelines.requests import Request, check_prompts, makes_videos
    from ...provenance import versions
    from ...weights import fingerprint
    from ..image_scores import write_result
    from .report import result_of, write_pictures
    from .study import Options, study

    video = makes_videos(folder)
    if video:
        from ...pipelines.video_painter import video_painter

        Painter = video_painter(folder)
    where = choose_device(device)
    chosen = choose_dtype(dtype, where)
    painter = Painter(folder, fingerprint(folder), where, chosen)
    painter.pipe.set_progress_bar_config(disable=True)
    prompts = list(prompts or (CLASSES if painter.by_class else PROMPTS))
    check_prompts(prompts)
    given = {name: value for name, value in (sizes or {}).items() if value is not None}
    if "frames" in given and not video:
        raise ValueError(f"--frames is for videos, and {folder} draws pictures: leave it out")
    requests = [
        Request(index, prompt, seed + index, dtype=chosen, **given) for index, prompt in enumerate(prompts)
    ]
    painter.check(requests[0])
    faults = [reason for request in requests if (reason := painter.fault(request))]
    if faults:
        raise ValueError(faults[0])
    options = options or Options()
    from tqdm import tqdm

    with tqdm(unit="matrix", desc=stem, disable=not sys.stderr.isatty(), leave=False) as bar:
        found = study(painter, requests, at=at, options=options, progress=bar.update)
    settings = painter.settings(requests[0])
    result = result_of(
        found,
        pipeline={name: settings[name] for name in ("pipeline", "pipeline_class", "pipeline_sha256")},
        inputs={
            "prompts": prompts,
            "seeds": [request.seed for request in requests],
            **{
                name: settings[name] for name in ("height", "width", "frames", "guidance") if name in settings
            },
            "part": "the calls with the prompt, not those without that guidance adds",
        },
        environment={
            "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
            "dtype": chosen,
            "precision": "queries and keys as the model computes them, all else in float64",
            "versions": versions(),
            "date": datetime.date.today().isoformat(),
        },
        every_row=every_row,
    )
    result["pictures"] = [path.name for path in write_pictures(painter.pipe, found, out, stem)]
    write_result(result, out / f"{stem}.json")
    return result
