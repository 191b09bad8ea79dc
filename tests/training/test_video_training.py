"""A tiny Wan learns from videos on disk: a few steps, exact resume, samples, and a pipeline that draws."""

import json
import shutil

import numpy as np
import pytest
import tiny_sana_video_pipeline
import tiny_wan_pipeline
import torch
from safetensors.torch import load_file
from tiny_wan import TRANSFORMER, model, stock_transformer

import mhla_diffusion
from mhla_diffusion import MHLAWanPipeline, MHLAWanTransformer3DModel
from mhla_diffusion.mixing import BlockMixing
from mhla_diffusion.pipelines.videos import read_video, save_video
from mhla_diffusion.training import latents, run
from mhla_diffusion.training.components import build_components
from mhla_diffusion.training.latents import encode_pixels, load_or_embed, tokenise
from mhla_diffusion.training.losses import FlowLoss
from mhla_diffusion.training.recipe import load_recipe

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:the token grid holds only")
RECIPE = """
[run]
name = "toy"
seed = 3
steps = 4
batch_size = 2
log_every = 2
device = "cpu"
tracker = "none"
out = "{out}"

[model]
base = "{base}"

[model.convert]
block_grid = [2, 2, 3]
layers = "1/2"
gate = true

[data]
kind = "videos"
path = "{videos}"
sizes = [[9, 32, 48], [1, 32, 48]]
fps = 8
max_sequence_length = 6
cache = "{cache}"
encode_batch = 2
keep_on = "host"

[optimizer]
lr = 0.002
warmup = 2

[checkpoint]
every = 2

[sample]
every = 4
prompts = ["red apple", "cat"]
steps = 2
guidance = 3.0
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A whole stock pipeline folder of Wan."""
    folder = tmp_path_factory.mktemp("wan")
    tiny_wan_pipeline.stock_pipeline(stock_transformer()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Four short videos and a picture's worth of one, with captions.jsonl."""
    folder = tmp_path_factory.mktemp("videos")
    lines = []
    for i in range(5):
        noise = np.random.default_rng(i).integers(0, 255, (12 if i < 4 else 1, 32, 48, 3)).astype(np.uint8)
        save_video(noise, folder / f"{i}.mp4", fps=8)
        lines.append(json.dumps({"file": f"{i}.mp4", "caption": ["red apple", f"a cat {i}"]}))
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def recipe_file(write_recipe, base, videos):
    return lambda name="toy": write_recipe(RECIPE, name, base=base, videos=videos)


def state_of(out, step):
    folder = out / "checkpoints" / f"step-{step:08d}"
    return {name: load_file(folder / f"{name}.safetensors") for name in ("weights", "ema", "optimizer")}


def test_two_steps_and_two_more_equal_four_and_the_result_draws(recipe_file, tmp_path, base):
    whole = run(recipe_file("whole"))
    assert whole.finished and np.isfinite(whole.loss)
    half = recipe_file("half")
    run(half)
    for path in (tmp_path / "half").iterdir():  # as if the machine had stopped after the checkpoint at step 2
        if path.is_dir() and path.name != "checkpoints":
            shutil.rmtree(path)
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000004")
    resumed = run(half, resume="auto")
    for kind, tensors in state_of(whole.out, 4).items():
        other = state_of(resumed.out, 4)[kind]
        assert tensors.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in tensors.items()), kind

    sheet = read_video(whole.out / "samples" / "step-00000004.mp4")
    assert sheet.frames.shape == (9, 32, 2 * 48 + 2, 3) and sheet.fps == 8
    assert sheet.settings["prompts"] == ["red apple", "cat"]

    pipe = mhla_diffusion.load_pipeline(whole.pipeline)
    transformer = pipe.transformer
    assert type(transformer) is MHLAWanTransformer3DModel and transformer.config.mhla_layers == [1]
    stock = load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")
    key = "blocks.1.attn1.to_q.weight"
    assert not torch.equal(transformer.state_dict()[key], stock[key])
    mixings = [module for module in transformer.modules() if isinstance(module, BlockMixing)]
    assert len(mixings) == 1 and 0 <= mixings[0].weight.min() and mixings[0].weight.max() <= 1
    pipe.set_progress_bar_config(disable=True)
    # Trained at 9 x 32 x 48 and 1 x 32 x 48; nothing is added for other sizes: shorter, portrait, larger and longer.
    for count, height, width in ((5, 32, 32), (9, 48, 32), (1, 64, 80), (17, 32, 64)):
        size = {"num_frames": count, "height": height, "width": width}
        frames = pipe("red apple", num_inference_steps=1, **size).frames
        assert frames.shape == (1, count, height, width, 3) and np.isfinite(frames).all()
    facts = json.loads((whole.out / "run.json").read_text())
    assert facts["pictures"] == 5


def test_the_cache_holds_latents_and_captions(recipe_file, tmp_path, monkeypatch, capfd):
    options = ["sample.every=0", "run.steps=1"]
    first = run(recipe_file("first"), options)
    assert "clips/s" in capfd.readouterr().err
    assert len(list((tmp_path / "cache").glob("*/latents.safetensors"))) == 1
    assert len(list((tmp_path / "cache").glob("*/captions.safetensors"))) == 1
    monkeypatch.setattr(latents, "encode_source", None)
    monkeypatch.setattr(latents, "embed_video_captions", None)
    second = run(recipe_file("second"), options)
    assert torch.equal(
        *(state_of(result.out, 1)["weights"]["transformer.proj_out.weight"] for result in (first, second))
    )


@torch.no_grad()
def test_latents_and_captions_are_what_the_pipeline_takes_and_gives(recipe_file, tmp_path):
    parts = build_components(load_recipe(recipe_file()))
    pipeline = parts.pipeline()
    pixels = torch.randint(0, 255, (1, 3, 9, 32, 48), dtype=torch.uint8)
    encoded = encode_pixels(parts.vae, pixels)
    assert encoded.shape == (1, 4, 3, 4, 6) and encoded.dtype == torch.float32
    moments = parts.vae.encode(pixels.float() / 127.5 - 1).latent_dist.mode()
    mean, std = (
        torch.tensor(x).view(1, 4, 1, 1, 1)
        for x in (parts.vae.config.latents_mean, parts.vae.config.latents_std)
    )
    assert torch.allclose(
        encoded * std + mean, moments, atol=1e-6
    )  # as the pipeline undoes it before decoding

    texts = ["", "red apple", "A  cat "]
    values = load_or_embed(parts, texts, 6, CPU, "")
    asked, _ = pipeline.encode_prompt(texts, do_classifier_free_guidance=False, max_sequence_length=6)
    assert values.shape == (3, 6, 12) and torch.equal(values, asked)
    # A text encoder that trains gives the same, through its tokens and their mask.
    ids, mask = tokenise(parts.tokenizer, [latents.cleaned(text, True) for text in texts], 6)
    loss = FlowLoss(parts.transformer, parts.text_encoder)
    noisy, time = torch.randn(3, 4, 3, 4, 6), torch.tensor([100.0, 500.0, 900.0])
    frozen = FlowLoss(parts.transformer)
    assert torch.allclose(
        loss.predict(noisy, time, ids, mask), frozen.predict(noisy, time, values, None), atol=1e-6
    )
    noise, sigma = torch.randn_like(noisy), torch.tensor([0.0, 0.5, 1.0])
    losses = frozen(noisy, noise, sigma, values)
    at = torch.stack([noisy[0], (noisy[1] + noise[1]) / 2, noise[2]])
    target = frozen.predict(at, 1000 * sigma, values, None) - (noise - noisy)
    assert torch.allclose(losses, target.square().flatten(1).mean(1), atol=1e-6)


@pytest.mark.parametrize("train", ["all", "lora+mixing"])
def test_other_ways_to_train(recipe_file, tmp_path, train):
    options = [
        f'model.train="{train}"', "run.gradient_checkpointing=true", "run.steps=1", "sample.every=0", "data.cache=",
    ]  # fmt: skip
    result = run(recipe_file(), options)
    assert result.finished and (result.out / "adapter").is_dir() == (train != "all")


def test_a_warm_start_of_converted_layers(recipe_file, tmp_path):
    options = ["distill.steps=30", "distill.lr=0.005", "run.steps=1", "run.log_every=5", "sample.every=0"]
    result = run(recipe_file(), options)
    entries = [json.loads(line) for line in (result.out / "distillation.jsonl").read_text().splitlines()]
    assert result.finished and entries[-1]["loss"] < 0.5 * entries[0]["loss"]
    assert list(entries[0]["layers"]) == ["blocks.1.attn1"]


def test_a_fresh_wan_with_a_text_encoder_of_its_own(recipe_file, tmp_path, base):
    bare = tmp_path / "bare"
    for part in ("vae", "tokenizer", "scheduler"):
        shutil.copytree(base / part, bare / part)
    path = recipe_file()
    text = path.read_text().replace(str(base), str(bare))
    convert = text.index("[model.convert]")
    fields = {**TRANSFORMER, "mhla_block_grid": [2, 2, 3], "mhla_layers": "1/2"}
    encoder = {
        "vocab_size": 32, "d_model": 12, "d_kv": 6, "d_ff": 16, "num_layers": 1, "num_heads": 2,
        "relative_attention_num_buckets": 4, "pad_token_id": 0,
    }  # fmt: skip
    tables = [
        f"[model.{name}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
        for name, table in (("transformer", fields), ("text_encoder", encoder))
    ]
    fresh = 'transformer_class = "MHLAWanTransformer3DModel"\ntrain_text_encoder = true\n'
    path.write_text(text[:convert] + fresh + "\n\n".join(tables) + "\n\n" + text[text.index("[data]") :])
    result = run(path, ["run.steps=2", "sample.every=2", "checkpoint.export_continue=true"])
    # Its table of words has two names, and is stored once.
    for folder, steps in (("continue", 3), ("pipeline", 1)):
        options = [f"run.init_from={result.out / folder}", f"run.out={tmp_path / folder}", "sample.every=0"]
        assert run(path, [*options, f"run.steps={steps}"]).step == steps
    pipe = mhla_diffusion.load_pipeline(result.pipeline)
    assert type(pipe) is MHLAWanPipeline and pipe.config.max_sequence_length == 6
    assert type(pipe.text_encoder).__name__ == "UMT5EncoderModel"
    assert (result.out / "samples" / "step-00000002.mp4").is_file()


def test_wan_2_2_is_refused_by_name(recipe_file, base, tmp_path):
    copy = tmp_path / "experts"
    shutil.copytree(base, copy)
    index = json.loads((copy / "model_index.json").read_text())
    for change, why in (
        ({"transformer_2": ["diffusers", "WanTransformer3DModel"]}, "two experts"),
        ({"expand_timesteps": True}, "a timestep per token"),
    ):
        (copy / "model_index.json").write_text(json.dumps(index | change))
        with pytest.raises(ValueError, match=f"is Wan 2.2 with {why}; recipes train Wan 2.1"):
            run(recipe_file(), [f"model.base={copy}"])


def test_other_kinds_of_models_are_refused_by_name(recipe_file, base, tmp_path):
    tiny_sana_video_pipeline.stock_pipeline().save_pretrained(tmp_path / "sana-video")
    copy = tmp_path / "image"
    shutil.copytree(base, copy)
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps(index | {"_class_name": "WanImageToVideoPipeline"}))
    for folder, why in (
        (tmp_path / "sana-video", "is a SanaVideoTransformer3DModel; recipes train DiT, SANA, and Wan 2.1"),
        (copy, "is Wan for image to video; recipes train Wan 2.1, text to video"),
    ):
        with pytest.raises(ValueError, match=why) as caught:
            run(recipe_file(), [f"model.base={folder}"])
        assert "\n" not in str(caught.value)


def test_a_converted_base_keeps_its_blocks(recipe_file, tmp_path):
    tiny_wan_pipeline.stock_pipeline(model()).save_pretrained(tmp_path / "converted")
    with pytest.raises(ValueError, match="take that section out.*--block-grid FRAMES,ROWS,COLUMNS"):
        run(recipe_file(), [f"model.base={tmp_path / 'converted'}"])


def test_sizes_and_layers_of_a_recipe_are_checked(recipe_file):
    for override, message in (
        (
            "data.sizes=[[9,32]]",
            r"data.sizes = \[\[9, 32\]\]; allowed: one or more \[frames, height, width\]",
        ),
        ("data.sizes=[]", r"allowed: one or more \[frames, height, width\]"),
        ("data.kind=folder", 'only with data.kind = "videos"'),
        ("data.fps=-1", "data.fps = -1.0; allowed: 0"),
        ("model.convert.layers=3", "is not a list of integers or a string"),
    ):
        with pytest.raises(ValueError, match=message):
            load_recipe(recipe_file(), [override])
    with pytest.raises(ValueError, match="a share such as '2/3'"):
        run(recipe_file(), ["model.convert.layers=half"])
