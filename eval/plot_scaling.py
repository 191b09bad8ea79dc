"""Draws the operator's and its peers' time against the number of tokens, from what `mhla bench op --scaling` wrote.

    python eval/plot_scaling.py outputs/op_scaling.json outputs/operator_scaling.png

Needs the `eval` extra (matplotlib).
"""

import argparse
import io
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from PIL import Image

OURS = "MHLA, this package"
# Told apart without colour, too: every line has its name at its end.
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377", "#888888", "#ee8866", "#000000")


def lines_of(result: dict) -> dict[str, list[tuple[int, float]]]:
    """Name -> (tokens, ms) in order, ours first; forward passes only."""
    lines: dict[str, list[tuple[int, float]]] = {OURS: []}
    rows = [row for row in result["rows"] if "error" not in row and row["direction"] == "forward"]
    for row in sorted(rows, key=lambda row: row["shape"]["N"]):
        lines[OURS].append((row["shape"]["N"], row["ours_ms"]))
        for name, ms in row["peers_ms"].items():
            lines.setdefault(name, []).append((row["shape"]["N"], ms))
    return lines


def spread(heights: list[float], least: float) -> list[float]:
    """The heights, moved apart so that neighbours differ by at least `least`."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    for before, after in zip(order, order[1:], strict=False):
        placed[after] = max(placed[after], placed[before] + least)
    return placed


def caption(result: dict) -> str:
    row = next(row for row in result["rows"] if "error" not in row)
    shape = ", ".join([f"{name} {row['shape'][name]}" for name in ("B", "H", "D", "M")])
    versions = ", ".join(
        [f"{name} {result['versions'][name]}" for name in ("torch", "triton") if name in result["versions"]]
    )
    text = f"forward, {result['dtype']}, {shape} · {result['device']} · {versions} · {result['date']}"
    text += "".join(f"\n{line}" for line in gaps(result))
    return text + (f"\n{result['note']}" if result["note"] else "")


def gaps(result: dict) -> list[str]:
    """Where peers have no points: "not timed beyond 8k tokens: A; B", by the reason's first words."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for row in result["rows"] for name in row.get("peers_not_run", {})):
        rows = [row for row in result["rows"] if name in row.get("peers_not_run", {})]
        first = min(rows, key=lambda row: row["shape"]["N"])
        timed = [row["shape"]["N"] for row in result["rows"] if name in row.get("peers_ms", {})]
        why = first["peers_not_run"][name].partition(":")[0].replace("left out", "not timed")
        found.setdefault(f"{why} beyond {tokens(max(timed))} tokens" if timed else why, []).append(name)
    return [f"{why}: {'; '.join(names)}" for why, names in found.items()]


def tokens(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 else str(number)


def draw(result: dict, out: Path) -> None:
    lines = lines_of(result)
    if not lines[OURS]:
        raise SystemExit("no rows to draw: make them with mhla bench op --scaling")
    figure, axes = pyplot.subplots(figsize=(8, 4.8), dpi=110)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms")
    for number, (name, points) in enumerate(lines.items()):
        ours = name == OURS
        colour = "#cc3311" if ours else COLOURS[(number - 1) % len(COLOURS)]
        style = {"linewidth": 2.6 if ours else 1.4, "marker": "o", "markersize": 4 if ours else 2.5}
        axes.plot(*zip(*points, strict=True), color=colour, zorder=3 if ours else 2, **style)
    low, high = axes.get_ylim()
    first, last = lines[OURS][0][0], lines[OURS][-1][0]
    axes.set_xlim(first / 1.1, last * 1.1)
    # Names beside the lines' ends, on the right in axes coordinates, apart from each other.
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [to_axes.transform(points[-1]) for points in lines.values()]
    axes.set_ylim(low, high)
    heights = spread([float(end[1]) for end in ends], 0.055)
    for line, name, height in zip(axes.get_lines(), lines, heights, strict=True):
        weight = "bold" if name == OURS else "normal"
        axes.text(
            1.02,
            height,
            name,
            transform=axes.transAxes,
            va="center",
            fontsize=9,
            color=line.get_color(),
            weight=weight,
        )
    ticks = [n for n, _ in lines[OURS]]
    axes.set_xticks(ticks, [tokens(n) for n in ticks])
    axes.minorticks_off()
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.text(0.01, 0.01, caption(result), fontsize=7, color="#555555", va="bottom")
    figure.subplots_adjust(left=0.09, right=0.74, top=0.97, bottom=0.2)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Few colours: a palette makes the file a third of its size.
    drawn = io.BytesIO()
    figure.savefig(drawn)
    Image.open(drawn).convert("RGB").quantize(64).save(out, optimize=True)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw time against the number of tokens.")
    parser.add_argument("result", type=Path, metavar="RESULT.json", help="what mhla bench op --scaling wrote")
    parser.add_argument("out", type=Path, metavar="OUT.png")
    options = parser.parse_args()
    draw(json.loads(options.result.read_text()), options.out)
    print(f"{options.out} written")


if __name__ == "__main__":
    main()
