"""Merges the results of twins (train/twins.py) into one JSON, one Markdown table and one contact sheet."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

from PIL import Image, ImageDraw, ImageFont

_SPLITS = ("train", "heldout", "val")
_KEPT = (
    "twin",
    "seed",
    "steps",
    "parameters",
    "flow_loss",
    "motion",
    "prompts",
    "sheet",
    "data",
    "environment",
    "settings",
)
# Where a run lay, what it was called and when a call of it stopped: nothing that its result depends on. Sample grids
# are off in twins; the sheet has settings of its own.
_WITHOUT_EFFECT = (
    "run.name", "run.out", "run.max_minutes", "run.log_every", "run.tracker", "data.cache", "sample.",
)  # fmt: skip
_MAY_DIFFER = (
    "twin",
    "seed",
    "parameters.",
    "flow_loss.",
    "motion.",
    "settings.run.seed",
    "settings.model.transformer.",
)
_ABOUT = (
    "Models that differ in their attention and nothing else; twins of one seed saw the same data, order, noise "
    "and times, and weights that they share in name and shape started equal. `linear` is MHLA with a single "
    "block, which is plain linear attention. `cpe` is a 3 x 3 depthwise convolution of the values, `gate` an "
    "output gate."
)
# What the loss is the mean over, and what the splits are.
_SETS = {
    "pictures": (
        "whole splits, on white,",
        "`heldout`: concepts that were trained on in other styles only; `val`: concepts that were never trained on.",
    ),
    "clips": (
        "clips of each split,",
        "`heldout`: sprites with motions that they were never trained on with; `val`: concepts that were never "
        "trained on.",
    ),
}
_LABEL, _HEADER, _GAP = 150, 68, 4  # pixels: left of the rows, above them (at least), between them


def write_report(
    source: Path,
    target: Path,
    order: Sequence[str],
    stem: str = "twins_emoji",
    *,
    title: str = "Twins on the emoji set",
    about: str = _ABOUT,
    more: Sequence[str] = (),
    unit: str = "pictures",
    splits: Mapping[str, str] | None = None,
    remarks: Sequence[str] = (),
) -> str:
    """Reads `source/<name>-<seed>.json` and `.png`, writes `target/<stem>.json`, `.md` and `.png`; returns the table.

    Args:
        order: names of twins in the order of the rows; others follow.
        title, about: heading of the page, and what its twins are.
        more: lines behind the table of losses.
        unit: "pictures" or "clips", what a batch holds.
        splits: split of each prompt of the sheet, written above its column.
        remarks: sentences that go into the JSON and under the table.

    Raises:
        ValueError: no results there, or a loss that is no number.
    """
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(source.glob("*.json"))]
    results.sort(key=lambda r: (order.index(r["twin"]) if r["twin"] in order else len(order), r["seed"]))
    if not results:
        raise ValueError(f"{source} holds no twin results; train some first, without --report")
    target.mkdir(parents=True, exist_ok=True)
    common, runs = _separate([_flat(_portable(result)) for result in results])
    merged = {"remarks": list(remarks), "common": common, "runs": runs}
    (target / f"{stem}.json").write_text(
        json.dumps(merged, indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    table = _page(results, common, runs, stem, remarks, (title, about, more, unit))
    (target / f"{stem}.md").write_text(table + "\n", encoding="utf-8")
    # A palette: the drawings have few colours, and the file takes a third of the space.
    _sheet(results, source, splits or {}).quantize(256).save(target / f"{stem}.png", optimize=True)
    return table


def _flat(facts: dict, prefix: str = "") -> dict:
    pairs = {}
    for key, value in facts.items():
        pairs |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{key}": value}
        )
    return pairs


def _portable(result: dict) -> dict:
    """What of a result is worth publishing; of paths that hold on one machine only, the last part."""
    settings = {
        key: _without_folder(value)
        for key, value in _flat(result["settings"]).items()
        if not key.startswith(_WITHOUT_EFFECT)
    }
    return {**{key: result[key] for key in _KEPT if key in result}, "settings": settings}


def _without_folder(value: object) -> object:
    if not isinstance(value, str):
        return value
    absolute = PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute()
    return PureWindowsPath(value).name if absolute or value.startswith("~") else value


def _separate(flat: list[dict]) -> tuple[dict, list[dict]]:
    """Facts that all runs share, once; each run with what is its own."""
    common = {
        key: value
        for key, value in flat[0].items()
        if key not in ("twin", "seed") and all(key in f and f[key] == value for f in flat)
    }
    return common, [{key: value for key, value in f.items() if key not in common} for f in flat]


def _page(
    results: list[dict],
    common: dict,
    runs: list[dict],
    stem: str,
    remarks: Sequence[str],
    words: tuple[str, str, Sequence[str], str],
) -> str:
    title, about, more, unit = words
    over, unseen = _SETS[unit]
    setting = {key.removeprefix("settings."): value for key, value in common.items()}
    unlike = sorted({key for run in runs for key in run if not key.startswith(_MAY_DIFFER)})
    lines = [
        f"# {title}",
        "",
        about,
        "",
        f"The numbers are the flow-matching loss of the averaged (EMA) weights over {over} the mean "
        f"over 16 fixed noise levels with fixed noise for each {unit[:-1]}; lower is better. `train`: what was trained "
        f"on; {unseen}",
        "",
        *_run_table(results),
    ]
    spread = _seed_table(results)
    if spread:
        lines += ["", "Over the seeds: mean, and how far the highest lies above the lowest.", "", *spread]
    if more:
        lines += ["", *more]
    counts = {split: common.get(f"flow_loss.{split}.pictures") for split in _SPLITS}
    version = {
        name: common.get(f"environment.{name}") for name in ("torch", "triton", "diffusers", "transformers")
    }
    precision = setting.get("run.mixed_precision")
    lines += [
        "",
        f"{unit.capitalize()} measured: {', '.join(f'{split} {count}' for split, count in counts.items())}.",
        "",
        f"Trained for {common.get('steps')} steps of {setting.get('run.batch_size')} {unit}; learning rate "
        f"{setting.get('optimizer.lr')}, {setting.get('optimizer.schedule')} schedule, EMA {setting.get('ema.decay')}, "
        f"{'float32' if precision == 'no' else precision}. Device {common.get('environment.device')}; "
        f"{', '.join(f'{name} {number}' for name, number in version.items())}. All settings, and the loss at each "
        f"noise level: [{stem}.json]({stem}.json).",
    ]
    if unlike:
        lines += ["", f"Not the same in all runs, beside attention and seed: {', '.join(unlike)}."]
    for remark in remarks:
        lines += ["", remark]
    lines += ["", f"![One row of {unit} for each run]({stem}.png)"]
    return "\n".join(lines)


def _run_table(results: list[dict]) -> list[str]:
    lines = [
        "| twin | seed | parameters of the transformer | train | heldout | val |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        means = " | ".join(f"{result['flow_loss'][split]['mean']:.4f}" for split in _SPLITS)
        lines.append(
            f"| {result['twin']} | {result['seed']} | {result['parameters']['transformer']:,} | {means} |"
        )
    return lines


def _seed_table(results: list[dict]) -> list[str]:
    """A row for each twin that was trained from several seeds; nothing if there is none."""
    rows = []
    for name, group in itertools.groupby(results, key=lambda r: r["twin"]):
        runs = list(group)
        if len(runs) == 1:
            continue
        cells = []
        for split in _SPLITS:
            means = [run["flow_loss"][split]["mean"] for run in runs]
            cells.append(f"{sum(means) / len(means):.4f}, {max(means) - min(means):.4f}")
        rows.append(f"| {name} | {len(runs)} | {' | '.join(cells)} |")
    return ["| twin | seeds | train | heldout | val |", "|---|---|---|---|---|", *rows] if rows else []


def _sheet(results: list[dict], source: Path, splits: Mapping[str, str]) -> Image.Image:
    """One labelled row of pictures for each run, in the table's order, under the prompts."""
    rows = []
    for result in results:
        with Image.open(source / f"{result['twin']}-{result['seed']}.png") as row:
            rows.append(row.convert("RGB"))
    width, height = max(row.width for row in rows), max(row.height for row in rows)
    prompts = results[0]["prompts"]
    # A column of one picture takes twelve letters; clips have several pictures in a column.
    texts = [textwrap.fill(prompt, max(12, width // len(prompts) * 12 // 64)) for prompt in prompts]
    header = max(_HEADER, 20 + 13 * max(text.count("\n") + 1 for text in texts))
    sheet = Image.new("RGB", (_LABEL + width, header + len(rows) * (height + _GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    label, small = ImageFont.load_default(13), ImageFont.load_default(10)
    for column, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        left = _LABEL + column * width / len(prompts)
        draw.text((left + 2, 2), splits.get(prompt, ""), fill="gray", font=small)
        draw.multiline_text((left + 2, 16), text, fill="black", font=small, spacing=1)
    for number, (result, row) in enumerate(zip(results, rows, strict=True)):
        top = header + number * (height + _GAP)
        sheet.paste(row, (_LABEL, top))
        draw.text((4, top + height // 2 - 8), f"{result['twin']}  {result['seed']}", fill="black", font=label)
    return sheet
