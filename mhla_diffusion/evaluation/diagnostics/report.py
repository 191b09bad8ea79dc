"""Attention figures of one or several pipelines as a result file, a Markdown table and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...pipelines.pictures import write_atomically
from .mixing_figures import heat_map, sheet
from .study import FIGURES, ONE_BLOCK, PAPER, mixings_of, summary, transformers_of

SCHEMA = 1
TITLES = {
    "rank": "rank",
    "effective_rank": "effective rank",
    "participation_ratio": "participation ratio",
    "stable_rank": "stable rank",
    "entropy": "entropy, nats",
    "relative_entropy": "entropy / log N",
}
KINDS = {ONE_BLOCK: "linear (one block, MHLA's queries and keys)"}
PAPER_REMARK = (
    "DeiT-T: as published with MHLA (arXiv 2601.07832), a classifier on 256 tokens; its rank's threshold is not given. "
    "Other models and inputs have other values: only the order of the kinds compares."
)


def result_of(
    found: dict, *, pipeline: dict, inputs: dict, environment: dict, every_row: bool = False
) -> dict:
    """What is stored of a `study`: figures, and all that decides them."""
    rows = found["rows"]
    heads = [
        {name: value for name, value in entry.items() if name not in ("threshold", "tokens", "head_dim")}
        for entry in summary(rows, ("model", "layer", "head", "kind"))
    ]
    values = {
        f"{entry['kind']}.{name}": {
            "value": entry[name]["mean"],
            "std": entry[name]["std"],
            "n": entry["matrices"],
            "higher_is_better": None,
        }
        for entry in found["kinds"]
        for name in FIGURES
    }
    result = {
        "schema_version": SCHEMA,
        "protocol": "attention",
        "values": values,
        "warnings": warnings_of(found),
        "pipeline": pipeline,
        "inputs": inputs,
        "settings": {**found["options"], "steps": found["steps"], "at": found["at"]},
        "token_grid": found["token_grid"],
        "rank_thresholds": sorted({row["threshold"] for row in rows}),
        "rows_divided_by": sorted({row["rows_divided_by"] for row in rows}),
        "methods": sorted({row["method"] for row in rows}),
        "kinds": found["kinds"],
        "layers": found["layers"],
        "heads": heads,
        "mixing": found["mixing"],
        "paper_deit_t": PAPER,
        "environment": environment,
        "timings": {"seconds": found["seconds"]},
    }
    return result | ({"rows": rows} if every_row else {})


def warnings_of(found: dict) -> list[str]:
    """What a reader must know before comparing these numbers."""
    notes = []
    signed = [entry for entry in found["layers"] if entry["negative_mass"] > 0]
    if signed:
        share = max(entry["negative_mass"] for entry in signed)
        notes.append(
            f"{len(signed)} layers have negative weights (up to {share:.1%} of a row's absolute mass, from rotated "
            "features): their entropy is that of |a| / sum |a|"
        )
    empty = sum(row["entropy_details"]["empty"] for row in found["rows"])
    if empty:
        notes.append(f"{empty} rows attend to nothing (no active feature) and have no entropy")
    if any(row["errors"] for row in found["rows"]):
        worst = max(row["errors"].get("rank", 0) / max(row["rank"], 1) for row in found["rows"])
        notes.append(f"ranks are estimated, with standard errors of up to {worst:.1%} for a single matrix")
    if any(row["entropy_details"]["error"] > 0 for row in found["rows"]):
        worst = max(row["entropy_details"]["error"] for row in found["rows"])
        notes.append(f"entropies are of sampled rows, with standard errors of up to {worst:.2g} nats")
    clipped = [row for row in found["mixing"] if row["at_zero"] + row["at_one"] > 0.5]
    if clipped:
        notes.append(f"{len(clipped)} mixing matrices have more than half of their coefficients on a bound")
    return notes


def number(entry: dict, name: str) -> str:
    value = entry[name]
    digits = 3 if name == "relative_entropy" else 2 if name == "entropy" else 1
    return f"{value['mean']:.{digits}f} ± {value['std']:.{digits}f}"


def head_of(columns: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]


def table_of_kinds(results: dict[str, dict]) -> list[str]:
    """Markdown: a row for each pipeline and kind of attention, then the paper's."""
    further = list(next(iter(results.values()))["kinds"][0]["ranks"])
    others = [f"rank above {value}" for value in further]
    lines = head_of(["pipeline", "attention", "N", "rank bound", *TITLES.values(), *others])
    for name, result in results.items():
        for entry in result["kinds"]:
            cells = [name, title(entry), str(entry["tokens"]), bound(entry)]
            cells += [number(entry, figure) for figure in FIGURES]
            lines.append("| " + " | ".join([*cells, *(f"{entry['ranks'][v]:.1f}" for v in further)]) + " |")
    for kind, published in PAPER.items():
        cells = [str(published.get(figure, "")) for figure in FIGURES]
        lines.append(
            "| " + " | ".join(["DeiT-T, published", kind, "", "", *cells, *[""] * len(further)]) + " |"
        )
    return lines


def title(entry: dict) -> str:
    return KINDS.get(entry["kind"], entry["kind"])


def bound(entry: dict) -> str:
    if isinstance(entry["rank_bound"], list):
        return f"{min(entry['rank_bound'])} to {max(entry['rank_bound'])}"
    return str(entry["rank_bound"])


def table_of_layers(result: dict) -> list[str]:
    lines = head_of(["layer", "attention", "rank bound", *TITLES.values()])
    several = len({entry["model"] for entry in result["layers"]}) > 1
    for entry in result["layers"]:
        name = f"{entry['model']} {entry['layer']}" if several else str(entry["layer"])
        cells = [name, title(entry), bound(entry)]
        lines.append("| " + " | ".join([*cells, *(number(entry, figure) for figure in FIGURES)]) + " |")
    return lines


def table_of_mixing(result: dict) -> list[str]:
    columns = ["layer", "at 0", "at 1", "rank", "effective rank", "row sums", "own block", "reach", "moved"]
    lines = head_of(columns)
    for row in result["mixing"]:
        name = row["module"].removesuffix(".attn1") + (f", {row['matrix']}" if row["matrix"] else "")
        cells = [
            name,
            f"{row['at_zero']:.1%}",
            f"{row['at_one']:.1%}",
            f"{row['rank']} of {len(row['singular_values'])}",
            f"{row['effective_rank']:.1f}",
            f"{row['row_sum_smallest']:.3f} to {row['row_sum_largest']:.3f}",
            f"{row['diagonal']:.1%}",
            f"{row['reach']:.2f} (first {row['initial_reach']:.2f})",
            f"{row['moved']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def as_markdown(results: dict[str, dict]) -> list[str]:
    """The whole report: what was looked at, kinds, the paper's figures, layers, mixing matrices, warnings."""
    lines = ["# Attention: rank and entropy", ""]
    for name, result in results.items():
        inputs, settings = result["inputs"], result["settings"]
        thresholds = ", ".join(f"{value:.3g}" for value in result["rank_thresholds"])
        lines += [
            f"{name}: {len(inputs['prompts'])} drawings (seeds {', '.join(map(str, inputs['seeds']))}), after "
            f"{', '.join(map(str, settings['at']))} of {settings['steps']} steps, token grid "
            f"{' x '.join(map(str, result['token_grid']))}; rank: singular values above {thresholds} of the largest "
            f"({'; '.join(result['methods'])}).",
            "",
        ]
    lines += ["Mean ± deviation over layers, heads, steps and drawings.", "", *table_of_kinds(results), ""]
    lines += [PAPER_REMARK, ""]
    for name, result in results.items():
        lines += [f"## {name}: layers", "", *table_of_layers(result), ""]
        if result["mixing"]:
            lines += [f"## {name}: mixing matrices", "", *table_of_mixing(result), ""]
            lines += ["reach: mean distance of a row's weight in blocks; moved: relative to the start.", ""]
        lines += [f"- {note}" for note in result["warnings"]] + [""] * bool(result["warnings"])
    return lines


def write_report(results: dict[str, dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(as_markdown(results)).rstrip() + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def write_pictures(pipe, found: dict, folder: Path, stem: str) -> list[Path]:
    """PNGs: the row of the middle token in each layer, and the rows of each mixing matrix; returns what was written."""
    pictures = {}
    if found["maps"]:
        captions, maps = zip(*found["maps"], strict=True)
        pictures["rows"] = sheet(list(maps), captions)
    maps, captions = [], []
    for name, model in transformers_of(pipe).items():
        for module, mixing in mixings_of(model).items():
            weight = mixing.weight.detach()
            mean = weight.mean(dim=0) if weight.ndim == 3 else weight
            layer = module.removesuffix(".attn1").rpartition(".")[2]
            maps.append(heat_map(mean, mixing.block_grid))
            captions.append(f"{name} layer {layer}" + (", mean of heads" if weight.ndim == 3 else ""))
    if maps:
        pictures["mixing"] = sheet(maps, captions)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, picture in pictures.items():
        path = folder / f"{stem}_{name}.png"
        write_atomically(path, lambda file, picture=picture: picture.save(file, format="PNG"))
        written.append(path)
    return written
