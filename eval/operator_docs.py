"""Writes the tables of docs/kernels.md from the result files that it links, between the comments that name them.

    python eval/operator_docs.py

A test holds the page against the files: run this after they are new.
"""

import json
import re
from pathlib import Path

from mhla_diffusion.evaluation.operator_cases import CASES, Case

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "kernels.md"
RESULTS = ROOT / "eval" / "results"
CUDNN = "SDPA cuDNN"
TITLES = {
    CUDNN: "softmax, cuDNN", "SDPA FlashAttention-2": "softmax, FlashAttention-2",
    "FLA chunked (causal)": "`fla` chunked, causal",
}  # fmt: skip
PASSES = {"forward": "forward", "forward_backward": "both"}
STEPS = ("summarise", "mix", "read_out", "dual_forward")  # of a forward pass


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


def counters() -> str:
    lines = [
        [
            kernel["name"], kernel["step"], f"{kernel['time_ns'] / 1e3:.1f}", f"{kernel['dram_gb_per_s'] / 1e3:.2f}",
            *[f"{kernel[f'{name}_pct_of_peak']:.0f} %" for name in ("dram", "l2")], f"{kernel['l2_hit_pct']:.0f} %",
            *[f"{kernel[f'{name}_pct_of_peak']:.0f} %" for name in ("tensor", "warps")],
            f"{kernel['registers']:.0f}",
        ]
        for kernel in result_of("op_counters_h200.json")["kernels"]
        if kernel["step"] in STEPS and kernel["kernel"] != "spread_kernel"
    ]  # fmt: skip
    titles = ["µs", "TB/s of memory", "memory's peak", "L2's peak", "hits in L2", "tensor cores", "warps"]
    return table(["shape", "step", *titles, "registers"], lines)


TABLES = {"rows": rows, "scaling": scaling, "forms": forms, "counters": counters}


def filled(page: str) -> str:
    """The page with every table between `<!-- name -->` and `<!-- end -->` made anew."""

    def made(found: re.Match) -> str:
        return f"<!-- {found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end -->"

    return re.sub(rf"<!-- ({'|'.join(TABLES)}) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
