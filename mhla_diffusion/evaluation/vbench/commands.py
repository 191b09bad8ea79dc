"""`mhla eval vbench`: what is typed, checked and handed to the library."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from .dimensions import DIMENSIONS


def add_vbench(parts, add_command: Callable, parser_class: type) -> None:
    summary = "VBench: which videos it wants, whether they are there, its scores and its totals."
    parser = parts.add_parser("vbench", help=summary, description=summary)
    steps = parser.add_subparsers(title="steps", metavar="STEP", required=True, parser_class=parser_class)

    parser = add_command(
        steps,
        "plan",
        run_plan,
        "Write the list of videos: file name, prompt and seed of each.",
        "In all 6,220 videos: 5 of each of 944 prompts, 25 for temporal flickering, of which a filter keeps 5.",
    )
    add = parser.add_argument
    add("out", metavar="PLAN.json", help="file to write")
    add("--prompts", metavar="FILE", help="VBench_full_info.json (default: where `vbench-prompts` is found)")
    add("--rewritten", metavar="FILE", help="longer prompts to draw from, one a line in the list's order")
    add("--dimensions", nargs="+", choices=DIMENSIONS, default=[], metavar="NAME", help="only these")
    add("--samples", type=int, default=5, help="videos per prompt (default: %(default)s)")
    add("--flicker-samples", type=int, default=25, help="for temporal flickering (default: %(default)s)")
    add(
        "--seed",
        type=int,
        default=0,
        help="of sample 0 of every prompt; sample i adds i (default: %(default)s)",
    )
    add("--extension", default=".mp4", help="default: %(default)s")

    parser = add_command(
        steps,
        "check",
        run_check,
        "Look for missing, doubled, unreadable and unlike videos.",
        "Exit status 2 unless the set is whole.",
    )
    add = parser.add_argument
    add("videos", metavar="FOLDER", help="where the videos are")
    add("--plan", required=True, metavar="PLAN.json", help="what `plan` wrote")
    add("--fps", type=float, help="frames per second of every video (default: as most of them)")
    add("--size", type=int, nargs=2, metavar=("WIDTH", "HEIGHT"), help="default: as most of them")
    add("--frames", type=int, help="default: as most of them")
    add("--whole", action="store_true", help="decode every frame, not the first only")
    add("--out", metavar="FILE", help="also write the whole report as JSON")

    parser = add_command(
        steps,
        "flicker",
        run_flicker,
        "Score temporal flickering, the one dimension that needs no weights.",
        "Of every video in the folder, in VBench's format. The published protocol takes still videos only.",
    )
    add = parser.add_argument
    add("videos", metavar="FOLDER", help="where the videos are")
    add("--out", metavar="FILE", help="also write the result, for `aggregate`")

    parser = add_command(
        steps,
        "setup",
        run_setup,
        "Build VBench's own environment with uv, from the lock file that comes along.",
        "VBench pins releases that no current pipeline runs with. About 6 GB; a whole one is left as it is.",
    )
    add = parser.add_argument
    add("environment", nargs="?", metavar="FOLDER", help="default: vbench-environment in the cache folder")
    add("--lock", metavar="FILE", help="another lock file, with hashes")
    add("--python", default="3.11", help="version or path, as uv takes it (default: %(default)s)")
    add("--wheels", metavar="FOLDER", help="take every package from here, without a network")
    add("--dry-run", action="store_true", help="print what would be run and installed, do nothing")

    parser = add_command(
        steps,
        "run",
        run_run,
        "Score videos by VBench, in its environment, one process for each dimension.",
        "Everything is looked for first, and nothing is downloaded. Dimensions that are scored already are not scored "
        "again. Exit status: 2 a mistake, nothing was scored; 3 weights, packages or the environment are missing; 4 "
        "some dimensions failed, the others are scored.",
    )
    add = parser.add_argument
    add("videos", metavar="FOLDER", help="where the videos are")
    add("--plan", metavar="PLAN.json", help="what `plan` wrote (default: any videos, VBench's custom_input)")
    add(
        "--out",
        default="outputs/vbench",
        metavar="FOLDER",
        help="for results, a file each (default: %(default)s)",
    )
    add("--dimensions", nargs="+", choices=DIMENSIONS, default=[], metavar="NAME",
        help="only these (default: all of the plan; of any videos the seven of quality)")  # fmt: skip
    add("--environment", metavar="FOLDER", help="what `setup` built, or yours (default: as for setup)")
    add("--weights", metavar="FOLDER", help="in the layout of VBench's cache (default: where that is found)")
    add("--prompts", metavar="FILE", help="VBench_full_info.json of the plan (default: the environment's)")
    add("--no-static-filter", action="store_true",
        help="score flickering of every video; as published, of still ones, which an optical flow chooses")  # fmt: skip
    add("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    add(
        "--trust-weights",
        action="store_true",
        help="read weights that hold more than tensors, which can run code",
    )
    add(
        "--skip-missing",
        action="store_true",
        help="leave out dimensions whose weights or packages are missing",
    )
    add("--overwrite", action="store_true", help="score again what is scored already")

    parser = add_command(
        steps,
        "aggregate",
        run_aggregate,
        "Quality, Semantic and Total of result files, exactly as published.",
        "Takes VBench's *_eval_results.json, folders or zips of them, and {dimension: score}.",
    )
    add = parser.add_argument
    add("results", nargs="+", metavar="RESULT", help="files, folders or zips")
    add("--missing", choices=("refuse", "zero"), default="refuse",
        help="zero counts a missing dimension as raw 0, as the official script does (default: no total)")  # fmt: skip
    add("--out", metavar="FILE", help="also write the result as JSON")


def check_out(out: str | None) -> None:
    """Raise ValueError, before anything is computed, unless the file can be written."""
    if out:
        from ...folders import check_writable

        if Path(out).is_dir():
            raise ValueError(f"{out} is a folder: give the name of a file")
        check_writable(Path(out).parent)


def written(value: dict, out: str | None) -> None:
    if out:
        from ...pipelines.pictures import write_atomically

        path = Path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        write_atomically(path, lambda file: file.write(text.encode()))
        print(f"{out} written")


def warn(notes: list[str]) -> None:
    for note in notes:
        print(f"mhla: {note}", file=sys.stderr)


def run_plan(args: argparse.Namespace) -> int:
    from .plan import plan, read_records, read_rewritten

    check_out(args.out)
    records, about = read_records(args.prompts)
    rewritten = read_rewritten(args.rewritten, len(records)) if args.rewritten else None
    found = plan(
        records,
        about,
        dimensions=args.dimensions,
        samples=args.samples,
        flicker_samples=args.flicker_samples,
        seed=args.seed,
        extension=args.extension,
        rewritten=rewritten,
    )
    if args.rewritten:
        from ..networks.weight_files import sha256_of

        found["settings"]["rewritten"] = {"path": args.rewritten, "sha256": sha256_of(Path(args.rewritten))}
    prompts = len({row["file"].rpartition("-")[0] for row in found["videos"]})
    print(f"{len(found['videos'])} videos of {prompts} prompts")
    warn(found["warnings"])
    written(found, args.out)
    return 0


def run_check(args: argparse.Namespace) -> int:
    from .check import check_videos, faults
    from .plan import read_plan

    check_out(args.out)
    report = check_videos(
        Path(args.videos),
        read_plan(args.plan),
        fps=args.fps,
        size=tuple(args.size) if args.size else None,
        frames=args.frames,
        whole=args.whole,
    )
    written(report, args.out)
    warn(
        report["warnings"]
        + [f"{len(report['unexpected'])} other videos are there"] * bool(report["unexpected"])
    )
    if found := faults(report):
        raise ValueError("; ".join(found))
    print(f"{report['expected']} of {report['expected']} videos are there and alike")
    return 0


def run_flicker(args: argparse.Namespace) -> int:
    from .check import VIDEO_SUFFIXES
    from .flicker import flickering_of_videos

    check_out(args.out)
    folder = Path(args.videos)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give the one with the videos")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)
    found = flickering_of_videos(paths)
    print(f"temporal_flickering {found[0]:.6f}  ({len(paths)} videos)")
    written({"temporal_flickering": found}, args.out)
    return 0


def run_setup(args: argparse.Namespace) -> int:
    from ...folders import check_writable
    from .environment import LOCK, build, check_place, default_environment, locked, python_of, steps

    environment = (
        Path(args.environment).expanduser().absolute() if args.environment else default_environment()
    )
    lock = Path(args.lock) if args.lock else LOCK
    wheels = Path(args.wheels).resolve() if args.wheels else None
    if wheels and not wheels.is_dir():
        raise ValueError(f"there is no folder {wheels}: give the one with the wheels")
    packages = locked(lock)
    check_writable(environment, "FOLDER")
    if args.dry_run:
        check_place(environment)
        for command in steps(environment, lock=lock, python=args.python, wheels=wheels):
            print(shlex.join(command))
        print(f"{len(packages)} packages: {' '.join(packages)}")
        print("nothing done (--dry-run)")
        return 0
    print(f"building {environment} ({len(packages)} packages)", file=sys.stderr)
    record, done = build(environment, lock=lock, python=args.python, wheels=wheels)
    versions = record["versions"]
    print(f"{python_of(environment)} {'built' if done else 'is there already'}: vbench {versions['vbench']}")
    warn([f"{name} cannot be scored there: {why}" for name, why in record["faults"].items()])
    return 0


def run_run(args: argparse.Namespace) -> int:
    from ...folders import check_writable
    from .environment import default_environment
    from .plan import read_plan
    from .scoring import run

    check_writable(Path(args.out), "--out")
    if args.prompts and not Path(args.prompts).is_file():
        raise ValueError(f"there is no {args.prompts}: give vbench's VBench_full_info.json")
    environment = (
        Path(args.environment).expanduser().absolute() if args.environment else default_environment()
    )
    outcome = run(
        Path(args.videos).expanduser(),
        Path(args.out),
        environment,
        plan=read_plan(args.plan) if args.plan else None,
        dimensions=args.dimensions,
        weights=args.weights,
        prompts=args.prompts,
        static_filter=not args.no_static_filter,
        device=args.device,
        skip_missing=args.skip_missing,
        trust_weights=args.trust_weights,
        overwrite=args.overwrite,
        report=lambda line: print(line, flush=True),
    )
    warn(outcome.warnings + [f"{name} is left out: {why}" for name, why in outcome.skipped.items()])
    done = len(outcome.scored) + len(outcome.kept)
    if outcome.failed and not done:
        raise ValueError("every dimension failed, nothing was scored: the lines above say why")
    print(f"{done} dimensions in {args.out}: mhla eval vbench aggregate {args.out}")
    return 4 if outcome.failed else 0


def run_aggregate(args: argparse.Namespace) -> int:
    from .aggregate import aggregate, read_results

    check_out(args.out)
    found = aggregate(read_results(args.results), missing=args.missing)
    for name, row in found["values"].items():
        print(f"{name:24} {row['value']:8.4f}  normalised {row['normalised']:8.4f}")
    for name in ("quality", "semantic", "total"):
        print(f"{name:24} " + ("   none" if found[name] is None else f"{100 * found[name]:8.2f}"))
    warn(found["warnings"])
    written(found, args.out)
    return 0
