"""Trains models that differ in nothing but their attention, and compares them.

    python train/twins.py train/recipes/twins-emoji.toml                          # all of them, one after another
    python train/twins.py train/recipes/twins-emoji.toml --only mhla:0,softmax:0  # a share, for one of several GPUs
    python train/twins.py --report                                                # merge what is there into the table

Each twin writes <out>/<name>-<seed>.json and a row of pictures <out>/<name>-<seed>.png; a twin whose files are there is
not trained again. `linear` is MHLA with one block, which is plain linear attention. Twins of one seed see the same
data, order, noise and times; weights that they share in name and shape start equal.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import torch

from mhla_diffusion import load_pipeline
from mhla_diffusion.training.components import build_components
from mhla_diffusion.training.config import Recipe, SampleConfig
from mhla_diffusion.training.data import open_source
from mhla_diffusion.training.emoji import fixed_prompts
from mhla_diffusion.training.export import contact_sheet, draw_pictures
from mhla_diffusion.training.latents import caption_table, load_or_encode
from mhla_diffusion.training.loop import train
from mhla_diffusion.training.losses import FlowLoss
from mhla_diffusion.training.provenance import environment
from mhla_diffusion.training.recipe import load_recipe
from mhla_diffusion.training.twin_report import write_report
from mhla_diffusion.training.validation import flow_losses

SOFTMAX = {"mhla_layers": [], "mhla_other_layers": "softmax"}
LINEAR = {"mhla_block_grid": [1, 1]}
MHLA = {"mhla_block_grid": [4, 4]}
CPE, GATE = {"mhla_local_conv": 3}, {"mhla_gate": True}
TWINS = {
    "softmax": SOFTMAX,
    "linear": LINEAR,
    "mhla": MHLA,
    "mhla+cpe": MHLA | CPE,
    "softmax+cpe+gate": SOFTMAX | CPE | GATE,
    "linear+cpe+gate": LINEAR | CPE | GATE,
    "mhla+cpe+gate": MHLA | CPE | GATE,
}
# Two seeds for the bare three, whose differences are the point; the order is the order of importance.
RUNS = [("mhla", 0), ("softmax", 0), ("linear", 0), ("mhla+cpe+gate", 0), ("softmax+cpe+gate", 0),
        ("linear+cpe+gate", 0), ("mhla+cpe", 0), ("mhla", 1), ("softmax", 1), ("linear", 1)]  # fmt: skip
SPLITS = ("train", "heldout", "val")
SHEET = SampleConfig(seed=0, steps=20, guidance=4.0)  # how each row of pictures is drawn


def row_prompts() -> list[str]:
    """Twelve prompts of the project's fixed list: six seen, six whose drawing was held out."""
    listed = fixed_prompts()
    return [
        p["prompt"] for split in ("train", "heldout") for p in [q for q in listed if q["split"] == split][:6]
    ]


def twin_recipe(path: str, overrides: list[str], name: str, seed: int, out: Path) -> Recipe:
    """The base recipe with one twin's attention, seed and folder."""
    recipe = load_recipe(path, [*overrides, f"run.seed={seed}", f'run.name="{name}-{seed}"'])
    recipe.run.out = str(out / "runs" / f"{name}-{seed}")
    recipe.model.transformer = {**(recipe.model.transformer or {}), **TWINS[name]}
    return recipe


def measure(recipe: Recipe, folder: Path, device: torch.device) -> tuple[dict, list]:
    """Flow losses of an exported pipeline on each split, and the pictures of its row."""
    parts = build_components(recipe)
    pipeline = load_pipeline(folder)
    parts.transformer, parts.text_encoder = pipeline.transformer.float(), pipeline.text_encoder.float()
    module = FlowLoss(parts.transformer, parts.text_encoder)
    losses = {}
    for split in SPLITS:
        data = dataclasses.replace(
            recipe.data, split=split, backgrounds=0, compositions=0, tag_captions=False
        )
        encoded = load_or_encode(open_source(data, parts.latent_factor, 0), parts, data, device)
        table = caption_table(encoded, parts, True, parts.max_sequence_length, device)
        bf16 = recipe.run.mixed_precision == "bf16"
        losses[split] = flow_losses(module, encoded, table, device=device, bf16=bf16)
    return losses, draw_pictures(parts, row_prompts(), SHEET, recipe.data.size, device)


def run_twin(recipe: Recipe, name: str, seed: int, out: Path) -> None:
    """Trains and measures one twin and writes its two files."""
    torch.compiler.reset()  # each twin is another model: past the limit of recompilations it would silently run eagerly
    result = train(recipe, resume="auto")
    if not result.finished:
        print(f"{name}:{seed} stopped at step {result.step}; run the same command again to go on")
        return
    device = torch.device("cuda" if torch.cuda.is_available() and recipe.run.device != "cpu" else "cpu")
    losses, row = measure(recipe, result.pipeline, device)
    contact_sheet(row, columns=len(row)).save(out / f"{name}-{seed}.png")
    # No speeds: a run may be finished by several calls, beside others on one GPU. metrics.jsonl has them.
    facts = {
        "twin": name,
        "seed": seed,
        "flow_loss": losses,
        "parameters": json.loads((result.out / "run.json").read_text())["parameters"],
        "steps": result.step,
        "prompts": row_prompts(),
        "sheet": {"seed": SHEET.seed, "steps": SHEET.steps, "guidance": SHEET.guidance},
        "data": {"sha256": hashlib.sha256(Path(recipe.data.path).read_bytes()).hexdigest()},
        "environment": environment(device),
        "settings": dataclasses.asdict(recipe),
    }
    target = out / f"{name}-{seed}.json"
    target.with_suffix(".tmp").write_text(json.dumps(facts, indent=1, allow_nan=False))
    target.with_suffix(".tmp").replace(target)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="train/recipes/twins-emoji.toml")
    parser.add_argument("--only", default="", metavar="NAME:SEED,...", help="train these only")
    parser.add_argument("--out", type=Path, default=Path("runs/twins"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--report", action="store_true", help="train nothing; write the table and the sheet")
    parser.add_argument("--report-to", type=Path, default=Path("eval/results"), metavar="FOLDER")
    parser.add_argument("--remark", action="append", default=[], help="a sentence for the report; repeatable")
    args = parser.parse_args()
    try:
        if args.report:
            splits = {p["prompt"]: p["split"] for p in fixed_prompts()}
            print(
                write_report(args.out, args.report_to, order=list(TWINS), splits=splits, remarks=args.remark)
            )
            return 0
        chosen = RUNS
        if args.only:
            chosen = [
                (n, int(s or 0)) for n, _, s in (item.strip().partition(":") for item in args.only.split(","))
            ]
            unknown = [name for name, _ in chosen if name not in TWINS]
            if unknown:
                raise ValueError(f"no twin {unknown[0]!r}; choose among {', '.join(TWINS)}")
        args.out.mkdir(parents=True, exist_ok=True)
        for name, seed in chosen:
            if (args.out / f"{name}-{seed}.json").is_file():
                print(f"{name}:{seed} is done already")
                continue
            run_twin(twin_recipe(args.recipe, args.overrides, name, seed, args.out), name, seed, args.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
