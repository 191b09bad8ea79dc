"""Trains models that differ in nothing but their attention, and compares them.

    python train/twins.py train/recipes/twins-emoji.toml                          # all of them, one after another
    python train/twins.py train/recipes/twins-emoji.toml --only mhla:0,softmax:0  # a share, for one of several GPUs
    python train/twins.py --report                                                # merge what is there into the table
    python train/twins.py train/recipes/twins-wan-emoji.toml --out runs/wan-twins # the same for videos
    python train/twins.py train/recipes/twins-wan-emoji.toml --out runs/wan-twins --report

Each twin writes <out>/<name>-<seed>.json and a row of pictures <out>/<name>-<seed>.png; a twin whose files are there is
not trained again. `linear` is MHLA with one block, which is plain linear attention. Twins of one seed see the same
data, order, noise and times; weights that they share in name and shape start equal. Twins that make videos also draw
the held-out prompts of eval/prompts/moving_emoji.jsonl, and their motion is measured.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mhla_diffusion import load_pipeline
from mhla_diffusion.evaluation.moving.prompted import read_prompts, summary, table
from mhla_diffusion.evaluation.moving.scores import score_clip
from mhla_diffusion.pipelines.videos import as_frames
from mhla_diffusion.training.components import Components, build_components
from mhla_diffusion.training.config import VIDEO_KINDS, Recipe, SampleConfig
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
# Of Wan. `softmax` is the stock model; in `softmax+cpe+gate` every layer has the convolution and the gate, too.
SHIPPED = {"mhla_block_grid": [3, 5, 5]} | CPE | GATE
VIDEO_TWINS = {
    "softmax": {"mhla_layers": []},
    "linear": {"mhla_layers": "all"} | SHIPPED | {"mhla_block_grid": [1, 1, 1]},
    "mhla": {"mhla_layers": "all"} | SHIPPED,
    "hybrid": {"mhla_layers": "2/3"} | SHIPPED,
    "softmax+cpe+gate": SOFTMAX | CPE | GATE,
}
VIDEO_RUNS = [("hybrid", 0), ("softmax", 0), ("mhla", 0), ("linear", 0), ("hybrid", 1), ("softmax", 1),
              ("softmax+cpe+gate", 0)]  # fmt: skip
CLIPS = 512  # of each split, for the loss of videos
DRAWN = (0, 1, 2)  # seeds of the clips whose motion is measured
SHOWN = (0, 5, 11, 16)  # frames of a clip in the sheet
SPLITS = ("train", "heldout", "val")
SHEET = SampleConfig(seed=0, steps=20, guidance=4.0)  # how each row of pictures is drawn


def row_prompts() -> list[str]:
    """Twelve prompts of the project's fixed list: six seen, six whose drawing was held out."""
    listed = fixed_prompts()
    return [
        p["prompt"] for split in ("train", "heldout") for p in [q for q in listed if q["split"] == split][:6]
    ]


def shown_clips() -> list[str]:
    """Four held-out prompts of moving emoji for the sheet."""
    listed = [p for p in read_prompts().values() if p.split == "heldout"]
    return [
        next(p.prompt for p in listed if p.motion == motion) for motion in ("up", "spin", "grow", "bounce")
    ]


def makes_clips(recipe: Recipe) -> bool:
    return recipe.data.kind in VIDEO_KINDS


def twin_recipe(path: str, overrides: list[str], name: str, seed: int, out: Path) -> Recipe:
    """The base recipe with one twin's attention, seed and folder."""
    recipe = load_recipe(path, [*overrides, f"run.seed={seed}", f'run.name="{name}-{seed}"'])
    recipe.run.out = str(out / "runs" / f"{name}-{seed}")
    twins = VIDEO_TWINS if makes_clips(recipe) else TWINS
    recipe.model.transformer = {**(recipe.model.transformer or {}), **twins[name]}
    return recipe


def measure(recipe: Recipe, folder: Path, device: torch.device) -> tuple[dict, Components]:
    """Flow losses of an exported pipeline on each split, and its parts."""
    parts = build_components(recipe)
    pipeline = load_pipeline(folder)
    parts.transformer, parts.text_encoder = pipeline.transformer.float(), pipeline.text_encoder.float()
    module = FlowLoss(parts.transformer, parts.text_encoder)
    plain = (
        {"clips": CLIPS}
        if makes_clips(recipe)
        else {"backgrounds": 0, "compositions": 0, "tag_captions": False}
    )
    losses = {}
    for split in SPLITS:
        data = dataclasses.replace(recipe.data, split=split, **plain)
        source = open_source(data, parts.latent_factor, 0, frame_factor=parts.frame_factor, device=device)
        encoded = load_or_encode(source, parts, data, device)
        table = caption_table(
            encoded, parts, True, recipe.data.max_sequence_length or parts.max_sequence_length, device
        )
        bf16, batch = recipe.run.mixed_precision == "bf16", 128 if makes_clips(recipe) else 512
        losses[split] = flow_losses(module, encoded, table, device=device, bf16=bf16, batch_size=batch)
    return losses, parts


def clips_of(
    parts: Components, prompts: list[str], sample: SampleConfig, recipe: Recipe, device
) -> list[np.ndarray]:
    """Each prompt's clip `(F, H, W, 3)` uint8, clip i from noise seeded (sample.seed, i)."""
    size = tuple(recipe.data.sizes[0])
    return [as_frames(clip) for clip in draw_pictures(parts, prompts, sample, size, device)]


def measure_motion(parts: Components, recipe: Recipe, device: torch.device) -> dict:
    """Scores of clips of the held-out prompts, which the twin draws with its averaged weights."""
    listed = [p for p in read_prompts().values() if p.split == "heldout"]
    scored = []
    for seed in DRAWN:
        sample = dataclasses.replace(SHEET, seed=seed)
        clips = clips_of(parts, [p.prompt for p in listed], sample, recipe, device)
        scored += [score_clip(clip, prompt, seed) for clip, prompt in zip(clips, listed, strict=True)]
    return summary(scored)


def draw_row(
    parts: Components, prompts: list[str], recipe: Recipe, device: torch.device
) -> list[Image.Image]:
    """The pictures of a twin's row: one a prompt, of a clip some of its frames."""
    if not makes_clips(recipe):
        return draw_pictures(parts, prompts, SHEET, recipe.data.size, device)
    clips = clips_of(parts, prompts, SHEET, recipe, device)
    return [Image.fromarray(clip[min(i, len(clip) - 1)]) for clip in clips for i in SHOWN]


def run_twin(recipe: Recipe, name: str, seed: int, out: Path) -> None:
    """Trains and measures one twin and writes its two files."""
    torch.compiler.reset()  # each twin is another model: past the limit of recompilations it would silently run eagerly
    result = train(recipe, resume="auto")
    if not result.finished:
        print(f"{name}:{seed} stopped at step {result.step}; run the same command again to go on")
        return
    device = torch.device("cuda" if torch.cuda.is_available() and recipe.run.device != "cpu" else "cpu")
    losses, parts = measure(recipe, result.pipeline, device)
    prompts = shown_clips() if makes_clips(recipe) else row_prompts()
    row = draw_row(parts, prompts, recipe, device)
    contact_sheet(row, columns=len(row)).save(out / f"{name}-{seed}.png")
    # No speeds: a run may be finished by several calls, beside others on one GPU. metrics.jsonl has them.
    facts = {
        "twin": name,
        "seed": seed,
        "flow_loss": losses,
        "parameters": json.loads((result.out / "run.json").read_text())["parameters"],
        "steps": result.step,
        "prompts": prompts,
        "sheet": {"seed": SHEET.seed, "steps": SHEET.steps, "guidance": SHEET.guidance},
        "data": {"sha256": hashlib.sha256(Path(recipe.data.path).read_bytes()).hexdigest()},
        "environment": environment(device),
        "settings": dataclasses.asdict(recipe),
    }
    if makes_clips(recipe):
        facts["motion"] = measure_motion(parts, recipe, device)
    target = out / f"{name}-{seed}.json"
    target.with_suffix(".tmp").write_text(json.dumps(facts, indent=1, allow_nan=False))
    target.with_suffix(".tmp").replace(target)


def report(args: argparse.Namespace, videos: bool) -> str:
    """Merges the results in `args.out` and writes the table and the sheet."""
    if not videos:
        splits = {p["prompt"]: p["split"] for p in fixed_prompts()}
        return write_report(args.out, args.report_to, order=list(TWINS), splits=splits, remarks=args.remark)
    found = [json.loads(path.read_text()) for path in sorted(args.out.glob("*.json"))]
    found.sort(key=lambda f: (list(VIDEO_TWINS).index(f["twin"]), f["seed"]))
    motions = table({f"{f['twin']}, seed {f['seed']}": f["motion"] for f in found}) if found else ""
    return write_report(
        args.out,
        args.report_to,
        order=list(VIDEO_TWINS),
        stem="twins_wan_emoji",
        title="Twins on clips of moving emoji",
        about=VIDEO_WORDS,
        more=[MOTION_WORDS, "", *motions.split("\n")],
        splits=dict.fromkeys(shown_clips(), "heldout"),
        remarks=args.remark,
        unit="clips",
    )


VIDEO_WORDS = (
    "Wan models at toy size that differ in their self-attention and nothing else; twins of one seed saw the same "
    "clips, order, noise and times, and weights that they share in name and shape started equal. `softmax` is the "
    "stock model. `linear` is MHLA with a single block, which is plain linear attention; `mhla` has 3 x 5 x 5 blocks "
    "in every layer, `hybrid` in all but layers 0 and 3, which keep softmax. MHLA and linear layers have an output "
    "gate and a 3 x 3 x 3 depthwise convolution of the values; in `softmax+cpe+gate` the softmax layers have them, too."
)
MOTION_WORDS = (
    "Clips of 96 prompts whose sprite was never trained on with that motion, drawn from three seeds each: the share "
    "that shows the motion, and the background, that the prompt asks for, measured in the pixels (`eval/README.md`). "
    "Behind ± is the standard error over prompts. Real clips of the same prompts score 100 % and flicker 0.9846."
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="train/recipes/twins-emoji.toml")
    parser.add_argument("--only", default="", metavar="NAME:SEED,...", help="train these only")
    parser.add_argument("--out", type=Path, default=Path("runs/twins"))
    parser.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", default=[], metavar="SECTION.KEY=VALUE"
    )
    parser.add_argument("--report", action="store_true", help="train nothing; write the table and the sheet")
    parser.add_argument("--report-to", type=Path, default=Path("eval/results"), metavar="FOLDER")
    parser.add_argument("--remark", action="append", default=[], help="a sentence for the report; repeatable")
    args = parser.parse_args()
    try:
        base = load_recipe(args.recipe, args.overrides)
        videos = makes_clips(base)
        if args.report:
            print(report(args, videos))
            return 0
        chosen, known = (VIDEO_RUNS, VIDEO_TWINS) if videos else (RUNS, TWINS)
        if args.only:
            chosen = [
                (n, int(s or 0)) for n, _, s in (item.strip().partition(":") for item in args.only.split(","))
            ]
            unknown = [name for name, _ in chosen if name not in known]
            if unknown:
                raise ValueError(f"no twin {unknown[0]!r}; choose among {', '.join(known)}")
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
