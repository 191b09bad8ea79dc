"""`mhla eval`: what is typed, checked and handed to the library. Imports nothing heavy before a command runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..folders import check_writable
from .diagnostics.commands import add_attention
from .image_protocols import METRICS, PROTOCOLS
from .protocols.commands import add_protocol_commands, add_run_options
from .text_image.commands import add_text_image_options
from .text_image.protocols import TEXT_IMAGE_PROTOCOLS
from .vbench.commands import add_vbench


def add_eval(commands, add_command: Callable, parser_class: type) -> None:
    """Put `eval` and its parts among the subcommands; `add_command` is that of the command line."""
    summary = "Score pictures: distances between sets, reference statistics, what can run here."
    parser = commands.add_parser("eval", help=summary, description=summary)
    parts = parser.add_subparsers(title="parts", metavar="PART", required=True, parser_class=parser_class)
    add_run(parts, add_command)
    add_stats(parts, add_command)
    add_list(parts, add_command)
    add_compare(parts, add_command)
    add_protocol_commands(parts, add_command)
    add_attention(parts, add_command)
    add_vbench(parts, add_command, parser_class)


def pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, value


def add_options(parser) -> None:
    """What `run` and `stats` share."""
    add = parser.add_argument
    add("--weights", type=pair, nargs="+", action="extend", default=[], metavar="ROLE=PATH",
        help="files of weights, for example inception=path/to/pt_inception-2015-12-05-6726825d.pth")  # fmt: skip
    add("--limit", type=int, metavar="N", help="only the first N pictures of each set")
    add("--mixed-sizes", action="store_true", help="allow pictures of several sizes in one set")
    add("--background", metavar="COLOUR", help="what transparent pictures are laid on, for example white")
    add("--batch-size", type=int, default=50, help="pictures in the network at a time (default: %(default)s)")
    add("--workers", type=int,
        help="processes that decode pictures (default: for a GPU all cores but one, up to 16; else none)")  # fmt: skip
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")


def add_run(parts, add_command: Callable) -> None:
    parser = add_command(
        parts,
        "run",
        run_protocol,
        "Score a set of pictures by a protocol of `mhla eval list`: against a reference, or against their prompts.",
        "A set is a folder, an .npz with arr_0 or a .tar; a reference may also be an .npz of statistics, ours or "
        "ADM's. A protocol of a file may have several parts. Exit status: 2 a mistake, nothing was computed; 3 weights "
        "are missing; 4 a part failed, the others are in the result.",
    )
    add = parser.add_argument
    add("protocol", nargs="?", metavar="PROTOCOL", help=", ".join((*PROTOCOLS, *TEXT_IMAGE_PROTOCOLS)))
    add("--samples", required=True, metavar="SET", help="what is scored")
    add("--reference", metavar="SET", help="real pictures, or their statistics")
    add("--samples-split", metavar="NAME", help="of a .tar")
    add("--reference-split", metavar="NAME", help="of a .tar, for example train")
    add("--metrics", nargs="+", choices=METRICS, help="only these")
    add("--skip-missing", action="store_true", help="leave out metrics whose weights are missing")
    add("--floor", action="store_true", help="also compare one half of the reference with the other")
    add("--seed", type=int, default=0, help="of KID's subsets (default: %(default)s)")
    add("--out", metavar="FILE|FOLDER",
        help="JSON (default: outputs/eval.json); with --protocol a folder (default: outputs/eval/NAME)")  # fmt: skip
    add_options(parser)
    add_text_image_options(parser)
    add_run_options(parser)


def check_numbers(args: argparse.Namespace) -> None:
    for name in ("batch_size", "limit", "workers"):
        value = getattr(args, name)
        least = 0 if name == "workers" else 1
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give at least {least}")


def opened(args: argparse.Namespace, source: str, split: str | None = None):
    from .picture_sets import open_pictures

    return open_pictures(
        source, limit=args.limit, split=split, mixed_sizes=args.mixed_sizes, background=args.background
    )


@contextmanager
def progress_bar(total: int | None) -> Iterator[Callable[[int], None]]:
    """Gives what is told how many pictures were read; it raises KeyboardInterrupt after Ctrl-C."""
    from tqdm import tqdm

    from .interrupts import interruptible

    with (
        interruptible() as check,
        tqdm(total=total, unit="picture", disable=not sys.stderr.isatty(), leave=False) as bar,
    ):

        def progress(count: int) -> None:
            check()
            bar.update(count)

        yield progress


def run_protocol(args: argparse.Namespace) -> int:
    from .image_protocols import check_weights, find_protocol

    check_numbers(args)
    if args.protocol is None and args.protocol_file is None:
        raise ValueError("no protocol given: mhla eval list shows them")
    known: Mapping[str, Path] = {}
    if args.protocol_file is None and args.protocol not in (*PROTOCOLS, *TEXT_IMAGE_PROTOCOLS):
        from .protocols.files import known_protocols

        known = known_protocols()
        if args.protocol in known or Path(args.protocol).suffix in (".yaml", ".yml"):
            args.protocol, args.protocol_file = None, args.protocol
    if args.protocol_file is not None:
        from .protocols.commands import run_file

        if args.protocol is not None:
            raise ValueError(f"both {args.protocol} and --protocol {args.protocol_file} given: give one")
        return run_file(args)
    args.out = args.out or "outputs/eval.json"
    if Path(args.out).is_dir():
        raise ValueError(
            f"--out {args.out} is a folder: give a file, for example {Path(args.out) / 'eval.json'}"
        )
    check_writable(Path(args.out).parent, "--out")
    if args.results or args.plan or args.fresh:
        raise ValueError(
            f"protocol {args.protocol} reads no --results and no --plan and keeps nothing: leave them, and --fresh, out"
        )
    if args.protocol in TEXT_IMAGE_PROTOCOLS:
        return run_with_prompts(args)
    protocol = find_protocol(args.protocol, (*TEXT_IMAGE_PROTOCOLS, *known))
    if args.reference is None:
        raise ValueError(f"protocol {protocol.name} compares with real pictures: give --reference SET")
    if any((args.prompts, args.random_weights, args.clip_model, args.clip_pretrained, args.long_prompts)):
        raise ValueError(f"protocol {protocol.name} reads no prompts and no CLIP: leave those options out")
    check_weights(protocol, tuple(args.metrics or ()), dict(args.weights), args.skip_missing)

    from .decoding import decoding_processes
    from .image_scores import as_lines, score, write_result
    from .picture_sets import holds_pictures
    from .protocols.drawn import note_drawing
    from .reference_statistics import holds_statistics, read_statistics

    samples = opened(args, args.samples, args.samples_split)
    path = Path(args.reference).expanduser()
    statistics = read_statistics(path) if holds_statistics(path) else None
    pictures = None
    if statistics is None or holds_pictures(path):
        pictures = opened(args, args.reference, args.reference_split)
    total = len(samples) + (len(pictures) if pictures else 0)
    with progress_bar(total) as progress:
        result = score(
            samples,
            statistics or pictures,
            protocol,
            reference_pictures=pictures,
            metrics=tuple(args.metrics) if args.metrics else None,
            weights=dict(args.weights),
            device=args.device,
            batch_size=args.batch_size,
            workers=decoding_processes(args.workers, args.device),
            seed=args.seed,
            floor=args.floor,
            skip_missing=args.skip_missing,
            progress=progress,
        )
    note_drawing(result, args.samples)
    for line in as_lines(result):
        print(line)
    skipped = [f"{metric} is left out: {why}" for metric, why in result["skipped"].items()]
    for note in result["warnings"] + skipped:
        print(f"mhla: {note}", file=sys.stderr)
    write_result(result, Path(args.out))
    print(f"{args.out} written")
    return 0


def run_with_prompts(args: argparse.Namespace) -> int:
    from .text_image.commands import run_text_image

    protocol = TEXT_IMAGE_PROTOCOLS[args.protocol]
    for option in ("reference", "reference_split", "metrics", "floor", "skip_missing"):
        if getattr(args, option):
            raise ValueError(
                f"protocol {protocol.name} scores pictures against their prompts: leave "
                f"--{option.replace('_', '-')} out"
            )
    return run_text_image(
        args, protocol, lambda: opened(args, args.samples, args.samples_split), progress_bar
    )


def add_stats(parts, add_command: Callable) -> None:
    parser = add_command(
        parts,
        "stats",
        run_stats,
        "Write the mean and covariance of a set's features, the reference of later runs.",
        "The file holds mu and sigma (and mu_s, sigma_s for sFID) as ADM's evaluator reads them.",
    )
    add = parser.add_argument
    add("pictures", metavar="SET", help="folder, .npz with arr_0, or .tar")
    add("out", metavar="OUT.npz", help="file to write")
    add("--protocol", default="fid_adm", help="whose network and resize (default: %(default)s)")
    add("--split", metavar="NAME", help="of a .tar")
    add_options(parser)


def run_stats(args: argparse.Namespace) -> int:
    from .image_protocols import check_weights, find_protocol

    protocol = find_protocol(args.protocol)
    check_numbers(args)
    out = Path(args.out)
    if out.suffix != ".npz":
        raise ValueError(f"{out} must end with .npz")
    check_writable(out.parent, "OUT.npz")
    metrics = tuple(metric for metric in protocol.metrics if metric in ("fd", "sfd"))
    if not metrics:
        raise ValueError(
            f"protocol {protocol.name} compares no means and covariances: give its pictures to eval run"
        )
    check_weights(protocol, metrics, dict(args.weights), False)

    from .decoding import decoding_processes
    from .gathering import gather
    from .image_scores import build_extractor, environment
    from .reference_statistics import write_statistics

    pictures = opened(args, args.pictures, args.split)
    extractor = build_extractor(protocol, dict(args.weights), args.device, metrics)
    taps = set(extractor.taps)
    with progress_bar(len(pictures)) as progress:
        found = gather(
            pictures,
            extractor,
            moments=taps,
            batch_size=args.batch_size,
            workers=decoding_processes(args.workers, args.device),
            progress=progress,
        )
    about = {"features": extractor.about, "pictures": pictures.about(), "environment": environment(extractor)}
    moments = {tap: found.moments(tap, "set") for tap in sorted(taps)}
    write_statistics(out, moments, about)
    notes, width = pictures.doubts(), max(extractor.taps.values())
    if found.count <= width:
        notes.append(f"{found.count} pictures for {width} features: too few for a full covariance")
    for note in notes:
        print(f"mhla: {note}", file=sys.stderr)
    print(f"{out} written ({found.count} pictures, {', '.join(moments)})")
    return 0


def add_list(parts, add_command: Callable) -> None:
    add_command(parts, "list", run_list, "Protocols, and which of them can run here.")


def run_list(args: argparse.Namespace) -> int:
    from .faults import MissingWeights
    from .networks.weight_files import find_weights

    for protocol in (*PROTOCOLS.values(), *TEXT_IMAGE_PROTOCOLS.values()):
        print(f"{protocol.name:16} {protocol.summary} ({', '.join(protocol.metrics)})")
        for role in protocol.roles:
            try:
                found = find_weights(role)
                print(f"{'':16} ready: {role} from {found.path} ({found.why})")
            except MissingWeights as error:
                print(f"{'':16} not ready: {error}")
    print()
    print("Protocols of files (mhla eval run --protocol NAME; mhla eval doctor NAME says what is missing):")
    list_files()
    return 0


def list_files() -> None:
    """The protocols of files that are found by name."""
    from .protocols.files import VARIABLE, known_protocols, load_protocol

    known = known_protocols()
    if not known:
        print(
            f"none here: clone the repository, whose eval/protocols/ has them, and set {VARIABLE} to that folder"
        )
    for name, path in known.items():
        try:
            summary = load_protocol(path).summary
        except ValueError as error:
            summary = f"cannot be used: {error}"
        print(f"{name:16} {summary}")


def add_compare(parts, add_command: Callable) -> None:
    parser = add_command(parts, "compare", run_compare, "Set results of one protocol side by side.")
    parser.add_argument(
        "results", nargs="+", metavar="RESULT", help="JSON or folder that `mhla eval run` wrote"
    )


def run_compare(args: argparse.Namespace) -> int:
    from .comparison import as_table, read_result

    for line in as_table([read_result(Path(path)) for path in args.results]):
        print(line)
    return 0
