"""The figures of speed in the documentation are those of the result files."""

import json
import re
from pathlib import Path

import pytest
from programs import load_program

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "eval" / "results"


def words_of(page: Path) -> str:
    """The text without its line breaks."""
    return " ".join(page.read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def program():
    return load_program("eval/result_docs.py")


def test_the_guides_tables_are_the_result_files(program):
    pages = [page.read_text(encoding="utf-8") for page in program.PAGES]
    assert all(sum(f"<!-- {name} -->" in page for page in pages) == 1 for name in program.TABLES)
    assert [program.filled(page) for page in pages] == pages, "run python eval/result_docs.py"


def test_a_stale_table_is_written_anew_and_the_text_stays(program):
    stale = "before\n<!-- counters -->\n| old |\n<!-- end -->\nafter <!-- end -->\n"
    page = program.filled(stale)
    assert page.startswith("before\n<!-- counters -->\n\n| shape |") and page.endswith(
        "\nafter <!-- end -->\n"
    )
    assert "old" not in page and "dual_forward" in page


def test_rows_name_every_target_and_what_is_not_timed(program):
    lines = program.rows().splitlines()
    assert len(lines) >= 2 + 13 and "<= 0.20 ms, >= 50x cuDNN, <= 140 MB" in lines[2]
    assert "per token within 10 % of the even grid" in program.rows()
    timed = {row["name"] for row in json.loads((RESULTS / "op_h200.json").read_text())["rows"]}
    for case in program.CASES:
        assert all(case.name in timed for line in lines if case.name in line and "not timed yet" not in line)


def test_the_readme_says_what_the_files_say():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = {
        (row["name"], row["direction"]): row
        for row in json.loads((RESULTS / "op_h200.json").read_text())["rows"]
    }
    wan = [rows["wan 480x800x81", direction] for direction in ("forward", "forward_backward")]
    large = rows["wan 720p", "forward"]["ratio_vs_cudnn"]
    assert f"{wan[0]['ours_ms']:.3f} ms, {wan[0]['ratio_vs_cudnn']:.1f} x faster" in text
    assert (
        f"{wan[1]['ratio_vs_cudnn']:.1f} x forward and backward; at 720p (75,600 tokens) {large:.0f} x"
        in text
    )
    video = {
        row["name"]: row["variants"] for row in json.loads((RESULTS / "wan_h200.json").read_text())["rows"]
    }
    said = []
    for name in ("480x832x81/forward/compiled", "720x1280x81/forward/compiled", "480x800x81/train/eager"):
        stock, ours = (video[f"wan-1.3b-{name}"][variant]["ms"] for variant in ("stock_cudnn", "full"))
        said.append((ours, stock, stock / ours))
    assert "{:.0f} ms for {:.0f} at 480x832 ({:.2f} x faster)".format(*said[0]) in text
    assert "{:.0f} for {:.0f} at 720p ({:.2f} x)".format(*said[1]) in text
    assert f"an eager training step {said[2][2]:.2f} x" in text
    scaling = json.loads((RESULTS / "op_scaling_h200.json").read_text())["rows"]
    peers = scaling[0]["peers_ms"]
    assert (
        f"softmax takes {peers['SDPA cuDNN']:.3f} ms where ours takes {scaling[0]['ours_ms']:.3f}, and causal linear "
        f"attention of `fla` {peers['FLA chunked (causal)']:.3f}" in text
    )
    faster = [
        (
            row["shape"]["N"],
            [ms > row["ours_ms"] for ms in row["peers_ms"].values()],
            row["ratio_vs_cudnn"] > 1,
        )
        for row in scaling
    ]
    cuts = [
        [
            f"{ms:.3f}"
            for row in (rows[name, direction] for direction in ("forward", "forward_backward"))
            for ms in (row["peers_ms"]["SDPA cuDNN"], row["ours_ms"])
        ]
        for name in ("dit 256", "dit 512")
    ]
    assert (
        "32 pictures at once, cuDNN\ntakes {} ms and ours {}, with gradients {} and {};".format(*cuts[0])
        in text
    )
    assert "16 pictures at once, {} and {}, with gradients {} and {}.".format(*cuts[1]) in text
    assert next(tokens for tokens, _, softmax in faster if softmax) == 2048
    assert next(tokens for tokens, all_peers, _ in faster if all(all_peers)) == 8192


def test_the_guides_text_says_what_the_files_say(program):
    text = program.PAGES[0].read_text(encoding="utf-8")
    result = json.loads((RESULTS / "op_h200.json").read_text())
    ours = {row["name"]: row for row in result["rows"] if row["direction"] == "forward"}
    alone = {(row["name"], row["step"]): row["ms"] for row in result["kernels"]}
    wan, paper, gate, sana = (
        ours[name]
        for name in (
            "wan 480x800x81",
            "wan 480x800x81, paper",
            "wan 480x800x81, norms and gate",
            "sana 4K",
        )
    )
    assert f"- **Wan**, {wan['ours_ms']:.3f} for 0.20 and {wan['ratio_vs_cudnn']:.1f}x for 50x" in text
    assert f"{paper['ours_ms']:.3f} for 0.24" in text and f"{gate['ours_ms']:.3f} for 0.28" in text
    assert f"- **SANA 4K**, {sana['ours_ms']:.3f} for 0.12" in text
    steps = [alone[row["name"], step] for row in (paper, wan) for step in ("summarise", "read_out")]
    assert (
        "Summaries take {:.3f} and the read-out {:.3f}, plain ones {:.3f} and {:.3f}".format(*steps) in text
    )
    steps = [alone[gate["name"], step] for step in ("read_out", "summarise")]
    assert "read-out takes {:.3f} and the summaries {:.3f}".format(*steps) in text
    tests = json.loads((RESULTS / "gpu_tests_h200.json").read_text())
    operator = sum(count for file, count in tests["files"].items() if file.startswith("tests/ops/"))
    counted = f"{tests['passed']} passed, of which {operator} are of the operator, {len(tests['not_passed'])} did not"
    assert counted in text
    trials = json.loads((RESULTS / "op_trials_h200.json").read_text())
    in_place = trials["mixed_in_the_states_memory"]
    after = "since then it takes {extra_memory_mb:.1f}, in the same {forward_ms:.3f} ms"
    assert after.format(**in_place["dit 512"]["after"]) in text
    times = [
        list(row["forward_ms"].items()) for row in in_place["wan"]
    ]  # the table's configuration stands first
    best = [min(ms for name, ms in row if name.startswith("128 + 32")) for row in times]
    assert (
        "best of eight configurations: Wan, with the denominator | {:.3f}, {:.3f} | {:.3f}, {:.3f} |".format(
            *best, *[row[0][1] for row in times]
        )
        in text
    )
    memory = in_place["wan"][0]["extra_memory_mb"].values()
    slower = 100 * (best[0] / times[0][0][1] - 1)
    assert f"would take {min(memory):.0f} MB for {max(memory):.0f}, and {slower:.0f} % more time" in text
    (states,) = (row for row in trials["block_states_for_the_backward_pass"] if row["shape"] == "dit 512")
    assert "({kept_ms:.3f} ms with them kept, {summed_up_again_ms:.3f} without)".format(**states) in text
    first, second = trials["earlier_cost_rules"]["rules"]
    assert (first["fitted_to_shapes"], first["chosen_rightly"], first["shapes"]) == (17, 6, 7)
    assert f"with a regret of {100 * first['largest_regret']:.0f} % at the seventh" in text
    regrets = (100 * second[f"largest_regret{suffix}"] for suffix in ("", "_with_gradients"))
    assert (
        "at most {:.0f} % from the better form\nforward and {:.0f} % with gradients".format(*regrets) in text
    )
    checked = (RESULTS / "memcheck_h200.txt").read_text()
    assert "clean on the H200, 19 of 19 calls" in text and "memcheck: clean, 19 of 19 calls ran" in checked


def test_the_guide_says_what_the_tiles_of_the_local_branch_took():
    rows = json.loads((RESULTS / "local_convolution_tiles_h200.json").read_text())["rows"]
    (flat,) = (row for row in rows if row["name"].startswith("DiT-XL/2"))
    text = words_of(ROOT / "docs" / "speed.md")
    assert f"({flat['ours_both_ms']:.3f} ms for {flat['torch_both_ms']:.3f} at DiT-XL/2's shape)" in text


def test_the_guide_says_what_the_counters_say(program):
    text = words_of(program.PAGES[0])
    result = json.loads((RESULTS / "op_h200.json").read_text())
    built = {
        (row["name"], row["step"], one["kernel"]): (one["registers"], one["programs"], one["spills"])
        for row in result["kernels"]
        for one in row["launches"]
    }
    counted: dict[tuple[str, str], list[dict]] = {}
    for one in json.loads((RESULTS / "op_counters_h200.json").read_text())["kernels"]:
        counted.setdefault((one["name"], one["step"]), []).append(one)
        if one["kernel"] != "spread_kernel":
            programs = int(re.match(r"\((\d+), 1, 1\)", one["grid"])[1])
            assert (one["registers"], programs) == built[one["name"], one["step"], one["kernel"]][:2]

    def moved(name: str) -> float:
        return sum(one["dram_bytes"] for step in program.STEPS[:3] for one in counted[name, step]) / 1e6

    def percent(kernels: list[dict], part: str, joined: str) -> str:
        return joined.format(*[f"{one[f'{part}_pct_of_peak']:.0f}" for one in kernels])

    def waits(kernel: dict) -> dict[str, str]:
        return {name: f"{100 * share:.0f} %" for name, share in program.waits_of(kernel)}

    names = ("wan 480x800x81", "wan 480x800x81, paper", "wan 480x800x81, norms and gate", "sana 4K")
    wan, paper, gate, sana = (
        [counted[name, step][-1] for step in ("summarise", "read_out")] for name in names
    )
    floors = {row["name"]: row["bytes_mb"] for row in result["rows"] if row["direction"] == "forward"}
    for name in (names[0], names[2], "dit 512"):
        assert f"move {moved(name):.0f} MB where the floor counts {floors[name]:.0f}" in text
    assert f"move {moved(names[1]):.0f} MB where the plain ones move {moved(names[0]):.0f}" in text
    assert percent(wan, "dram", "at {} and {} % of its peak and ") + percent(wan, "l2", "{} and {} %") in text

    assert percent([paper[0], wan[0]], "sm", "multiprocessors ({} % for {})") in text
    near = [percent(paper, part, "{} and {}") for part in ("dram", "l2", "tensor")]
    assert "memory is at {} %, L2 at {}, tensor cores at {}.".format(*near) in text
    parts = ("dram", "l2", "tensor", "sm")
    farther = {
        (who, part): ours[f"{part}_pct_of_peak"] < plain[f"{part}_pct_of_peak"]
        for who, ours, plain in zip(("summarise", "read_out"), paper, wan, strict=True)
        for part in parts
    }
    assert [pair for pair, is_farther in farther.items() if not is_farther] == [("summarise", "sm")]
    ours, plain, read_out = waits(paper[0]), waits(wan[0]), waits(paper[1])
    assert f"({ours['memory']} of their waits for {plain['memory'][:-2]})" in text
    assert (
        f"instruction before ({ours['fixed latency']}) and for shared memory ({ours['shared memory']})"
        in text
    )
    assert (
        "memory ({memory}), shared memory ({shared memory}) and the instruction before ({fixed latency})".format(
            **read_out
        )
        in text
    )

    rstd = [counted[names[2], step][0] for step in ("summarise", "read_out")]
    long = percent(rstd, "dram", "at {} and {} % of its peak for ")
    assert long + "{:.1f} and {:.1f} µs".format(*[one["time_ns"] / 1e3 for one in rstd]) in text
    alone = [f"{one['time_ns'] / 1e3:.0f}" for one in (gate[0], wan[0], gate[1])]
    assert "in {} µs for {}".format(*alone) in text
    assert f"{alone[2]} µs for {gate[1]['dram_bytes'] / 1e6:.0f} MB" in text
    assert (
        "instruction before ({fixed latency}) more than for memory ({memory})".format(**waits(gate[0]))
        in text
    )
    near = [f"{gate[1][f'{part}_pct_of_peak']:.0f}" for part in ("dram", "l2", "sm", "tensor")]
    assert "memory at {} %, L2 at {}, multiprocessors at {}, tensor cores at {}".format(*near) in text
    assert (
        "memory ({memory} of their waits), the instruction before ({fixed latency}) and barriers "
        "({barriers})".format(**waits(gate[1]))
        in text
    )

    assert (
        percent(sana, "l2", "at {} and {} % of its peak where memory is at ") + percent(sana, "dram", "{} %")
        in text
    )
    hits = "{:.0f} and {:.0f} % of what is asked of L2".format(*[one["l2_hit_pct"] for one in sana])
    assert hits in text and percent(sana, "tensor", "Tensor cores are at {} and {} %") in text

    dit = [*counted["dit 256", "dual_forward"], *counted["dit 256", program.DUAL_BACKWARD]]
    three = "{}, {} and {}"
    near = [percent(dit, part, three) for part in ("dram", "l2", "tensor", "sm")]
    assert (
        "memory at {} % of its peak, L2 at {}, tensor cores at {}, multiprocessors at {}.".format(*near)
        in text
    )
    assert percent(dit, "warps", f"{three} % of the possible ones") in text
    steps = ("dual_forward", program.DUAL_BACKWARD, program.DUAL_BACKWARD)
    kernels = [built["dit 256", step, one["kernel"]] for step, one in zip(steps, dit, strict=True)]
    assert (
        f"take {three.format(*[registers for registers, _, _ in kernels])} registers (6, 10 and none" in text
    )
    assert [spills for _, _, spills in kernels] == [6, 10, 0]
    kinds = [[waits(one)[kind][:-2] for one in dit] for kind in ("memory", "barriers", "shared memory")]
    assert f"memory most ({three.format(*kinds[0])} % of their waits" in text
    assert f"barriers ({three.format(*kinds[1])} %) and shared memory ({three.format(*kinds[2])} %)" in text
    hits = [f"{one['l2_hit_pct']:.0f}" for one in dit]
    assert f"though {three.format(*hits)} % of what is asked of L2" in text


def test_the_guide_says_what_dit_misses_and_how_long_a_first_call_takes(program):
    text = program.PAGES[0].read_text(encoding="utf-8")
    result = json.loads((RESULTS / "op_h200.json").read_text())
    rows = {(row["name"], row["direction"]): row for row in result["rows"]}
    missed = [row["direction"] for row in result["rows"] if not row["target_met"]]
    assert missed.count("forward") == 5 and missed.count("forward_backward") == 1
    assert "Five forward rows miss their targets, and DiT 256 with gradients." in text
    large, both = (rows["dit 512", direction] for direction in program.PASSES)
    assert (
        f"DiT 512 meets its targets ({large['ratio_vs_cudnn']:.2f}x and {both['ratio_vs_cudnn']:.2f}x for 2x)"
        in text
    )
    said = [
        f"{row['ours_ms']:.3f} {words} {row['peers_ms'][program.CUDNN]:.3f} ({row['ratio_vs_cudnn']:.2f}x)"
        for row, words in (
            (rows["dit 256", "forward"], "forward where cuDNN takes"),
            (rows["dit 256", "forward_backward"], "with gradients where it takes"),
        )
    ]
    assert f"{said[0]}, {said[1]}" in text
    (first,) = result["first_call"]
    assert first["forward_s"] < 10
    assert f"the two above take {first['forward_s'] + first['forward_backward_s']:.1f} s" in text


def test_the_guide_of_whole_models_says_what_the_files_say(program):
    text = program.PAGES[1].read_text(encoding="utf-8")
    names = ("image_models", "image_profile", "feed_forward", "stock_feed_forward")
    now, profile, parts, before = (
        json.loads((RESULTS / f"{name}_h200.json").read_text(encoding="utf-8")) for name in names
    )
    rows = {row["name"]: row for row in before["images"]}
    ratios = [
        f"{rows[row['name']]['ours_ms'] / rows[row['name']]['stock_ms']:.2f}"
        for row in now["rows"]
        if (row["direction"], row["mode"]) == ("forward", "compiled")
    ]
    assert f"the same rows gave {', '.join(ratios[:-1])} and {ratios[-1]}" in text
    (video,) = before["wan"]
    assert f"480x800 took {video['variants']['full']['ms']:.0f} ms" in text
    eager = rows["sana-0.6B-1024/forward/eager"]
    low, high = sorted(round(eager[name]) for name in ("ours_ms", "stock_ms"))
    assert f"both took {low} to {high} ms without the profiler" in text

    (profiled,) = profile["profiles"]
    ours, stock = (
        (one["operators"], one["kernels"], one["device_ms"], one["wall_ms"])
        for one in (profiled["ours"], profiled["stock"])
    )
    assert (
        "ours issues {:.0f} operators and {:.0f} kernels that run for {:.0f} ms in {:.0f} ms".format(*ours)
        in text
    )
    assert "stock\n{:.0f} and {:.0f} for {:.0f} ms in {:.0f} ms".format(*stock) in text
    host = {name: part["host_ms_profiled"] for name, part in profiled["ours"]["parts"].items()}
    theirs = sum(ms for name, ms in host.items() if not name.startswith(("self-attention", "mixing")))
    assert 0.6 < theirs / sum(host.values()) < 0.7 and "which are stock's, take two thirds" in text

    wan, dit = (
        "{product_then_gelu_ms:.2f} and {one_kernel_ms:.2f}".format(**row)
        for row in parts["gelu_in_the_product"][:2]
    )
    assert f"Wan's first product with GELU {wan}, DiT-512's {dit}" in text
    large = next(row for row in parts["sana"] if row["pixels"] == 4096)
    assert "{depthwise_then_gate_ms:.2f} and {one_kernel_ms:.2f}".format(**large) in text
    assert "{pointwise_convolution_ms:.2f} and {pointwise_as_product_ms:.2f}".format(**large) in text
    rows = {row["name"]: row for row in now["rows"]}
    above = [rows[f"dit-XL/2-{size}/forward/compiled"] for size in (512, 256)]
    above = [f"{1e3 * (row['peak_gb'] - row['stock_peak_gb']):.2f}" for row in above]
    assert "DiT's peak is stock's and {} MB at 512 px, {} at 256".format(*above) in text


def test_the_guide_of_whole_models_says_where_eager_steps_are_slower(program):
    text = words_of(program.PAGES[1])
    now = json.loads((RESULTS / "image_models_h200.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in now["rows"]}
    small, graph = rows["dit-S/2-512/train/eager"], rows["dit-S/2-512/train/compiled"]
    ratio = small["ours_ms"] / small["stock_ms"]
    assert (
        f"trains slower than stock**: {small['ours_ms']:.1f} ms for {small['stock_ms']:.1f}, {ratio:.2f} times its "
        f"time, and with {1e3 * (small['peak_gb'] - small['stock_peak_gb']):.0f} MB more at its peak" in text
    )
    assert (
        "needs {ours:.1f} ms to issue ours and {stock:.1f} to issue stock's".format(**small["host_ms"])
        in text
    )
    assert f"the floor's, {small['host_ms']['floor']:.1f}," in text
    assert small["host_ms"]["floor"] > small["floor_ms"]
    assert "device {ours_ms:.1f} and {stock_ms:.1f}: both wait".format(**graph) in text
    assert (
        "no graph, each timed by itself, ours takes {ours:.1f} ms and stock {stock:.1f}".format(
            **graph["without_graph_ms"]
        )
        in text
    )
    large = rows["dit-XL/2-512/train/eager"]
    assert f"trains in {large['ours_ms'] / large['stock_ms']:.2f} of stock's time without compiling" in text
    eager, replay = rows["dit-XL/2-256/forward/eager"], rows["dit-XL/2-256/forward/compiled"]
    said = [eager["host_ms"]["ours"], eager["ours_ms"], eager["host_ms"]["stock"], eager["stock_ms"]]
    said += [replay["ours_ms"], replay["stock_ms"]]
    assert (
        "{:.1f} of our {:.1f} ms go by until the pass is issued and {:.1f} of stock's {:.1f}, where the replay of "
        "the compiled pass takes {:.1f} and {:.1f}".format(*said)
        in text
    )
    scattered = rows["dit-XL/2-512/forward/eager"]
    assert (
        f"took {scattered['ours_ms']:.1f} ms in turns, and {scattered['host_ms']['ours']:.1f} ms to issue"
        in text
    )
    slower = [row["name"] for row in now["rows"] if row["ours_ms"] > row["stock_ms"]]
    assert slower == [small["name"]]


def test_the_guide_says_how_long_steps_of_the_full_sizes_take():
    rows = {
        row["name"]: row for row in json.loads((RESULTS / "full_size_steps_h200.json").read_text())["rows"]
    }
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    for row in rows.values():
        assert row["finite"] and row["steps"] == 20
        assert f"| {row['batch_size']} | {row['step_ms']:.1f} ms | {row['peak_gb']:.1f} GB |" in text
    assert {"wan-1.3b", "wan-1.3b-hybrid", "wan-1.3b-lora"} < rows.keys()


def test_the_guide_says_how_fast_features_are():
    found = json.loads((RESULTS / "feature_speed_h200.json").read_text())
    text = words_of(ROOT / "eval" / "README.md")
    said = f"{found['pictures']:,} pictures of {found['settings']['size']} px in {found['seconds']:.0f} s"
    assert f"{said}, {found['pictures_per_second']:.0f} a second" in text
