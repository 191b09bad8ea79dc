"""The whole-model benchmark runs at toy size and writes what it found. How fast anything is, is not asserted."""

import json

import pytest
import torch
from tiny_sana import stock_transformer, transformer_inputs

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation import bench_model, image_rows
from mhla_diffusion.evaluation.bench_model import chosen, default_out, run
from mhla_diffusion.evaluation.image_rows import CASES, floor_of
from mhla_diffusion.evaluation.model_steps import in_turns, step_milliseconds
from mhla_diffusion.models.convert import convert

KEYS = {"name", "model", "size", "batch", "mode", "direction", "ours_ms", "stock_ms", "floor_ms", "peak_gb"}
KEYS |= {"stock_peak_gb", "host_ms", "in_turns"}
CPU = torch.device("cpu")


def test_the_rows_are_the_models_sizes_modes_and_directions():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) == 14
    assert [case.name for case in chosen(["sana"])] == [
        f"sana-0.6B-{size}/forward/{mode}" for mode in ("compiled", "eager") for size in (1024, 2048, 4096)
    ]
    assert {case.name for case in chosen(["train"])} == {
        f"dit-{model}-512/train/{mode}" for model in ("S/2", "XL/2") for mode in ("eager", "compiled")
    }
    with pytest.raises(ValueError, match="no row's name holds 'flux'"):
        chosen(["flux"])
    assert chosen([]) == CASES and chosen(["eager"])[0].family == "sana"
    assert default_out(["sana"]) == default_out([]) == "outputs/image_models.json"


@pytest.mark.parametrize("name", ["sana-0.6B-1024/forward/eager", "sana-0.6B-1024/forward/compiled"])
def test_a_row_holds_ours_stock_and_the_floor(name, tmp_path, capsys, monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **_: compiled(model, backend="eager"))
    result = run(tmp_path / "models.json", rows=[name], device="cpu", seconds=0.01)
    assert json.loads((tmp_path / "models.json").read_text()) == json.loads(json.dumps(result))
    (row,) = result["rows"]
    assert set(row) == KEYS | ({"without_graph_ms"} if name.endswith("compiled") else set())
    assert row["name"] == name and row["model"] == "SANA-0.6B" and row["batch"] == 2
    assert min(row["ours_ms"], row["stock_ms"], row["floor_ms"]) > 0 and row["peak_gb"] is None
    assert row.get("without_graph_ms", {}) == (
        {} if name.endswith("eager") else dict.fromkeys(image_rows.VARIANTS)
    )
    assert row["in_turns"] and row["host_ms"].keys() == {"ours", "stock", "floor"}
    assert result["versions"]["torch"] == torch.__version__ and result["settings"]["tiny"]
    printed = capsys.readouterr().out
    assert "ratio" in printed and ", host " in printed
    assert ("target 0.9" in printed) == name.endswith("compiled")


def test_ours_can_run_with_fused_projections(tmp_path):
    fused = run(tmp_path / "m.json", rows=["1024/forward/eager"], device="cpu", seconds=0.01, fuse_qkv=True)
    assert fused["settings"]["ours"].startswith("fuse_qkv_projections()") and "error" not in fused["rows"][0]
    with pytest.raises(ValueError, match="another device, version or setting"):
        run(tmp_path / "m.json", device="cpu")


@torch.no_grad()
def test_a_dit_of_ours_shares_its_embedders_and_stock_keeps_its_copies():
    (case,) = chosen(["dit-XL/2-256/forward/eager"])
    stock = image_rows.stock_model(case, CPU, tiny=True)
    inputs = image_rows.model_inputs(case._replace(batch=2), stock.config, CPU, torch.float32)
    plain, shared = (image_rows.variant_of(stock, "ours", case, fused) for fused in (False, True))

    def embedders(model) -> int:
        return len({id(layer.norm1.emb) for layer in model.transformer_blocks})

    assert embedders(shared) == 1 and embedders(stock) == embedders(plain) == 2
    torch.testing.assert_close(shared.eval()(**inputs).sample, plain.eval()(**inputs).sample)


@torch.no_grad()
def test_the_floor_has_every_projection_and_no_mixing():
    stock = stock_transformer()
    floor = floor_of(convert(stock))
    assert floor.state_dict().keys() == convert(stock).state_dict().keys()
    attention = floor.transformer_blocks[0].attn1
    tokens = torch.randn(1, 12, 16)
    query, key, value = (
        projection(tokens) for projection in (attention.to_q, attention.to_k, attention.to_v)
    )
    assert torch.allclose(attention(tokens, grid=(3, 4)), attention.to_out[0](query + key + value))
    assert floor(**transformer_inputs()).sample.isfinite().all()


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path, monkeypatch):
    out = tmp_path / "deeper" / "models.json"
    names = ["sana-0.6B-1024/forward/eager", "sana-0.6B-2048/forward/eager"]
    assert run(out, rows=names, device="cpu", minutes=0)["left_out"] == names
    first = run(out, rows=names[:1], device="cpu", seconds=0.01)["rows"]
    both = run(out, rows=names, device="cpu", seconds=0.01)
    assert both["rows"][0] == first[0] and [row["name"] for row in both["rows"]] == names
    assert both["left_out"] == []

    def fails_at_the_floor(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(image_rows, "floor_of", fails_at_the_floor)
    third = "dit-XL/2-512/train/eager"
    (row,) = [
        row for row in run(out, rows=[third], device="cpu", seconds=0.01)["rows"] if row["name"] == third
    ]
    assert row["error"] == "floor: RuntimeError: out of memory" and row["floor_ms"] is None
    monkeypatch.undo()
    again = run(out, rows=[third], device="cpu", seconds=0.01)["rows"][2]
    assert "error" not in again and again["floor_ms"] > 0 and not again["in_turns"]
    assert again["ours_ms"] == row["ours_ms"] and again["stock_ms"] == row["stock_ms"]
    out.write_text(json.dumps(both | {"device": "another"}))
    with pytest.raises(ValueError, match="another device, version or setting"):
        run(out, rows=names, device="cpu")


def test_a_profile_says_which_part_asks_for_what(tmp_path, capsys):
    result = run(tmp_path / "p.json", rows=["sana-0.6B-1024"], device="cpu", profile=True, seconds=0.01)
    (row,) = result["profiles"]
    assert row["name"] == "sana-0.6B-1024/forward/eager" and "floor" not in row
    for variant in ("ours", "stock"):
        parts = row[variant]["parts"]
        assert {"self-attention core", "self-attention projections", "feed-forward"} <= parts.keys()
        assert all(
            parts[part]["operators"] > 0
            for part in ("cross-attention", bench_model.__name__)
            if part in parts
        )
        assert row[variant]["operators"] == pytest.approx(sum(part["operators"] for part in parts.values()))
        assert row[variant]["kernels"] is None and row[variant]["top_host"]
    assert "operators" in capsys.readouterr().out


def test_the_median_counts_whole_steps():
    calls = []
    assert step_milliseconds(lambda: calls.append(0), CPU, 0.001) >= 0
    assert len(calls) > 6


def test_calls_take_turns_and_each_round_begins_with_another():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = in_turns(calls, dict.fromkeys("abc", 5.0), CPU, 0.0)
    assert {name: len(each) for name, each in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert "".join(order) == "abcbcacab"
    order.clear()
    in_turns(calls, {"a": 400.0, "b": 150.0, "c": 1.0}, CPU, 1e-6)
    assert order.count("a") == order.count("b") == order.count("c") == 3
    assert in_turns({}, {}, CPU, 0.0) == {}


def test_the_command(tmp_path, capsys):
    out = tmp_path / "models.json"
    options = ["--rows", "sana-0.6B-1024/forward/eager", "--device", "cpu", "--out", str(out)]
    assert main(["bench", "model", *options, "--seconds", "0.01"]) == 0
    assert len(json.loads(out.read_text())["rows"]) == 1 and str(out) in capsys.readouterr().out
    assert main(["bench", "model", "--rows", "flux", "--out", str(out)]) == 2
    assert "no row's name holds 'flux'" in capsys.readouterr().err
    for part in ("model", "pipeline"):
        assert main(["bench", part, "--device", "cuda:99", "--out", str(out)]) == 2
        assert "device cuda:99 is not there" in capsys.readouterr().err
    assert main(["bench", "model", *options, "--seconds", "-1"]) == 2
    assert "seconds=-1.0: give more than 0" in capsys.readouterr().err
    assert main(["bench", "model", "--list"]) == 0
    assert "dit-XL/2-512/train/compiled" in capsys.readouterr().out
