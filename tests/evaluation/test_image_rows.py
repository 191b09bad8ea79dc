"""Compiled rows of image models: one compilation for all layers, one CUDA graph for a pass, and what if one fails."""

import pytest
import torch
from model_checks import relative

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation import image_rows
from mhla_diffusion.evaluation.bench_model import chosen, run
from mhla_diffusion.evaluation.image_rows import VARIANTS, captured, new_row, prepared, settings_of, step_of
from mhla_diffusion.evaluation.model_steps import How
from mhla_diffusion.evaluation.timing import graphed

HOW = How(torch.device("cpu"), torch.float32, seconds=0.01)
ON_CUDA = How(torch.device("cuda"), torch.bfloat16)
SANA = "sana-0.6B-1024/forward/compiled"
LAYERS = 10  # more than the versions of a function that torch.compile keeps


def case_of(name: str) -> image_rows.Case:
    (case,) = chosen([name])
    return case


@pytest.fixture
def graphs(monkeypatch) -> list:
    """What the compiler is asked to compile, in place of what it takes minutes for."""
    found, compiled = [], torch.compile

    def taken(graph, inputs):
        found.append(graph)
        return graph.forward

    def compile_eagerly(call, *, mode, dynamic, fullgraph):
        assert fullgraph and not dynamic
        return compiled(call, backend=taken, dynamic=dynamic, fullgraph=fullgraph)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    torch._dynamo.reset()
    return found


def test_compiled_passes_with_goals_come_first():
    forward = ["sana-0.6B-1024", "sana-0.6B-2048", "sana-0.6B-4096", "dit-XL/2-512", "dit-XL/2-256"]
    expected = [f"{name}/forward/compiled" for name in forward]
    expected += ["dit-XL/2-512/train/compiled", *(f"{name}/forward/eager" for name in forward)]
    assert [case.name for case in image_rows.CASES][: len(expected)] == expected


@pytest.mark.parametrize("name", [SANA, "dit-XL/2-512/forward/compiled", "dit-S/2-512/train/compiled"])
def test_one_compilation_serves_all_layers(name, graphs, monkeypatch):
    monkeypatch.setitem(image_rows.TINY, "num_layers", LAYERS)
    how = HOW._replace(fuse_qkv=True)
    case, stock, inputs = prepared(case_of(name), how)
    # In training every layer of a DiT of ours but the first, which is handed the embedding, embeds for itself.
    expected = {"stock": 1} | dict.fromkeys(("ours", "floor"), 2 if case.direction == "train" else 1)
    for variant in VARIANTS:
        graphs.clear()
        step = step_of(stock, variant, case, inputs, how)
        step()
        step()
        assert len(graphs) == expected[variant], variant


def test_compiled_passes_compute_what_eager_ones_do(graphs):
    case, stock, inputs = prepared(case_of(SANA), HOW)
    for variant in VARIANTS:
        eager, compiled = (
            step_of(stock, variant, case._replace(mode=mode), inputs, HOW)() for mode in ("eager", "compiled")
        )
        torch.testing.assert_close(compiled, eager)
    assert len(graphs) == len(VARIANTS)


def test_only_compiled_rows_on_a_gpu_are_captured():
    assert [case for case in image_rows.CASES if captured(case, ON_CUDA)] == [
        case for case in image_rows.CASES if case.mode == "compiled"
    ]
    assert not any(
        captured(case, how) for case in image_rows.CASES for how in (HOW, ON_CUDA._replace(graph=False))
    )
    with_graph, without = (settings_of(ON_CUDA._replace(graph=graph)) for graph in (True, False))
    assert with_graph != without and without["graph"] == "none" and "replay" in with_graph["graph"]


def test_a_variant_that_cannot_be_captured_is_named_and_the_others_go_on(
    tmp_path, graphs, monkeypatch, capsys
):
    tried = []

    def captures_all_but_the_second(step, device):
        tried.append(step)
        if len(tried) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return step

    monkeypatch.setattr(image_rows, "captured", lambda case, how: image_rows.can_be_captured(case))
    monkeypatch.setattr(image_rows, "graphed", captures_all_but_the_second)
    rows = [SANA, "sana-0.6B-2048/forward/compiled"]
    first, second = run(tmp_path / "m.json", rows=rows, device="cpu", seconds=0.01)["rows"]
    assert first["error"] == "ours: RuntimeError: operation not permitted when stream is capturing"
    assert (
        first["ours_ms"] is None and first["stock_ms"] > 0 and first["floor_ms"] > 0 and not first["in_turns"]
    )
    assert all(
        first["without_graph_ms"][variant] > 0 and first["host_ms"][variant] > 0 for variant in VARIANTS
    )
    assert "error" not in second and second["in_turns"]
    printed = capsys.readouterr().out
    assert "ours: RuntimeError" in printed and ", without a graph " in printed
    again = run(tmp_path / "m.json", rows=rows, device="cpu", seconds=0.01)["rows"]
    assert "error" not in again[0] and again[0]["ours_ms"] > 0 and again[1] == second
    assert again[0]["stock_ms"] == first["stock_ms"] and len(tried) == 7


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_mode_with_graphs_of_its_own_is_not_captured_in_another(mode, tmp_path, capsys):
    options = ["--rows", SANA, "--device", "cpu", "--minutes", "0", "--out", str(tmp_path / "m.json")]
    assert main(["bench", "model", *options, "--compile-mode", mode]) == 2
    error = capsys.readouterr().err
    assert mode in error and "--no-graph" in error and "max-autotune-no-cudagraphs" in error
    assert main(["bench", "model", *options, "--compile-mode", mode, "--no-graph"]) == 0


class TinyOnCuda(How):
    """The models that are small in every way, on a GPU."""

    tiny = True


@pytest.mark.gpu
@pytest.mark.parametrize("name", [SANA, "dit-XL/2-512/forward/compiled"])
def test_a_replay_gives_what_the_step_gives_and_the_row_has_both_times(name, monkeypatch):
    for config, fields in (
        (image_rows.TINY, {"attention_head_dim": 32}),
        (image_rows.TINY_SANA, {"cross_attention_head_dim": 32, "cross_attention_dim": 64}),
    ):
        for field, value in fields.items():
            monkeypatch.setitem(config, field, value)
    device = torch.device("cuda")
    how = TinyOnCuda(device, torch.bfloat16, seconds=0.05, fuse_qkv=True)
    case, stock, inputs = prepared(case_of(name), how)
    for variant in VARIANTS:
        step = step_of(stock, variant, case, inputs, how)
        plain = step()
        replay = graphed(step, device)
        assert replay.captured is step
        replay().zero_()
        assert relative(replay(), plain) < 1e-3
        inputs["hidden_states"].mul_(-1)  # in place: a replay reads its inputs where they lie
        assert relative(replay(), step()) < 1e-3 < relative(replay(), plain)
    row = new_row(case)
    image_rows.measure(case, row, lambda: None, how)
    assert "error" not in row and row["in_turns"] and row["peak_gb"] > 0 and row["stock_peak_gb"] > 0
    for variant in VARIANTS:
        assert min(row[f"{variant}_ms"], row["without_graph_ms"][variant], row["host_ms"][variant]) > 0


@pytest.mark.gpu
def test_a_captured_training_step_trains(monkeypatch):
    device = torch.device("cuda")
    how = TinyOnCuda(device, torch.bfloat16, seconds=0.05)
    monkeypatch.setitem(image_rows.TINY, "attention_head_dim", 32)
    case, stock, inputs = prepared(case_of("dit-S/2-512/train/compiled"), how)
    weights = stock.transformer_blocks[1].attn1.to_q.weight
    for variant in VARIANTS:
        replay = graphed(step_of(stock, variant, case, inputs, how), device)
        for _ in range(2):
            before = weights.detach().clone()
            replay()
            assert (
                1e-6 < (weights - before).abs().max() < 1e-4
            )  # AdamW's steps are of the learning rate's size, 1e-5
    row = new_row(case)
    image_rows.measure(case, row, lambda: None, how)
    assert "error" not in row and row["in_turns"] and None not in row["without_graph_ms"].values()


@pytest.mark.gpu
def test_a_failed_capture_leaves_the_device_as_it_was():
    x = torch.ones(8, device="cuda")
    stream, calls = torch.cuda.current_stream(), []

    def fails_at_last():
        calls.append(x + 1)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("a size that does not fit")

    with pytest.raises(ValueError, match="does not fit"):
        graphed(fails_at_last)
    assert len(calls) > 1
    assert torch.cuda.current_stream() == stream
    assert graphed(lambda: x + 1)().sum().item() == 16
