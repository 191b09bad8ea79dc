"""The rows of Wan run at toy size: what they compare is what they say. How fast anything is, is not asserted."""

import json
import time

import pytest
import torch
from diffusers import WanTransformer3DModel
from model_checks import relative, stirred
from tiny_wan import model, run, stock_transformer, transformer_inputs
from torch.nn.attention import SDPBackend
from torch.profiler import profile

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation import bench_model, wan_rows
from mhla_diffusion.evaluation.bench_model import chosen, default_out
from mhla_diffusion.evaluation.model_steps import How
from mhla_diffusion.evaluation.wan_rows import (
    CASES,
    Case,
    floor_of,
    new_row,
    pinned,
    step_of,
    stock_model,
    targets_of,
    variant_of,
)
from mhla_diffusion.wan_attention import MHLAWanAttention

HOW = How(torch.device("cpu"), torch.float32, seconds=0.001)
ROW = "wan-1.3b-480x800x81/forward/eager"


@pytest.fixture
def quick_compiler(monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, mode, dynamic, **how: compiled(model, backend="aot_eager", **how)
    )


def bench(out, **options) -> dict:
    return bench_model.run(out, device="cpu", seconds=0.001, **options)


def test_the_rows_are_the_sizes_modes_and_directions_of_the_goals():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) == 9
    for size in ("480x800x81", "480x832x81", "720x1280x81"):
        assert {f"wan-1.3b-{size}/forward/{mode}" for mode in ("compiled", "eager")} <= set(names)
    assert [case.name for case in chosen(["wan"])] == [case.name for case in chosen([], "wan-1.3b")] == names
    assert default_out(["wan"]) == "outputs/wan.json"
    assert [new_row(case)["tokens"] for case in CASES[:3]] == [31500, 32760, 75600]
    with pytest.raises(ValueError, match="no rows for model 'flux': choose one of images, wan-1.3b"):
        chosen([], "flux")


def test_variants_are_the_models_that_they_are_named_after():
    stock = stock_model(Case((81, 480, 800)), HOW)
    for variant in ("stock_cudnn", "stock_flash"):
        built = variant_of(stock, variant, HOW)
        assert type(built) is WanTransformer3DModel and built is not stock
        assert (
            built.blocks[0].attn1.processor.backend
            is {
                "stock_cudnn": SDPBackend.MATH,
                "stock_flash": SDPBackend.FLASH_ATTENTION,
            }[variant]
        )
    grids = {}
    for variant in ("linear", "full", "hybrid", "floor"):
        layers = [layer.attn1 for layer in variant_of(stock, variant, HOW).blocks]
        grids[variant] = [attn.block_grid if isinstance(attn, MHLAWanAttention) else None for attn in layers]
    assert grids == {
        "linear": [(1, 1, 1)] * 3,
        "full": [(2, 2, 3)] * 3,
        "hybrid": [None, (2, 2, 3), (2, 2, 3)],
        "floor": [None] * 3,
    }


def test_weights_have_the_dtypes_of_from_pretrained(tmp_path):
    how = HOW._replace(dtype=torch.bfloat16)
    built = stock_model(Case((81, 480, 800)), how)
    built.save_pretrained(tmp_path)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert {name: p.dtype for name, p in built.named_parameters()} == {
        name: p.dtype for name, p in loaded.named_parameters()
    }
    assert built.rope.freqs_cos.dtype == loaded.rope.freqs_cos.dtype
    step_of(
        built,
        "full",
        Case((81, 480, 800), mode="eager"),
        wan_rows.model_inputs(CASES[0], built.config, how),
        how,
    )()


@torch.no_grad()
def test_the_floor_is_stock_with_a_sum_in_the_place_of_softmax():
    stock = stirred(stock_transformer())
    floor = floor_of(stock)
    inputs = transformer_inputs()
    attention, tokens = floor.blocks[0].attn1, torch.randn(1, 120, 24)
    positions = floor.rope(inputs["hidden_states"])
    turned = [
        wan_rows.rotated_as_stock(norm(projection(tokens)).unflatten(-1, (2, 12)), positions)
        for norm, projection in ((attention.norm_q, attention.to_q), (attention.norm_k, attention.to_k))
    ]
    expected = attention.to_out[0]((turned[0] + turned[1]).flatten(2) + attention.to_v(tokens))
    assert relative(attention(tokens, rotary_emb=positions), expected) < 1e-6
    # The rotation is stock's: softmax between rotated queries and keys gives what the stock model gives.
    same = model(mhla_layers=[], mhla_other_layers="softmax")
    same.load_state_dict(stock.state_dict())
    assert relative(run(same, **inputs), run(stock, **inputs)) < 1e-6
    assert relative(run(floor, **inputs), run(stock, **inputs)) > 1e-3


@torch.no_grad()
def test_compiled_softmax_uses_the_kernel_that_it_is_named_after(quick_compiler):
    stock, inputs = stock_transformer(), transformer_inputs()
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        built = pinned(wan_rows.restore(wan_rows.convert(stock, layers=[])), backend)
        built.compile_repeated_blocks(mode="default", dynamic=False, fullgraph=True)
        run(built, **inputs)
        with profile() as trace:
            run(built, **inputs)
        names = {event.key for event in trace.key_averages()}
        flash = any("flash_attention" in name for name in names)
        assert flash == (backend is SDPBackend.FLASH_ATTENTION)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_row_holds_all_variants_and_the_goals_beside_them(mode, tmp_path, capsys, quick_compiler):
    out = tmp_path / "deeper" / "wan.json"
    result = bench(out, rows=[f"wan-1.3b-480x800x81/forward/{mode}"])
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    (row,) = result["rows"]
    assert list(row["variants"]) == list(wan_rows.VARIANTS) and row["grid"] == [21, 30, 50]
    assert all(cell["ms"] > 0 and len(cell["all_ms"]) >= 3 for cell in row["variants"].values())
    stock, full = row["variants"]["stock_cudnn"]["ms"], row["variants"]["full"]["ms"]
    assert row["hybrid_expected_ms"] == pytest.approx(stock / 3 + full * 2 / 3)
    printed = capsys.readouterr().out
    assert "hybrid / Amdahl's expectation" in printed and ("full / floor" in printed) == (mode == "compiled")
    assert printed.count("(target ") == len(row["targets"]) == (3 if mode == "compiled" else 1)


def test_a_training_row_times_stock_and_full_with_checkpointing(tmp_path, capsys):
    (row,) = bench(tmp_path / "w.json", rows=["wan-1.3b-480x800x81/train/eager"])["rows"]
    assert list(row["variants"]) == ["stock_cudnn", "full"] and row["hybrid_expected_ms"] is None
    assert [target["what"] for target in row["targets"]] == ["stock / full"]
    assert "target >= 2.3" in capsys.readouterr().out
    stock = stock_model(CASES[0], HOW)
    case = Case((81, 480, 800), "train", "eager")
    step = step_of(stock, "full", case, wan_rows.model_inputs(case, stock.config, HOW), HOW)
    before = step.model.blocks[1].attn1.mixing.weight.clone()
    step()
    assert step.model.is_gradient_checkpointing and not step.model.blocks[1].attn1.mixing.weight.equal(before)
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_goals_are_met_or_missed_by_what_was_measured():
    row = new_row(CASES[0])
    for variant, ms, peak in (
        ("stock_cudnn", 488, 9.0),
        ("full", 158, 8.0),
        ("hybrid", 290, 9),
        ("floor", 151, 8),
    ):
        row["variants"][variant] |= {"ms": ms, "peak_gb": peak}
    row["hybrid_expected_ms"] = wan_rows.amdahl(row["variants"], 20 / 30)
    assert row["hybrid_expected_ms"] == pytest.approx(268)
    assert {target["what"]: target["met"] for target in targets_of(CASES[0], row)} == {
        "full / floor": True,
        "stock / full": True,
        "peak memory, full / stock": True,
        "hybrid / Amdahl's expectation": False,
    }
    row["variants"]["floor"]["ms"] = None
    assert "full / floor" not in [target["what"] for target in targets_of(CASES[0], row)]
    assert targets_of(Case((81, 720, 1280)), row)[0]["target"] == ">= 5.5"


def test_what_fails_or_does_not_fit_is_named_and_measured_later(tmp_path, monkeypatch, capsys):
    out = tmp_path / "w.json"
    assert bench(out, rows=[ROW], minutes=0)["left_out"] == [ROW]
    assert f"{ROW}: not measured, 0 minutes are over" in capsys.readouterr().out

    def fails(stock):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(wan_rows, "floor_of", fails)
    (row,) = bench(out, rows=[ROW])["rows"]
    assert (
        row["variants"]["floor"]["error"] == "RuntimeError: out of memory"
        and row["variants"]["full"]["ms"] > 0
    )
    assert "floor RuntimeError: out of memory" in capsys.readouterr().out
    monkeypatch.undo()
    whole = bench(out, rows=[ROW])
    assert whole["left_out"] == [] and len(whole["rows"]) == 1 and not wan_rows.missing(whole["rows"][0])
    assert bench(out, rows=[ROW])["rows"] == whole["rows"]

    late = new_row(CASES[0])
    wan_rows.measure(CASES[0], late, lambda: None, HOW._replace(end=time.monotonic() - 1))
    assert wan_rows.missing(late) == list(wan_rows.VARIANTS)
    assert late["variants"]["full"]["error"] == "not measured: the time was over" and late["targets"] == []


def test_a_profile_takes_stock_and_mhla_apart(tmp_path):
    (row,) = bench(tmp_path / "p.json", rows=["wan-1.3b-480x832"], profile=True)["profiles"]
    for variant in wan_rows.PROFILED:
        parts = row[variant]["parts"]
        assert {
            "self-attention core",
            "self-attention projections",
            "cross-attention",
            "feed-forward",
        } <= parts.keys()


def test_the_command_lists_and_measures_by_model(tmp_path, capsys):
    assert main(["bench", "model", "--model", "wan-1.3b", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [case.name for case in CASES]
    out = tmp_path / "w.json"
    options = ["--model", "wan-1.3b", "--rows", "480x800x81/forward/eager", "--seconds", "0.001"]
    assert main(["bench", "model", *options, "--fuse-qkv", "--device", "cpu", "--out", str(out)]) == 0
    facts = json.loads(out.read_text())
    assert len(facts["rows"]) == 1 and facts["settings"]["ours"].startswith("fuse_qkv_projections()")
    assert f"{out} written" in capsys.readouterr().out
