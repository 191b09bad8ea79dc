"""The operator's measuring programs run and write what they found. How fast anything is, is not asserted."""

import json

import pytest
import torch

from mhla_diffusion.evaluation import tune_operator
from mhla_diffusion.evaluation.bench_operator import CASES, DISPATCH, Case, Inputs, main, run
from mhla_diffusion.evaluation.timing import host_milliseconds, milliseconds

CPU = torch.device("cpu")
TINY = Case("tiny", 1, 2, (4, 4), (2, 2), 8, backward=True)
TINY_FUSED = Case("tiny, fused", 1, 2, (2, 3, 4), (1, 2, 2), 8, "none", rope=True, fused=True)


def test_rows_hold_what_makes_them_comparable_and_are_written_as_they_come(tmp_path):
    result = run([TINY, TINY_FUSED], [TINY], CPU, tmp_path, repeats=1, dtype=torch.float32)
    assert json.loads((tmp_path / "op.json").read_text()) == json.loads(json.dumps(result))
    assert [row["direction"] for row in result["rows"]] == ["forward", "forward_backward", "forward"]
    for row in result["rows"]:
        assert row["ours_ms"] > 0 and row["error_vs_float64"] <= 1e-5 and row["form"] == "plain torch"
        assert set(row["peers_ms"]) == {"SDPA", "plain linear, eager"} and row["byte_floor_ms"] > 0
    assert result["rows"][0]["shape"] == {"B": 1, "H": 2, "N": 16, "D": 8, "M": 4}
    assert result["rows"][0]["bytes_mb"] == 4 * 2 * 16 * 8 * 4 / 1e6
    assert result["dispatch"][0]["states_forward_ms"] > 0 and not result["left_out"]
    assert result["versions"]["torch"] == torch.__version__


def test_a_failing_shape_costs_only_itself_and_time_is_kept(tmp_path):
    broken = TINY._replace(name="broken", normalizer="sum")
    result = run([broken, TINY], [], CPU, tmp_path, repeats=1, dtype=torch.float32)
    assert "choose one of" in result["rows"][0]["error"] and result["rows"][1]["name"] == "tiny"
    assert run([TINY], [TINY], CPU, tmp_path, minutes=0, repeats=1)["left_out"] == ["tiny", "tiny"]


def test_the_program_measures_what_it_is_asked_for(tmp_path, capsys):
    main(["--out", str(tmp_path), "--only", "no such shape", "--minutes", "0"])
    assert json.loads((tmp_path / "op.json").read_text())["rows"] == [] and capsys.readouterr().out == ""


def test_medians_take_turns_over_the_inputs():
    seen = []
    assert milliseconds([lambda: seen.append(0), lambda: seen.append(1)], CPU, 4) >= 0
    assert seen == [0, 1, 0, 1, 0, 1, 0, 1]
    assert host_milliseconds(lambda: None, CPU, 3) >= 0


def test_the_shapes_cover_the_models_and_the_rule():
    assert len({case.name for case in CASES}) == len(CASES) == 9
    assert len({case.name for case in DISPATCH}) == len(DISPATCH) > 20


@pytest.mark.parametrize("case", [TINY, TINY_FUSED], ids=lambda case: case.name)
def test_every_kernel_of_a_shape_can_be_called_alone(case):
    stages = tune_operator.stages(Inputs(case, CPU, torch.float32, 0))
    assert list(stages) == tune_operator.kernels_of(case)
    for kernel, call in stages.items():
        assert all(torch.isfinite(x).all() for x in tune_operator.first_tensors(call())), kernel
        options = list(tune_operator.candidates(kernel, case.dim))
        assert len(options) == len(set(options)) > 4


@pytest.mark.filterwarnings("default:the MHLA kernels:UserWarning")
def test_tuning_times_every_kernel_and_prints_the_best(tmp_path, monkeypatch, capsys):
    result = tune_operator.tune([TINY], tmp_path, CPU, torch.float32, repeats=1, workers=1, limit=1)
    assert json.loads((tmp_path / "tune.json").read_text()) == json.loads(json.dumps(result))
    kernels, rows = tune_operator.kernels_of(TINY), result["kernels"]
    assert [row["kernel"] for row in rows] == [name for name in kernels for _ in range(2)]
    assert [row["config"] == "table" for row in rows].count(True) == len(kernels) and not result["failures"]
    assert all(row["ms"] > 0 and row["difference"] <= 1e-5 and row["gb_per_s"] > 0 for row in rows)
    assert [row["choice"] for row in result["choices"]] == [{}, {"head_group": "1"}, {"head_group": "2"}]
    assert len(result["lines"]) == len(kernels) and "tiny | mix: " in capsys.readouterr().out
    assert tune_operator.least_bytes(TINY, "summarise", 4) == 4 * 2 * (2 * 16 * 8 + 4 * 8 * 9)


def test_the_tuning_program_takes_its_options(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(tune_operator.SHAPES, "tiny", TINY)
    options = "--device cpu --shapes tiny --limit 0 --repeats 1 --workers 1 --minutes 1".split()
    tune_operator.main(["--out", str(tmp_path), *options])
    assert "tiny | read_out: table" in capsys.readouterr().out
    assert set(tune_operator.DEFAULT) <= set(tune_operator.SHAPES)


def test_tuning_needs_a_gpu(capsys):
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            tune_operator.main([])
        assert "needs a CUDA device" in capsys.readouterr().err
