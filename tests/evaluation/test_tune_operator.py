"""The tuning program times kernels and prints what to put into the table. How fast anything is, is not asserted."""

import json

import pytest
import torch

from mhla_diffusion.evaluation import tune_operator
from mhla_diffusion.evaluation.operator_cases import Case, Inputs

CPU = torch.device("cpu")
TINY = Case("tiny", 1, 2, (2, 4), (1, 2), 8, backward=True)
TINY_FUSED = Case("tiny, fused", 1, 2, (2, 3, 4), (1, 2, 2), 8, "none", rope=True, fused=True)


@pytest.mark.parametrize("case", [TINY, TINY_FUSED], ids=lambda case: case.name)
def test_every_kernel_of_a_shape_can_be_called_alone(case):
    stages = tune_operator.stages(Inputs(case, CPU, torch.float32, 0))
    assert list(stages) == tune_operator.kernels_of(case)
    for kernel, call in stages.items():
        assert all(torch.isfinite(x).all() for x in tune_operator.first_tensors(call())), kernel
        options = list(tune_operator.candidates(kernel, case.dim))
        assert len(options) == len(set(options)) > 4


@pytest.mark.filterwarnings("default:the MHLA kernels:UserWarning")
def test_tuning_times_kernels_of_each_kind_and_prints_the_best(tmp_path, monkeypatch, capsys):
    kernels = ["mix", "key_gradients", "dual_forward"]
    how = {"repeats": 1, "workers": 1, "limit": 1, "kernels": kernels}
    result = tune_operator.tune([TINY], tmp_path, CPU, torch.float32, **how)
    assert json.loads((tmp_path / "tune.json").read_text()) == json.loads(json.dumps(result))
    rows = result["kernels"]
    # The table's configuration, a candidate, and where registers can be limited that one with fewer of them.
    assert [row["kernel"] for row in rows] == [
        name for name in kernels for _ in range(2 if "mix" in name else 3)
    ]
    assert [row["config"] == "table" for row in rows].count(True) == len(kernels) and not result["failures"]
    assert all(row["ms"] > 0 and row["difference"] <= 1e-5 and row["gb_per_s"] > 0 for row in rows)
    assert [row["choice"] for row in result["choices"]] == [{}, {"head_group": "1"}, {"head_group": "2"}]
    assert len(result["lines"]) == len(kernels) and "tiny | mix: " in capsys.readouterr().out
    assert tune_operator.least_bytes(TINY, "summarise", 4) == 4 * 2 * (2 * 8 * 8 + 2 * 8 * 9)


def test_the_tuning_program_takes_its_options(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(tune_operator.SHAPES, "tiny", TINY)
    options = (
        "--device cpu --shapes tiny --limit 0 --repeats 1 --workers 1 --minutes 1 --kernels read_out".split()
    )
    tune_operator.main(["--out", str(tmp_path), *options])
    out = capsys.readouterr().out
    assert "tiny | read_out: table" in out and "tiny | mix" not in out
    assert set(tune_operator.DEFAULT) <= set(tune_operator.SHAPES)


def test_tuning_needs_a_gpu_or_the_interpreter(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("mhla_diffusion.ops.backends._INTERPRETED", False)
    for options, message in (
        ([], "no CUDA device here"),
        (["--device", "cpu"], "do not run on a CPU as it is"),
    ):
        with pytest.raises(SystemExit):
            tune_operator.main(options)
        assert f"{message}: set TRITON_INTERPRET=1" in capsys.readouterr().err
