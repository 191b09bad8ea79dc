import json
import shutil

import pytest
import tiny_sana
import torch
from diffusers import SanaTransformer2DModel
from safetensors.torch import load_file

import mhla_diffusion
from mhla_diffusion import MHLASanaTransformer2DModel
from mhla_diffusion.models.adapters import load_adapter
from mhla_diffusion.training import run


def checkpoint(out, name, step=6):
    return load_file(out / "checkpoints" / f"step-{step:08d}" / f"{name}.safetensors")


def without(path, *sections):
    """The recipe file with whole sections taken out."""
    text = path.read_text()
    for section in sections:
        start = text.index(f"[{section}]")
        text = text[:start] + text[text.index("\n[", start + 1) + 1 :]
    path.write_text(text)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_is_a_pipeline_with_the_ema_weights_that_draws(recipe_file, base, dtype):
    defaults = ["model.defaults.default_steps=3", "model.defaults.default_guidance_scale=2.0"]
    result = run(recipe_file(), [f"checkpoint.export_dtype={dtype}", *defaults])
    index = json.loads((result.pipeline / "model_index.json").read_text())
    assert index["transformer"] == ["mhla_diffusion", "MHLASanaTransformer2DModel"]
    assert (index["default_steps"], index["default_guidance_scale"], index["max_sequence_length"]) == (
        3,
        2.0,
        12,
    )

    pipe = mhla_diffusion.load_pipeline(result.pipeline)
    pipe.set_progress_bar_config(disable=True)
    ema = checkpoint(result.out, "ema")
    own = {
        f"{part}.{n}": p
        for part in ("transformer", "text_encoder")
        for n, p in getattr(pipe, part).named_parameters()
    }
    assert own.keys() == ema.keys()
    for name, value in own.items():
        stored = ema[name] if ".mixing." in name or dtype == "float32" else ema[name].bfloat16().float()
        assert torch.equal(value.float(), stored), name
    assert any(not torch.equal(v, checkpoint(result.out, "weights")[n]) for n, v in ema.items())

    saved = load_file(next((result.pipeline / "transformer").glob("*.safetensors")))
    assert {str(v.dtype) for n, v in saved.items() if ".mixing." in n} == {"torch.float32"}
    assert {str(v.dtype) for n, v in saved.items() if ".mixing." not in n} == {f"torch.{dtype}"}

    for path in (base / "vae").iterdir():  # untouched: not even another dtype
        assert path.read_bytes() == (result.pipeline / "vae" / path.name).read_bytes()

    picture = pipe("a picture of red number 1", generator=torch.Generator().manual_seed(0)).images[0]
    assert picture.size == (32, 32)


def test_unknown_default_names_the_nearest(recipe_file):
    with pytest.raises(ValueError, match="'default_step' in .model.defaults.; did you mean 'default_steps'"):
        run(recipe_file(), ["model.defaults.default_step=3"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.transformer.num_layer=3", "'num_layer' in .model.transformer.; did you mean 'num_layers'"),
        ("model.text_encoder.hidden=3", "'hidden' in .model.text_encoder.; did you mean 'hidden_size'"),
        ("model.text_encoder.vocab_size=20", "vocab_size = 20 is below the tokenizer's"),
        ("run.init_from=nowhere", "'nowhere' has no transformer/"),
        ("model.base=nowhere", "no pipeline 'nowhere'"),
    ],
)
def test_faults_of_the_model_tables(recipe_file, override, message):
    with pytest.raises(ValueError, match=message):
        run(recipe_file(), [override])


def test_an_instruction_needs_a_frozen_text_encoder(recipe_file):
    with pytest.raises(ValueError, match="frozen text encoder only; write model.train_text_encoder = false"):
        run(recipe_file(), ["model.defaults.complex_human_instruction=Draw:"])


def test_a_missing_part_says_what_to_write(recipe_file):
    with pytest.raises(
        ValueError, match="has no transformer/; to train a new one, write .model.transformer."
    ):
        run(without(recipe_file(), "model.transformer"))


@pytest.mark.parametrize("part", ["text_encoder", "vae"])
def test_a_base_with_a_weight_file_cut_short_names_it(recipe_file, base, tmp_path, part):
    shutil.copytree(base, tmp_path / "copy")
    tiny_sana.components()["text_encoder"].save_pretrained(tmp_path / "copy" / "text_encoder")
    weights = next((tmp_path / "copy" / part).glob("*.safetensors"))
    recipe = recipe_file()
    recipe.write_text(recipe.read_text().replace(str(base), str(tmp_path / "copy")))
    if part == "text_encoder":
        without(recipe, "model.text_encoder")
    for content, message in ((weights.read_bytes()[:-100], "is cut short: "), (b"", "is cut short or no")):
        weights.write_bytes(content)
        with pytest.raises(ValueError, match=f"{weights} {message}.*copy or download it again"):
            run(recipe)
    weights.unlink()
    with pytest.raises(ValueError, match=f"lacks the weights .*{part}/: copy the pipeline folder again"):
        run(recipe)


def test_an_earlier_run_with_weights_cut_short_is_named(recipe_file, tmp_path):
    run(recipe_file(), ["run.steps=1", "checkpoint.export_continue=true"])
    weights = next((tmp_path / "toy" / "continue").rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{weights} is cut short"):
        run(recipe_file("again"), [f"run.init_from={weights.parent.parent}"])


def test_continue_folder_goes_on_from_raw_and_averaged_weights(recipe_file, tmp_path):
    common = ["checkpoint.export_continue=true", "ema.decay=0.9"]
    first = run(recipe_file("first"), common)
    folder = first.out / "continue"
    assert json.loads((folder / "continue.json").read_text()) == {"step": 6, "run": "toy"}
    raw = load_file(next((folder / "transformer").glob("*.safetensors")))
    averaged = load_file(next((folder / "ema" / "transformer").glob("*.safetensors")))
    for name, value in raw.items():
        assert torch.equal(value, checkpoint(first.out, "weights")[f"transformer.{name}"])
        assert torch.equal(averaged[name], checkpoint(first.out, "ema")[f"transformer.{name}"])

    # With a rate of (almost) nothing the weights stay, and the EMA moves by its decay only.
    second = run(recipe_file("second"), [*common, f"run.init_from={folder}", "run.steps=7", "optimizer.lr=1e-30",
                                         "optimizer.mixing_lr=0.0", "optimizer.weight_decay=0.0"])  # fmt: skip
    assert second.step == 7
    state = json.loads((second.out / "checkpoints" / "step-00000007" / "state.json").read_text())
    assert state["first_step"] == 6
    weights, ema = checkpoint(second.out, "weights", 7), checkpoint(second.out, "ema", 7)
    decay = min(0.9, (1 + 6) / (10 + 6))
    for name, value in checkpoint(first.out, "weights").items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)
        expected = decay * checkpoint(first.out, "ema")[name] + (1 - decay) * value
        torch.testing.assert_close(ema[name], expected, rtol=1e-5, atol=1e-6)


def test_weights_of_another_shape_are_refused(recipe_file):
    first = run(recipe_file("first"))
    with pytest.raises(ValueError, match="do not fit the model of this recipe; .* first "):
        run(recipe_file("second"), [f"run.init_from={first.pipeline}", "model.transformer.mlp_ratio=3.0"])


@pytest.fixture
def stock(recipe_file):
    """A pipeline folder with a stock SANA transformer."""
    path = recipe_file("stock")
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("mhla_")))
    result = run(path, ["model.transformer_class=SanaTransformer2DModel", "run.steps=1"])
    pipe = mhla_diffusion.load_pipeline(result.pipeline)
    assert type(pipe.transformer) is SanaTransformer2DModel
    return result.pipeline


def fine_tune(recipe_file, stock, train, *overrides):
    path = without(recipe_file(train), "model.transformer", "model.text_encoder")
    common = [
        f"model.base={stock}",
        "model.train_text_encoder=false",
        f"model.train={train}",
        "optimizer.mixing_lr=0.5",
    ]
    return run(path, [*common, *overrides])


@pytest.mark.parametrize("train", ["mixing", "attention", "lora", "lora+mixing"])
def test_a_stock_transformer_is_converted_and_fine_tuned(recipe_file, stock, train):
    result = fine_tune(
        recipe_file, stock, train, "model.convert.block_grid=[2, 2]", "model.convert.gate=true"
    )
    before = mhla_diffusion.load_pipeline(stock).transformer.state_dict()
    pipe = mhla_diffusion.load_pipeline(result.pipeline)
    pipe.set_progress_bar_config(disable=True)
    assert type(
        pipe.transformer
    ) is MHLASanaTransformer2DModel and pipe.transformer.config.mhla_block_grid == [2, 2]
    after = pipe.transformer.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    if train == "mixing":
        assert not changed
    elif train == "attention":
        assert changed and all(".attn1." in name for name in changed)
    else:  # the adapters are merged into the projections that they sit on
        assert changed == {
            n for n in before if n.endswith(("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight"))
        }
    assert any(".mixing." in name for name in after) and not any("lora" in name for name in after)
    if train != "attention":  # the trained part as one file, onto the converted base
        again = mhla_diffusion.convert(
            mhla_diffusion.load_pipeline(stock).transformer, block_grid=(2, 2), gate=True
        )
        load_adapter(again, result.out / "adapter")
        inputs = {
            "hidden_states": torch.randn(1, 4, 8, 8),
            "encoder_hidden_states": torch.randn(1, 5, 16),
            "timestep": torch.tensor([500.0]),
        }
        with torch.no_grad():
            one, other = again.eval()(**inputs).sample, pipe.transformer.eval()(**inputs).sample
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    else:
        assert not (result.out / "adapter").exists()
    assert pipe("red", num_inference_steps=2).images[0].size == (32, 32)


def test_lora_resumes_bit_equal(recipe_file, stock, tmp_path):
    settings = ["model.convert.block_grid=[2, 2]", "model.lora.rank=2"]
    whole = fine_tune(recipe_file, stock, "lora", *settings)
    for _ in range(6):
        timed = fine_tune_again(recipe_file, stock, tmp_path, settings)
    for name in ("weights", "ema", "optimizer"):
        left, right = checkpoint(whole.out, name), checkpoint(timed.out, name)
        assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def fine_tune_again(recipe_file, stock, tmp_path, settings):
    path = without(recipe_file("again"), "model.transformer", "model.text_encoder")
    common = [
        f"model.base={stock}",
        "model.train_text_encoder=false",
        "model.train=lora",
        "optimizer.mixing_lr=0.5",
    ]
    return run(path, [*common, *settings, "run.max_minutes=1e-6"], resume="auto")
