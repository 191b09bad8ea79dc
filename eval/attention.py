"""Rank and entropy of attention in the trained emoji pipeline, and in the twins that differ in their attention only.

    python eval/attention.py                                  # the shipped pipeline, and the twins in runs/twins
    python eval/attention.py --twins path/to/twins --seeds 0  # of twins that lie elsewhere

Every pipeline draws the same prompts from the same seeds; all layers and heads are looked at in three of the 20 steps.
Twins are trained by train/twins.py, and their weights lie beside its results, in <out>/runs/<twin>-<seed>/pipeline.
Without any, the table has the shipped pipeline, linear attention of its queries and keys, and the published figures of
DeiT-T. Written are attention.md, attention.json with the figures of all pipelines by kind and by layer, and, for each
pipeline, a JSON with those of every head, and pictures.
"""

import argparse
import sys
from pathlib import Path

from mhla_diffusion.evaluation.diagnostics.commands import diagnose
from mhla_diffusion.evaluation.diagnostics.report import table_of_kinds, write_report
from mhla_diffusion.evaluation.diagnostics.study import Options
from mhla_diffusion.evaluation.image_scores import write_result
from mhla_diffusion.weights import DEFAULT_PIPELINE, find_pipeline

PROMPTS = (
    "a 3D emoji of a red apple",
    "a flat emoji of a whale",
    "a noto style emoji of an owl",
    "a blob style emoji of a snowman",
)
STEPS, AT = 20, (2, 10, 18)
OF_HEADS = ("heads", "rows", "values", "pictures")  # left to each pipeline's own JSON


def twins_of(folder: Path, seeds: list[int]) -> dict[str, Path]:
    """Name and pipeline of each trained twin of these seeds in a folder of train/twins.py."""
    found = {}
    for pipeline in sorted(folder.glob("runs/*/pipeline/model_index.json")):
        name, _, seed = pipeline.parent.parent.name.rpartition("-")
        if seed.isdigit() and int(seed) in seeds:
            found[f"{name}-{seed}"] = pipeline.parent
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pipeline", default=DEFAULT_PIPELINE, help="folder or name (default: %(default)s)")
    add("--twins", type=Path, default=Path("runs/twins"), metavar="FOLDER", help="default: %(default)s")
    add("--seeds", type=int, nargs="+", default=[0], help="of the twins (default: 0)")
    add("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts (default: all)")
    add("--steps", type=int, default=STEPS, help="default: %(default)s")
    add("--at", type=int, nargs="+", default=list(AT), help="steps that are looked at (default: 2 10 18)")
    add("--device", default="auto")
    add("--out", type=Path, default=Path("outputs/attention"), metavar="FOLDER", help="default: %(default)s")
    args = parser.parse_args()
    try:
        folders = {Path(args.pipeline).name: find_pipeline(args.pipeline)}
        twins = twins_of(args.twins, args.seeds)
        if not twins:
            print(
                f"no trained twins in {args.twins} (runs/<twin>-<seed>/pipeline): train them with "
                "python train/twins.py, or name their folder with --twins; going on without them",
                file=sys.stderr,
            )
        results = {}
        for name, folder in {**folders, **twins}.items():
            print(f"looking at {name}", file=sys.stderr)
            results[name] = diagnose(
                folder,
                out=args.out,
                stem=name,
                prompts=PROMPTS[: args.prompts],
                sizes={"steps": args.steps},
                at=args.at,
                options=Options(one_block=True),
                device=args.device,
                dtype="float32",
            )
            # After each, so that a stop loses little.
            write_report(results, args.out / "attention.md")
            short = {
                label: {key: value for key, value in result.items() if key not in OF_HEADS}
                for label, result in results.items()
            }
            write_result({"schema_version": 1, "pipelines": short}, args.out / "attention.json")
    except ValueError as error:
        print(f"attention.py: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 2)
    print("\n".join(table_of_kinds(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
