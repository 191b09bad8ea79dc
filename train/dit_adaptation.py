"""Loss curves of a softmax DiT and of its adaptation to MHLA, step by step on the same pictures, noise and times.

    mhla train train/recipes/dit-emoji.toml
    mhla train train/recipes/dit-emoji-mhla.toml
    mhla train train/recipes/dit-emoji.toml --set run.steps=2400
    python train/dit_adaptation.py

Reads the runs' folders and writes eval/results/dit_emoji_adaptation.json and .png. Several adaptations can be compared,
such as those that the head of train/recipes/dit-emoji-mhla.toml lists: --adapted runs/a runs/b. The models are also
compared on drawings that none of them has seen, with fixed noise and times. Needs the `eval` extra (matplotlib).
"""

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from PIL import Image

from mhla_diffusion import convert, load_pipeline
from mhla_diffusion.loading import no_library_bars
from mhla_diffusion.models.convert import restore
from mhla_diffusion.training.components import Components
from mhla_diffusion.training.config import DataConfig
from mhla_diffusion.training.data import open_source
from mhla_diffusion.training.diffusion import DiffusionLoss
from mhla_diffusion.training.latents import label_table, load_or_encode
from mhla_diffusion.training.provenance import environment
from mhla_diffusion.training.validation import flow_losses

SPLITS = ("val", "heldout")
LAST = 200  # steps at the end whose mean stands for a run
NEAR = 1.02  # "level with the original" is within two per cent of it
COLOURS = ("#cc3311", "#228833", "#aa3377", "#ee8866", "#ccbb44")
SOFTMAX = "#4477aa"


def read_run(folder: Path) -> dict:
    """Facts, steps and losses of a run; ValueError when it is not there or not finished."""
    try:
        facts = json.loads((folder / "run.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except OSError as error:
        raise ValueError(f"{folder} holds no run ({error.strerror}): make it with mhla train first") from None
    if not (folder / "pipeline" / "model_index.json").is_file() or not lines:
        raise ValueError(f"{folder} holds a run that has not finished: type its mhla train line again")
    steps, losses = [line["step"] for line in lines], [round(line["loss"], 6) for line in lines]
    return {"folder": folder, "facts": facts, "recipe": facts["recipe"], "steps": steps, "losses": losses}


def check_pair(original: dict, adapted: dict) -> None:
    """ValueError unless both runs see the same batches at the same steps, as far as both go."""
    ours, theirs = adapted["recipe"], original["recipe"]
    if ours["model"]["convert"] is None:
        raise ValueError(f"{adapted['folder']} is no adaptation: its recipe has no [model.convert]")
    for section, key in (
        ("run", "seed"),
        ("run", "batch_size"),
        ("run", "log_every"),
        ("data", "caption_dropout"),
    ):
        if ours[section][key] != theirs[section][key]:
            raise ValueError(
                f"{section}.{key} is {ours[section][key]} in {adapted['folder']} and {theirs[section][key]} in "
                f"{original['folder']}: the curves would not show the same batches"
            )
    if adapted["facts"]["data"] != original["facts"]["data"]:
        raise ValueError(f"{adapted['folder']} was trained on other pictures than {original['folder']}")
    if original["steps"][-1] < adapted["steps"][-1]:
        last = adapted["steps"][-1]
        raise ValueError(
            f"{original['folder']} ends at step {original['steps'][-1]}: let it go on with mhla train ... --set "
            f"run.steps={last}"
        )


def tail(run: dict, last: int) -> float:
    """Mean loss of the windows of the last steps up to `last`."""
    losses = [
        loss for step, loss in zip(run["steps"], run["losses"], strict=True) if last - LAST < step <= last
    ]
    return sum(losses) / len(losses)


def comparison(original: dict, adapted: dict) -> dict:
    """What the curves say in numbers."""
    beside = dict(zip(original["steps"], original["losses"], strict=True))
    pairs = [
        (s, loss, beside[s])
        for s, loss in zip(adapted["steps"], adapted["losses"], strict=True)
        if s in beside
    ]
    first, last = adapted["recipe"]["run"]["first_step"], adapted["steps"][-1]
    level = next((step - first for step, ours, theirs in pairs if ours <= NEAR * theirs), None)
    return {
        "first_step": first,
        "last_step": last,
        "first_window": pairs[0][1],
        "first_window_softmax": pairs[0][2],
        "last_steps": LAST,
        "loss": tail(adapted, last),
        "loss_softmax": tail(original, last),
        "steps_until_level": level,
        "level_means_at_most": NEAR,
    }


def unseen_losses(transformer, pipe, recipe: dict, device: torch.device) -> dict:
    """Loss with fixed noise and times on drawings of the splits that nobody trained on."""
    numbers = dict(pipe.labels)
    module = DiffusionLoss(
        transformer.float(), pipe.scheduler.betas, recipe["loss"]["variational_weight"]
    ).to(device)
    base = Path(recipe["model"]["base"])
    parts = Components(None, base, None, pipe.scheduler, transformer, None, class_numbers=numbers)
    losses = {}
    for split in SPLITS if recipe["data"]["kind"] == "emoji" else ():
        data = dataclasses.replace(DataConfig(**recipe["data"]), split=split, backgrounds=0, flip=False)
        encoded = load_or_encode(
            open_source(data, parts.latent_factor, 0, by_class=True), parts, data, device
        )
        table = label_table(encoded, numbers, pipe.num_classes)
        losses[split] = flow_losses(module, encoded, table, device=device)["mean"]
    transformer.to("cpu")
    return losses


def name_of(run: dict) -> str:
    model = run["recipe"]["model"]
    options = model["convert"]
    parts = ["MHLA"]
    parts += ["gate"] * bool(options["gate"]) + ["local convolution"] * bool(options["local_conv"])
    layers = options["layers"]
    listed = layers if layers is None or isinstance(layers, str) else ", ".join(map(str, layers))
    some = "" if listed in (None, "all") else f", layers {listed}"
    distilled = run["recipe"].get("distill", {}).get("steps")  # older runs know nothing of it
    warm = f", distilled for {distilled} steps" if distilled else ""
    return f"{' + '.join(parts)}{some}{warm}, trained: {model['train']}"


def curve(run: dict) -> dict:
    facts = run["facts"]
    return {
        "steps": run["steps"],
        "loss": run["losses"],
        "trained_parameters": facts["trained_parameters"],
        "parameters": facts["parameters"]["transformer"],
        "recipe": without_places(run["recipe"]),
    }


def distillation(run: dict) -> dict:
    """Steps and mean relative error of the layers, where the run began with a distillation."""
    if not run["recipe"].get("distill", {}).get("steps"):
        return {}
    text = (run["folder"] / "distillation.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return {
        "distillation": {
            "steps": [line["step"] for line in lines],
            "error": [round(line["loss"], 6) for line in lines],
        }
    }


def without_places(recipe: dict) -> dict:
    """The recipe without the folders of the machine that it ran on."""
    kept = {section: dict(values) for section, values in recipe.items()}
    kept["run"].pop("out")
    kept["data"].pop("cache")
    return kept


def report(original: dict, adapted: list[dict], device: torch.device) -> dict:
    with no_library_bars():
        pipe = load_pipeline(original["folder"] / "pipeline")
    recipe = original["recipe"]
    fields = adapted[0]["recipe"]["model"]["convert"]
    untrained = convert(
        restore(pipe.transformer),
        block_grid=fields["block_grid"],
        layers="all" if fields["layers"] is None else fields["layers"],
    )
    facts = {
        "what": "Training loss of a small softmax DiT on the emoji set's subgroups, and of its adaptation to MHLA: "
        f"windows of {recipe['run']['log_every']} steps, which see the same pictures, noise and times at the same step",
        "softmax": curve(original) | {"unseen": unseen_losses(pipe.transformer, pipe, recipe, device)},
        "converted_untrained": {"unseen": unseen_losses(untrained, pipe, recipe, device)},
        "adapted": [],
        "environment": {"training": original["facts"]["environment"], "evaluation": environment(device)},
        "data_sha256": original["facts"]["data"],
    }
    for run in adapted:
        with no_library_bars():
            own = load_pipeline(run["folder"] / "pipeline")
        facts["adapted"].append(
            {"name": name_of(run)}
            | distillation(run)
            | curve(run)
            | {"comparison": comparison(original, run)}
            | {"unseen": unseen_losses(own.transformer, pipe, recipe, device)}
        )
    return facts


def last_grid(run: dict) -> Path | None:
    grids = sorted((run["folder"] / "samples").glob("step-*.png"))
    return grids[-1] if grids else None


def draw(original: dict, adapted: list[dict], out: Path) -> None:
    runs = [("softmax", original), *((name_of(run).partition(", trained")[0], run) for run in adapted)]
    grids = [(name, path) for name, run in runs if (path := last_grid(run))]
    rows = 1 if len(grids) <= 2 else 2
    columns = -(-len(grids) // rows)
    figure = pyplot.figure(figsize=(8 + 2.7 * columns, 4.4 if rows == 1 else 5.6), dpi=110)
    layout = figure.add_gridspec(rows, 1 + columns, width_ratios=[3] + [1] * columns)
    axes = figure.add_subplot(layout[:, 0])
    axes.plot(
        original["steps"], original["losses"], color=SOFTMAX, linewidth=1.2, label="softmax (the original)"
    )
    for number, run in enumerate(adapted):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(run["steps"], run["losses"], color=colour, linewidth=1.2, label=name_of(run))
    first = adapted[0]["recipe"]["run"]["first_step"]
    axes.axvline(first, color="#999999", linewidth=0.8, linestyle=":")
    axes.annotate("converted", (first, 0.99), xycoords=("data", "axes fraction"), ha="right", va="top", fontsize=8,
                  rotation=90, color="#666666")  # fmt: skip
    settled = [
        loss for step, loss in zip(original["steps"], original["losses"], strict=True) if step > first / 4
    ]
    settled += [loss for run in adapted for loss in run["losses"]]
    low, high = min(settled), max(settled)
    axes.set_ylim(low - 0.1 * (high - low), high + 0.3 * (high - low))
    axes.set(xlabel="step", ylabel="training loss")
    axes.grid(True, color="#e6e6e6", linewidth=0.7)
    axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for number, (name, path) in enumerate(grids):
        place = figure.add_subplot(layout[number // columns, 1 + number % columns])
        with Image.open(path) as picture:
            place.imshow(picture.convert("RGB"))
        place.set_title(f"{name}, step {int(path.stem.partition('-')[2])}", fontsize=8)
        place.axis("off")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    pyplot.close(figure)
    with Image.open(out) as picture:  # a palette is a quarter of the size
        small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(out, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--original", type=Path, default=Path("runs/dit-emoji"), metavar="FOLDER")
    parser.add_argument(
        "--adapted", type=Path, nargs="+", default=[Path("runs/dit-emoji-mhla")], metavar="FOLDER"
    )
    parser.add_argument("--out", type=Path, default=Path("eval/results/dit_emoji_adaptation"), metavar="NAME",
                        help="files without their ending (default: %(default)s)")  # fmt: skip
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        original = read_run(args.original)
        adapted = [read_run(folder) for folder in args.adapted]
        for run in adapted:
            check_pair(original, run)
        facts = report(original, adapted, device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    draw(original, adapted, args.out.with_suffix(".png"))
    text = json.dumps(facts, indent=1, allow_nan=False)
    text = re.sub(
        r"\[\s*([-\d.,e\s]+?)\s*\]", lambda found: f"[{' '.join(found[1].split())}]", text
    )  # lists in a line
    args.out.with_suffix(".json").write_text(text + "\n")
    for entry in facts["adapted"]:
        said = entry["comparison"]
        level = said["steps_until_level"]
        when = f"level after {level} steps" if level is not None else "never level"
        print(f"{entry['name']}: loss {said['loss']:.4f}, softmax {said['loss_softmax']:.4f}, {when}")
    print(f"{args.out.with_suffix('.json')} and .png written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
