"""The operator's measuring programs run and write what they found. How fast anything is, is not asserted."""

import json
import math

import pytest
import torch

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation import tune_operator
from mhla_diffusion.evaluation.bench_operator import bench, judge, run
from mhla_diffusion.evaluation.operator_cases import CASES, FORM_CASES, SCALING, Case, floors, small
from mhla_diffusion.evaluation.operator_forms import judge_forms, largest_regrets
from mhla_diffusion.evaluation.timing import host_milliseconds, milliseconds

CPU = torch.device("cpu")
TINY = Case("tiny", 1, 2, (4, 4), (2, 2), 8, backward=True, target=(1e6, 0.0), ratio=(None, 1))
TINY_FUSED = Case("tiny, fused", 1, 2, (2, 3, 4), (1, 2, 2), 8, "none", rope=True, fused=True)
PEERS = {"SDPA", "plain linear, eager", "MHLA by matmuls, eager"}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "deep" / "op.json"


def try_out(cases, forms, out, **options) -> dict:
    return run(cases, forms, CPU, out, repeats=1, dtype=torch.float32, compiled=False, **options)


def test_rows_hold_what_makes_them_comparable_and_are_written_as_they_come(out, capsys):
    result = try_out([TINY, TINY_FUSED], [TINY], out, reported=[TINY])
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    assert [row["direction"] for row in result["rows"]] == ["forward", "forward_backward", "forward"]
    for row in result["rows"]:
        assert row["ours_ms"] > 0 and row["error_vs_float64"] <= 1e-5 and row["form"] == "plain torch"
        assert (
            set(row["peers_ms"]) == PEERS and row["ratio_vs_cudnn"] is None and row["extra_memory_mb"] is None
        )
        assert 0 < row["byte_floor_ms"] and 0 < row["flop_floor_ms"]
        assert row["peers_not_run"]["FLA chunked (causal)"] == "not installed"
        assert row["peers_not_run"]["MHLA by matmuls, compiled"] == "left out"
    assert [row["target_met"] for row in result["rows"]] == [True, False, None]
    assert result["rows"][0]["shape"] == {"B": 1, "H": 2, "N": 16, "D": 8, "M": 4}
    assert result["rows"][0]["bytes_mb"] == 4 * 2 * 16 * 8 * 4 / 1e6
    assert result["forms"][0]["states_forward_ms"] > 0 and not result["left_out"]
    assert result["versions"]["torch"] == torch.__version__
    assert {row["step"] for row in result["kernels"]} >= {"summarise", "mix", "read_out", "key_gradients"}
    printed = capsys.readouterr().out
    for text in (
        "tiny, fused",
        "plain linear, eager",
        "not installed",
        torch.__version__,
        "FLOP floor",
        "GB/s",
    ):
        assert text in printed


def test_every_launch_of_a_step_is_reported(out):
    (rows,) = [try_out([], [], out, reported=[TINY_FUSED])["kernels"]]
    launched = {row["step"]: [launch["kernel"] for launch in row["launches"]] for row in rows}
    # The norm over all heads has a kernel of its own before each of the steps that use it.
    assert launched["read_out"][-1] == "read_out_kernel" and launched["mix"] == [
        "spread_kernel",
        "mix_kernel",
    ]
    assert all(launch["programs"] >= 1 for row in rows for launch in row["launches"])
    assert all(row["ms"] > 0 and row["gb_per_s"] > 0 and row["tflop_per_s"] > 0 for row in rows)


def test_the_first_call_is_timed_in_a_process_of_its_own(out, capsys):
    case = small(CASES[-1])
    (row,) = try_out([], [], out, first=[case])["first_call"]
    assert row["name"] == case.name and row["forward_s"] > 0 and row["forward_backward_s"] > 0
    assert "first call with an empty cache" in capsys.readouterr().out
    kept, row = try_out([], [], out, first=[case, TINY])["first_call"]
    assert kept["name"] == case.name and "StopIteration" in row["error"]


def test_a_failing_shape_costs_only_itself_and_time_is_kept(out):
    broken = TINY._replace(name="broken", normalizer="sum")
    result = try_out([broken, TINY], [], out)
    assert "choose one of" in result["rows"][0]["error"] and result["rows"][1]["name"] == "tiny"
    late = try_out([TINY_FUSED], [TINY], out, minutes=0)
    assert late["left_out"] == ["tiny, fused (rows)", "tiny (forms)"]
    assert [row["name"] for row in late["rows"]] == [
        "tiny",
        "tiny",
    ]  # what failed is gone, for a next run to try


def test_a_failing_peer_costs_only_itself(out, monkeypatch):
    def broken(*args):
        raise RuntimeError("no kernel\nat all")

    monkeypatch.setattr("mhla_diffusion.evaluation.operator_peers.plain_linear", broken)
    (row,) = try_out([TINY_FUSED], [], out)["rows"]
    assert row["peers_not_run"]["plain linear, eager"] == "does not run: no kernel"
    assert set(row["peers_ms"]) == PEERS - {"plain linear, eager"}


def test_a_peer_that_is_too_slow_is_stopped_and_left_out_of_longer_rows(out, monkeypatch):
    monkeypatch.setattr("mhla_diffusion.evaluation.operator_peers.LIMIT_MS", 0.0)
    rows = try_out([TINY_FUSED, TINY._replace(backward=False)], [], out, stopping=True)["rows"]
    reasons = [row["peers_not_run"]["SDPA"] for row in rows]
    assert reasons[0].startswith("stopped: one call took ") and reasons[1] == f"{reasons[0]} (at tiny, fused)"
    assert rows[0]["peers_ms"] == rows[1]["peers_ms"] == {}


def test_targets_are_times_ratios_and_times_for_a_token():
    cases = [
        Case("even", 1, 1, (100,), (10,), 8, target=(1.0, None), ratio=(50, None)),
        Case("ragged", 1, 1, (110,), (10,), 8, like="even"),
        Case("ratio", 1, 1, (100,), (10,), 8, ratio=(2, None), memory=150.0),
        Case("memory", 1, 1, (100,), (10,), 8, memory=140.0),
    ]
    rows = [
        {"name": case.name, "direction": "forward", "ours_ms": ms, "shape": {"N": case.grid[0]},
         "ratio_vs_cudnn": ratio, "target_ms": case.target[0], "target_ratio": case.ratio[0], "target_met": None,
         "target_memory_mb": case.memory, "extra_memory_mb": 150.0}
        for case, ms, ratio in zip(cases, (0.9, 1.1, 5.0, 1.0), (40.0, 1.0, 2.5, 1.0), strict=True)
    ]  # fmt: skip
    judge(rows, cases)
    assert [row["target_met"] for row in rows] == [False, False, True, False]
    assert rows[1]["target_ms"] == pytest.approx(1.1 * 0.9 * 1.1)
    assert rows[1]["per_token_vs_even"] == pytest.approx(1.1 / 1.1 / 0.9)


def test_floors_count_each_tensor_once():
    case = Case("x", 2, 3, (8,), (2,), 4, fused=True)
    forward, both = (floors(case, 2, 1e9, 1e12, backward) for backward in (False, True))
    size = 2 * 3 * 8 * 4 * 2 / 1e6  # of one tensor
    assert [found["bytes_mb"] for found in (forward, both)] == pytest.approx([5 * size, 12 * size])
    assert forward["byte_floor_ms"] == pytest.approx(forward["bytes_mb"])  # at 1 GB/s
    products = 2 * 3 * (4 * 8 + 2 * 4) * 16 / 1e9
    assert [found["gflop"] for found in (forward, both)] == pytest.approx([products, 3 * products])


def test_the_command_tries_itself_out_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = "bench op --device cpu --quick --repeats 1 --rows 512 ragged"
    assert main(line.split()) == 0
    result = json.loads((tmp_path / "outputs" / "op_quick.json").read_text())
    assert [row["name"] for row in result["rows"]] == [
        "wan 480x832x81, ragged, small", "dit 512, small", "dit 512, small",
    ]  # fmt: skip
    assert "tries the program out" in result["note"] and result["note"] in capsys.readouterr().out
    assert main([*line.split()[:-2], "1024", "--scaling"]) == 0
    scaled = json.loads((tmp_path / "outputs" / "op_scaling_quick.json").read_text())
    assert [row["shape"]["N"] for row in scaled["rows"]] == [64]


def test_a_later_run_measures_what_is_missing_and_nothing_else(out):
    first = try_out([TINY], [TINY], out, reported=[TINY_FUSED])
    second = try_out([TINY, TINY_FUSED], [TINY], out, reported=[TINY_FUSED])
    plain = json.loads(json.dumps(first))
    assert second["rows"][:2] == plain["rows"] and [row["name"] for row in second["rows"][2:]] == [
        "tiny, fused"
    ]
    for part in ("forms", "kernels", "copy_bandwidth_gb_per_s", "product_tflop_per_s"):
        assert second[part] == plain[part]
    assert second["begun"] == first["date"] and "begun" not in first
    third = try_out([TINY_FUSED], [], out, again=True)
    assert third["rows"][:2] == plain["rows"] and third["forms"] == plain["forms"]
    assert third["rows"][2]["ours_ms"] != second["rows"][2]["ours_ms"]


def written(out, change) -> None:
    """The file as a run that was cut short could have left it."""
    result = json.loads(out.read_text())
    change(result)
    out.write_text(json.dumps(result))


def test_a_row_without_its_peers_gets_them_and_keeps_its_time(out):
    (row,) = try_out([TINY_FUSED], [], out)["rows"]

    def cut(result):
        result["rows"][0]["peers_ms"] = {"SDPA": 123.0}
        result["rows"][0]["peers_not_run"] = {
            "plain linear, eager": "does not run: no kernel", "MHLA by matmuls, eager": "left out",
        }  # fmt: skip
        del result["repeats"]  # as files were before

    written(out, cut)
    with pytest.raises(ValueError, match="another repeats: give another file"):
        try_out([TINY_FUSED], [], out)
    written(out, lambda result: result.update(repeats=1))
    late = try_out([TINY_FUSED], [], out, minutes=0)
    assert late["left_out"] == ["tiny, fused, forward (MHLA by matmuls, eager, FLA chunked (causal))"]
    (found,) = try_out([TINY_FUSED], [], out)["rows"]
    assert found["ours_ms"] == row["ours_ms"] and found["peers_ms"]["SDPA"] == 123.0
    assert set(found["peers_ms"]) == {"SDPA", "MHLA by matmuls, eager"}
    assert found["peers_not_run"] == {
        "plain linear, eager": "does not run: no kernel", "FLA chunked (causal)": "not installed",
        "MHLA by matmuls, compiled": "left out", "plain linear, compiled": "left out",
    }  # fmt: skip


def test_what_is_cut_in_the_middle_is_measured_whole(out):
    try_out([TINY], [], out, reported=[TINY_FUSED])

    def cut(result):
        del result["rows"][1], result["kernels"][1:]

    written(out, cut)
    result = try_out([TINY], [], out, reported=[TINY_FUSED])
    assert [row["direction"] for row in result["rows"]] == ["forward", "forward_backward"]
    assert len(result["kernels"]) == len(tune_operator.kernels_of(TINY_FUSED))
    moved = TINY._replace(batch=2)  # the same name, another shape
    assert [row["shape"]["B"] for row in try_out([moved], [], out)["rows"]] == [2, 2]


def test_rows_stand_in_the_order_of_the_cases(out):
    cases = [small(case) for case in CASES if case.name in ("dit 256", "sana 4K", "wan 720p")]
    for case in reversed(cases):
        result = try_out([case._replace(backward=False)], [], out)
    assert [row["name"] for row in result["rows"]] == [case.name for case in cases]


def test_measurements_of_another_kind_are_not_mixed(out):
    try_out([TINY], [TINY], out)
    written(out, lambda result: result["versions"].update(torch="0.0"))
    with pytest.raises(
        ValueError, match=r"op.json holds measurements with another versions: give another file"
    ):
        try_out([TINY], [], out)
    with pytest.raises(ValueError, match="another versions and note"):
        bench(out=out, rows=["dit 256"], device="cpu", repeats=1, parts=["first_call"])


def test_a_peer_that_was_stopped_stays_stopped(out, monkeypatch):
    first, second = TINY_FUSED, TINY._replace(backward=False)
    monkeypatch.setattr("mhla_diffusion.evaluation.operator_peers.LIMIT_MS", 0.0)
    try_out([first], [], out, stopping=True)
    monkeypatch.undo()
    rows = try_out([first, second], [], out, stopping=True)["rows"]
    assert rows[1]["peers_not_run"]["SDPA"] == f"{rows[0]['peers_not_run']['SDPA']} (at tiny, fused)"
    assert rows[0]["peers_ms"] == rows[1]["peers_ms"] == {}


def test_what_the_rule_would_choose_is_said_of_times_that_stay():
    case = next(case for case in FORM_CASES if case.name == "16^2 tokens, 4^2 blocks, 32")
    times = {"states_forward_ms": 2.0, "dual_forward_ms": 1.0, "states_both_ms": 3.0, "dual_both_ms": 2.0}
    forms = [{"name": case.name, **times}, {"name": case.name, "error": "x"}, {"name": "unknown", **times}]
    judge_forms(forms, FORM_CASES, torch.device("cuda"), torch.bfloat16)
    assert (forms[0]["chosen"], forms[0]["regret"]) == ("dual", 0)
    assert (forms[0]["chosen_with_gradients"], forms[0]["regret_with_gradients"]) == ("states", 0.5)
    assert largest_regrets(forms) == {"largest_regret": 0, "largest_regret_with_gradients": 0.5}
    assert "chosen" not in forms[1] and "chosen" not in forms[2]
    judge_forms(forms, FORM_CASES, CPU, torch.float32)
    assert (forms[0]["chosen"], forms[0]["regret"]) == ("plain torch", None)


def test_mistakes_are_named_in_one_line(capsys):
    assert main(["bench", "op", "--device", "cpu", "--rows", "nowhere"]) == 2
    assert main(["bench"]) == main(["bench", "op", "--repeats", "0"]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 3 and "no row's name holds nowhere" in printed[0]


def test_medians_take_turns_over_the_inputs():
    seen = []
    assert milliseconds([lambda: seen.append(0), lambda: seen.append(1)], CPU, 4) >= 0
    assert seen == [0, 1, 0, 1, 0, 1, 0, 1]
    assert host_milliseconds(lambda: None, CPU, 3) >= 0


def test_the_shapes_cover_the_models_the_rule_and_the_lengths():
    for cases, number in ((CASES, 9), (SCALING, 8)):
        assert len({case.name for case in cases}) == len(cases) == number
    assert len({case.name for case in FORM_CASES}) == len(FORM_CASES) > 20
    lengths = [math.prod(case.grid) for case in SCALING]
    assert lengths == [1024 << step for step in range(8)]
    assert all(math.prod(small(case).grid) <= 10000 for case in (*CASES, *SCALING))
    assert all(case.like in {other.name for other in CASES} | {""} for case in CASES)


def test_a_gpu_that_is_not_there_is_said(out):
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="pass --device cpu"):
            bench(out=out, device="cuda")


@pytest.mark.gpu
def test_on_a_gpu_memory_ratios_and_what_kernels_take_are_filled_in(out):
    cases = [
        Case("small", 2, 4, (16, 16), (4, 4), 64, backward=True, ratio=(1e-9, 1e9)),
        Case("small, graph", 2, 4, (16, 16), (4, 4), 32, graph=True),
        Case("small, fused", 1, 2, (4, 6, 10), (2, 3, 5), 128, "none", rope=True, fused=True),
    ]
    device = torch.device("cuda")
    result = run(cases, cases[:1], device, out, repeats=3, compiled=False, reported=cases, first=[CASES[-1]])
    parts = {part: result[part] for part in ("rows", "kernels", "forms", "first_call")}
    assert [row["error"] for rows in parts.values() for row in rows if "error" in row] == []
    steps = sum(len(tune_operator.kernels_of(case)) for case in cases)
    assert [len(rows) for rows in parts.values()] == [4, steps, 1, 1]
    for row in result["rows"]:
        assert row["form"] in ("states", "dual") and row["error_vs_float64"] < 1e-2
        assert row["extra_memory_mb"] >= 0 and row["achieved_gb_per_s"] > 0
        assert row["ratio_vs_cudnn"] > 0 and row["peers_ms"]["SDPA FlashAttention-2"] > 0
    assert [row["target_met"] for row in result["rows"]] == [True, False, None, None]
    assert result["forms"][0]["regret"] >= 0 and result["largest_regret"] == result["forms"][0]["regret"]
    for launch in (launch for row in result["kernels"] for launch in row["launches"]):
        assert launch["registers"] > 0 and launch["spills"] >= 0 and launch["shared_bytes"] >= 0
        assert launch["warps"] >= 1 and launch["stages"] >= 1
