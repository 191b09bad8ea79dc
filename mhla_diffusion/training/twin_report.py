"""Merges the results of twins (train/twins.py) into one JSON, one Markdown table and one contact sheet."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_LABEL = 150  # pixels left of each row


def write_report(source: Path, target: Path, order: list[str], stem: str = "twins_emoji") -> str:
    """Reads `source/<name>-<seed>.json` and `.png`, writes `target/<stem>.json`, `.md` and `.png`; returns the table.

    Raises:
        ValueError: no results there.
    """
    results = [json.loads(path.read_text()) for path in sorted(source.glob("*.json"))]
    results.sort(key=lambda r: (order.index(r["twin"]) if r["twin"] in order else len(order), r["seed"]))
    if not results:
        raise ValueError(f"{source} holds no twin results; train some first, without --report")
    target.mkdir(parents=True, exist_ok=True)
    common, runs = _separate(results)
    (target / f"{stem}.json").write_text(json.dumps({"common_settings": common, "runs": runs}, indent=1))
    table = _table(results, common)
    (target / f"{stem}.md").write_text(table + "\n")
    _sheet(results, source).save(target / f"{stem}.png", optimize=True)
    return table


def _flat(settings: dict, prefix: str = "") -> dict:
    pairs = {}
    for key, value in settings.items():
        pairs |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{key}": value}
        )
    return pairs


def _separate(results: list[dict]) -> tuple[dict, list[dict]]:
    """Settings that all runs share, once; each run with what is its own."""
    flat = [_flat(r["settings"]) for r in results]
    common = {k: v for k, v in flat[0].items() if all(k in f and f[k] == v for f in flat)}
    runs = []
    for result, settings in zip(results, flat, strict=True):
        own = {k: v for k, v in settings.items() if k not in common}
        runs.append({**{k: v for k, v in result.items() if k != "settings"}, "own_settings": own})
    return common, runs


def _table(results: list[dict], common: dict) -> str:
    first = results[0]
    environment = first["environment"]
    lines = [
        "# Twins on the emoji set",
        "",
        "Models that differ in their attention only; twins of one seed saw the same data, order, noise and times. "
        "Flow loss of the EMA weights over whole splits, mean over 16 fixed noise levels with fixed noise per picture "
        "(lower is better). `linear` is MHLA with a single block, which is plain linear attention.",
        "",
        f"{first['steps']} steps of batch {common.get('run.batch_size')}, {common.get('run.mixed_precision')}; torch "
        f"{environment['torch']}, diffusers {environment['diffusers']}, {environment['device']}.",
        "",
        "| twin | seed | transformer parameters | train | heldout | val | images/s | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        loss = result["flow_loss"]
        lines.append(
            f"| {result['twin']} | {result['seed']} | {result['parameters']['transformer']:,} | "
            + " | ".join(f"{loss[split]['mean']:.5f}" for split in ("train", "heldout", "val"))
            + f" | {result['images_per_second']:,.0f} | {result['wall_minutes']:.1f} |"
        )
    pictures = ", ".join(
        f"{split} {first['flow_loss'][split]['pictures']}" for split in ("train", "heldout", "val")
    )
    lines += ["", f"Pictures: {pictures}. Prompts of the sheet: " + "; ".join(first["prompts"]) + "."]
    return "\n".join(lines)


def _sheet(results: list[dict], source: Path) -> Image.Image:
    """One labelled row of pictures for each run, in the table's order."""
    rows = [(r, Image.open(source / f"{r['twin']}-{r['seed']}.png").convert("RGB")) for r in results]
    width, height = max(row.width for _, row in rows), max(row.height for _, row in rows)
    sheet = Image.new("RGB", (_LABEL + width, len(rows) * (height + 4) - 4), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for number, (result, row) in enumerate(rows):
        top = number * (height + 4)
        sheet.paste(row, (_LABEL, top))
        draw.text((4, top + height // 2 - 8), f"{result['twin']}  {result['seed']}", fill="black", font=font)
    return sheet
