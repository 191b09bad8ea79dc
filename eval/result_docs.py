"""Writes the tables of docs/kernels.md and docs/speed.md from the result files that they link, between the comments
that name them.

    python eval/result_docs.py

A test holds the pages against the files: run this after they are new.
"""

import json
import re
from pathlib import Path

from mhla_diffusion.evaluation.image_rows import CASES as IMAGE_CASES
from mhla_diffusion.evaluation.operator_cases import CASES, Case

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / name for name in ("kernels.md", "speed.md")]
RESULTS = ROOT / "eval" / "results"
CUDNN = "SDPA cuDNN"
TITLES = {
    CUDNN: "softmax, cuDNN", "SDPA FlashAttention-2": "softmax, FlashAttention-2",
    "FLA chunked (causal)": "`fla` chunked, causal",
}  # fmt: skip
PASSES = {"forward": "forward", "forward_backward": "both"}
STEPS = ("summarise", "mix", "read_out", "dual_forward")  # of a forward pass
DUAL_BACKWARD = "dual_query"  # the step that launches both kernels of the dual form's backward pass
WAITS = {
    "long_scoreboard": "memory", "short_scoreboard": "shared memory", "barrier": "barriers", "wait": "fixed latency",
    "mio_throttle": "full queues", "lg_throttle": "full queues of memory", "math_pipe_throttle": "full pipes",
    "gmma": "products",
}  # fmt: skip


def table(titles: list[str], lines: list[list[str]]) -> str:
    return "\n".join(["| " + " | ".join(line) + " |" for line in (titles, ["---"] * len(titles), *lines)])


def ms(value: float | None) -> str:
    """Three digits."""
    places = next((places for limit, places in ((0.1, 4), (1, 3), (10, 2), (100, 1)) if value < limit), 0)
    return f"{value:.{places}f}"


def times(value: float) -> str:
    return f"{value:.0f}x" if value >= 100 else f"{value:.1f}x"


def result_of(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def peers_of(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys([name for row in rows for name in row["peers_ms"]]))


def peer_cells(row: dict, names: list[str]) -> list[str]:
    found = row["peers_ms"]
    return [
        f"{ms(found[name])} ({times(found[name] / row['ours_ms'])})" if name in found else ""
        for name in names
    ]


def target_of(case: Case, backward: bool) -> str:
    if case.like:
        return "per token within 10 % of the even grid"
    parts = [] if case.target[backward] is None else [f"<= {case.target[backward]:.2f} ms"]
    parts += [] if case.ratio[backward] is None else [f">= {case.ratio[backward]:g}x cuDNN"]
    parts += [] if backward or case.memory is None else [f"<= {case.memory:g} MB"]
    return ", ".join(parts)


def rows() -> str:
    result = result_of("op_h200.json")
    found = {(row["name"], row["direction"]): row for row in result["rows"] if "error" not in row}
    names = peers_of(list(found.values()))
    titles = ["shape", "pass", "target", "ours", "met", "byte floor", "extra MB", "form"]
    titles += [TITLES.get(name, name) for name in names]
    lines = []
    for case in CASES:
        for backward in (False, True) if case.backward else (False,):
            direction = "forward_backward" if backward else "forward"
            cells = [case.name, PASSES[direction], target_of(case, backward)]
            row = found.get((case.name, direction))
            if row is None:
                lines.append(cells + ["not timed yet"] + [""] * (len(titles) - 4))
                continue
            cells += [ms(row["ours_ms"]), {True: "yes", False: "no", None: ""}[row["target_met"]]]
            cells += [ms(row["byte_floor_ms"]), f"{row['extra_memory_mb']:.1f}", row["form"]]
            lines.append(cells + peer_cells(row, names))
    first = "".join(
        f"\n\nThe first call with an empty cache, {row['name']}: {row['forward_s']:.1f} s forward, then "
        f"{row['forward_backward_s']:.1f} s forward and backward."
        for row in result["first_call"]
        if "error" not in row
    )
    return table(titles, lines) + first


def scaling() -> str:
    found = [row for row in result_of("op_scaling_h200.json")["rows"] if "error" not in row]
    names = peers_of(found)
    lines = [
        [f"{row['shape']['N']:,}", ms(row["ours_ms"]), row["form"], *peer_cells(row, names)] for row in found
    ]
    return table(["tokens", "ours", "form"] + [TITLES.get(name, name) for name in names], lines)


def forms() -> str:
    result = result_of("op_h200.json")
    lines = []
    for row in result["forms"]:
        cells = [row["name"]]
        for direction, suffix in (("forward", ""), ("both", "_with_gradients")):
            cells += [ms(row[f"{form}_{direction}_ms"]) for form in ("states", "dual")]
            cells += [row[f"chosen{suffix}"], f"{100 * row[f'regret{suffix}']:.0f} %"]
        lines.append(cells)
    titles = [[f"states, {name}", f"dual, {name}", "chosen", "regret"] for name in PASSES.values()]
    largest = [f"{100 * result[f'largest_regret{suffix}']:.1f} %" for suffix in ("", "_with_gradients")]
    said = f"{len(lines)} shapes; largest regret {largest[0]} forward, {largest[1]} forward and backward."
    return f"{said}\n\n{table(['shape, head dim', *titles[0], *titles[1]], lines)}"


def waits_of(kernel: dict) -> list[tuple[str, float]]:
    """What its warps wait for, most of all first, as shares of all the waits that were counted."""
    counted = {name: kernel[f"stalled_{reason}"] for reason, name in WAITS.items()}
    whole = sum(counted.values())
    return sorted(((name, each / whole) for name, each in counted.items()), key=lambda pair: -pair[1])


def counters() -> str:
    lines = [
        [
            kernel["name"], kernel["kernel"].removesuffix("_kernel"), f"{kernel['time_ns'] / 1e3:.1f}",
            f"{kernel['dram_bytes'] / 1e6:.0f}", f"{kernel['dram_gb_per_s'] / 1e3:.2f}",
            *[f"{kernel[f'{part}_pct_of_peak']:.0f} %" for part in ("dram", "l2")], f"{kernel['l2_hit_pct']:.0f} %",
            *[f"{kernel[f'{part}_pct_of_peak']:.0f} %" for part in ("tensor", "sm", "warps")],
            f"{kernel['registers']:.0f}", "{}, {:.0%}".format(*waits_of(kernel)[0]).replace("%", " %"),
        ]
        for kernel in result_of("op_counters_h200.json")["kernels"]
        if kernel["step"] in (*STEPS, DUAL_BACKWARD) and kernel["kernel"] != "spread_kernel"
    ]  # fmt: skip
    titles = ["µs", "MB", "TB/s of memory", "memory's peak", "L2's peak", "hits in L2", "tensor cores"]
    titles += ["multiprocessors", "warps", "registers", "waits most for"]
    return table(["shape", "kernel", *titles], lines)


def ratio_cell(value: float | None, target: float | None, met: bool) -> str:
    if target is None:
        return f"{value:.2f}"
    return f"{value:.2f} ({'met' if met else 'missed'}: {target:g})"


def image_lines(name: str, direction: str, mode: str) -> list[list[str]]:
    """Model and pixels; stock, floor, ours; ours over stock beside its target; peak memory of ours and stock."""
    targets = {case.name: case.target for case in IMAGE_CASES}
    lines = []
    for row in result_of(name)["rows"]:
        if "error" in row or (row["direction"], row["mode"]) != (direction, mode):
            continue
        ratio = row["ours_ms"] / row["stock_ms"]
        target = targets.get(row["name"]) if mode == "compiled" else None
        lines.append(
            [
                f"{row['model']}, {row['size']} px, {row['batch']} at once",
                *[f"{row[f'{who}_ms']:.1f}" for who in ("stock", "floor", "ours")],
                ratio_cell(ratio, target, target is not None and ratio <= target),
                f"{row['peak_gb']:.2f} / {row['stock_peak_gb']:.2f}",
            ]
        )
    return lines


IMAGE_TITLES = ["model", "stock", "floor", "ours", "ours / stock (target)", "GB, ours / stock"]


def images_compiled() -> str:
    return table(IMAGE_TITLES, image_lines("image_models_h200.json", "forward", "compiled"))


def images_eager() -> str:
    return table(IMAGE_TITLES, image_lines("image_models_h200.json", "forward", "eager"))


def images_train() -> str:
    modes = ("compiled", "eager")
    lines = [
        [line[0], mode, *line[1:]]
        for mode in modes
        for line in image_lines("image_models_h200.json", "train", mode)
    ]
    return table([IMAGE_TITLES[0], "mode", *IMAGE_TITLES[1:]], lines)


VIDEO_VARIANTS = {
    "stock_cudnn": "stock, cuDNN", "stock_flash": "stock, FlashAttention-2", "linear": "plain linear", "floor": "floor",
    "full": "MHLA in all layers", "hybrid": "MHLA in 2 of 3",
}  # fmt: skip


def video() -> str:
    lines = []
    for row in result_of("wan_h200.json")["rows"]:
        cells = row["variants"]
        if any(cells.get(name, {}).get("ms") is None for name in ("stock_cudnn", "full")):
            continue
        known = [cells.get(name, {}) for name in VIDEO_VARIANTS]
        stock, full = cells["stock_cudnn"], cells["full"]
        lines.append(
            [
                f"{row['size']}, {row['direction']}, {row['mode']}",
                *["" if cell.get("ms") is None else f"{cell['ms']:.0f}" for cell in known],
                f"{stock['ms'] / full['ms']:.2f}x",
                f"{full['peak_gb']:.2f} / {stock['peak_gb']:.2f}",
            ]
        )
    return table(["video", *VIDEO_VARIANTS.values(), "stock / MHLA", "GB, MHLA / stock"], lines)


def whole_calls() -> str:
    """What all steps of a call take, extrapolated from those that were measured."""
    result = result_of("wan_pipeline_h200.json")
    faster = result["times_faster_than_stock"]
    lines = []
    for row in result["rows"]:
        if "error" in row:
            continue
        whole = row["extrapolated"]
        parts = [f"{whole[part]:.1f}" for part in ("transformer_s", "vae_decode_s", "rest_s", "total_s")]
        ratio = faster.get(row["name"])
        lines.append(
            [row["name"], *parts, f"{ratio['whole']:.2f}x" if ratio else "", f"{row['peak_gb']:.1f}"]
        )
    return table(["transformer", "steps", "decoding", "rest", "a video", "stock / it", "GB"], lines)


def local_branch() -> str:
    def cell(row: dict, direction: str) -> str:
        before, after = row[f"torch_{direction}_ms"], row[f"ours_{direction}_ms"]
        return f"{ms(before)} and {ms(after)} ({times(before / after)})"

    return table(
        ["", "forward", "with gradients"],
        [
            [
                f"{row['name']}: {' x '.join(map(str, row['grid']))} tokens, {row['channels']:,} channels",
                cell(row, "forward"),
                cell(row, "both") if len(row["grid"]) == 3 else "torch's",
            ]
            for row in result_of("local_convolution_h200.json")["rows"]
        ],
    )


TABLES = {
    "rows": rows, "scaling": scaling, "forms": forms, "counters": counters, "images compiled": images_compiled,
    "images eager": images_eager, "images train": images_train, "video": video, "whole calls": whole_calls,
    "local branch": local_branch,
}  # fmt: skip


def filled(page: str) -> str:
    """The page with every table between `<!-- name -->` and `<!-- end -->` made anew."""

    def made(found: re.Match) -> str:
        return f"<!-- {found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end -->"

    return re.sub(rf"<!-- ({'|'.join(TABLES)}) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{page.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
