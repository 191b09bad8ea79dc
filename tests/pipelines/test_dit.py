"""MHLADiTPipeline: any classes and sizes, settings that are saved, faults named before anything runs."""

import json

import numpy as np
import pytest
import tiny_sana
import torch
from diffusers import (
    DiffusionPipeline,
    DiTPipeline,
)
from diffusers.callbacks import PipelineCallback
from model_checks import close, stirred
from tiny_dit import CLASSES, LABELS, components, generator, stock_pipeline, stock_transformer
from tiny_dit_pipeline import draw, pipeline

from mhla_diffusion import load_pipeline
from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.dit import MHLADiTPipeline, dit_scheduler


@pytest.fixture(scope="module")
def pipe() -> MHLADiTPipeline:
    return pipeline()


@pytest.mark.parametrize("scheduler", ["ddim", "dpm-solver"])
@pytest.mark.parametrize("guidance", [4.0, 1.0])
def test_with_a_stock_transformer_of_1000_classes_it_is_the_stock_pipeline_bit_for_bit(scheduler, guidance):
    transformer = stock_transformer(num_embeds_ada_norm=1000)
    stock, ours = stock_pipeline(transformer), pipeline(transformer)
    for each in (stock, ours):
        each.scheduler = dit_scheduler(scheduler)
    settings = {"num_inference_steps": 4, "guidance_scale": guidance}
    assert torch.equal(draw(ours, (1, 999), **settings), draw(stock, (1, 999), **settings))


@pytest.mark.parametrize("classes", [1, 3, 10])
def test_any_number_of_classes_has_its_own_null_class(classes):
    pipe = pipeline(stock_transformer(num_embeds_ada_norm=classes), id2label={0: "the first"})
    seen = []
    embedder = pipe.transformer.transformer_blocks[0].norm1.emb.class_embedder
    embedder.register_forward_pre_hook(lambda _, labels: seen.append(labels[0].tolist()))
    assert draw(pipe, (classes - 1, 0), num_inference_steps=1).isfinite().all()
    assert seen[0] == [classes - 1, 0, classes, classes]
    # The null class may be asked for: guidance from it to itself changes nothing.
    unguided = draw(pipe, classes, guidance_scale=1.0)
    assert close(draw(pipe, classes, guidance_scale=4.0), unguided)


def test_a_transformer_without_variances_or_stated_output_channels_works():
    pipe = pipeline(stock_transformer(out_channels=None))
    assert draw(pipe).shape == (1, 3, 16, 16)


def test_labels_by_number_and_name(pipe):
    noise = torch.ones(3, 4, 8, 8)
    expected = draw(pipe, (0, 1, 2), latents=noise)
    names = ["goldfish", "white shark", "umbrella"]
    for labels in (names, ["Carassius auratus", 1, "umbrella"], np.arange(3), torch.arange(3)[:, None]):
        assert torch.equal(draw(pipe, labels, latents=noise), expected)
    assert torch.equal(draw(pipe, "umbrella"), draw(pipe, 2))
    assert pipe.get_label_ids("white shark") == pipe.get_label_ids(["white shark"]) == [1]


def test_a_saved_pipeline_draws_with_its_own_settings(tmp_path):
    saved = pipeline(guidance_channels=3, default_steps=2, default_guidance_scale=2.0)
    saved.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == "MHLADiTPipeline"
    assert index["transformer"] == ["mhla_diffusion", "MHLADiTTransformer2DModel"]
    assert index["guidance_channels"] == 3 and index["id2label"]["1"] == "white shark"
    for again in (MHLADiTPipeline.from_pretrained(tmp_path), load_pipeline(tmp_path)):
        assert type(again) is MHLADiTPipeline
        again.set_progress_bar_config(disable=True)
        assert close(draw(again, "white shark"), draw(saved, 1))
        assert again.num_timesteps == 2 and again.guidance_scale == 2.0
        again.save_pretrained(tmp_path / "again")
        assert (
            json.loads((tmp_path / "again" / "model_index.json").read_text())["id2label"] == index["id2label"]
        )


def test_the_stock_pipeline_loads_our_transformer_through_diffusers(tmp_path):
    stock = stock_pipeline(stirred(convert(stock_transformer(num_embeds_ada_norm=1000))))
    stock.save_pretrained(tmp_path)
    again = DiffusionPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert type(again) is DiTPipeline
    assert close(draw(again, num_inference_steps=2), draw(stock, num_inference_steps=2))
    ours = MHLADiTPipeline.from_pipe(again, default_steps=2)
    ours.set_progress_bar_config(disable=True)
    assert ours.transformer is again.transformer
    assert torch.equal(draw(ours), draw(again, num_inference_steps=2))


def test_label_names_of_a_stock_pipeline_are_kept(tmp_path):
    stock = DiTPipeline(**components(stock_transformer()), id2label=LABELS)
    ours = MHLADiTPipeline.from_pipe(stock)
    assert ours.labels == stock.labels and len(ours.labels) == 4
    ours.save_pretrained(tmp_path)
    assert MHLADiTPipeline.from_pretrained(tmp_path).labels == stock.labels
    assert MHLADiTPipeline.from_pipe(ours).labels == stock.labels
    assert MHLADiTPipeline.from_pipe(stock, id2label={0: "koi"}).labels == {"koi": 0}


def test_an_index_that_names_the_stock_model_for_our_weights_is_refused(tmp_path):
    pipeline().save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["transformer"] = ["diffusers", "DiTTransformer2DModel"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="would drop") as caught:
        MHLADiTPipeline.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("channels", [None, 1, 3, 4])
def test_guidance_moves_the_channels_it_was_told_and_leaves_the_others(channels):
    pipe = pipeline(guidance_channels=channels)
    latents = torch.randn(2, 4, 8, 8, generator=generator(1))
    pipe.scheduler.set_timesteps(4)
    pipe._guidance_scale = 3.0
    labels = torch.tensor([1, 2, CLASSES, CLASSES])
    time = torch.tensor(500)
    with torch.no_grad():
        out = pipe.predict(latents, time, labels)
        plain = pipe.transformer(torch.cat([latents] * 2), time.expand(4), labels).sample
    given, null = plain[:2, :4], plain[2:, :4]
    guided = null + 3.0 * (given - null)
    expected = torch.cat([guided[:, : channels or 4], given[:, channels or 4 :]], dim=1)
    assert torch.equal(out, expected)


def test_every_output_type(pipe):
    image = draw(pipe, output_type="pil")[0]
    array, tensor = draw(pipe, output_type="np"), draw(pipe)
    assert image.size == (16, 16) and image.mode == "RGB"
    assert array.shape == (1, 16, 16, 3) and 0 <= array.min() and array.max() <= 1
    assert np.allclose(array, tensor.permute(0, 2, 3, 1).numpy())
    assert torch.equal(pipe(1, generator=generator(0), output_type="pt", return_dict=False)[0], tensor)
    decoded = []
    handle = pipe.vae.decoder.register_forward_pre_hook(lambda *_: decoded.append(1))
    latents = draw(pipe, output_type="latent")
    handle.remove()
    assert latents.shape == (1, 4, 8, 8) and not decoded


def test_any_size_that_the_patches_fit(pipe):
    assert pipe.size_multiple == 4
    image = draw(pipe, output_type="pil", height=20, width=36)[0]
    assert image.size == (36, 20)


def test_latents_given_are_the_noise_that_is_used(pipe):
    noise = torch.randn(1, 4, 8, 8, generator=generator(0))
    assert torch.equal(draw(pipe, latents=noise, generator=None), draw(pipe, seed=0))


def test_callbacks_see_and_change_the_latents_and_can_stop(pipe):
    seen = []

    def callback(pipe, step, timestep, tensors):
        seen.append((step, int(timestep), sorted(tensors)))
        return {"latents": torch.zeros_like(tensors["latents"])}

    assert not draw(pipe, output_type="latent", callback_on_step_end=callback).any()
    assert seen == [(i, int(t), ["latents"]) for i, t in enumerate(pipe.scheduler.timesteps)]

    class Stop(PipelineCallback):
        tensor_inputs = ["latents"]

        def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
            seen.append(step_index)
            pipeline._interrupt = True
            return callback_kwargs

    seen.clear()
    stop = Stop(cutoff_step_ratio=None, cutoff_step_index=0)
    assert draw(pipe, output_type="latent", callback_on_step_end=stop).isfinite().all()
    assert seen == [0]


def test_latents_that_are_not_finite_raise_and_name_the_step():
    pipe = pipeline()
    spoil = {"latents": torch.full((1, 4, 8, 8), float("nan"))}
    with pytest.raises(FloatingPointError, match="after step 3 of 3"):
        draw(pipe, callback_on_step_end=lambda pipe, step, *_: spoil if step == 2 else {})
    with torch.no_grad():
        pipe.transformer.proj_out_2.weight[0] = float("inf")
    with pytest.raises(FloatingPointError, match="after step 1 of 3") as caught:
        draw(pipe)
    assert "\n" not in str(caught.value)


BAD_CALLS = [
    ({"class_labels": [-1]}, "class label -1: give a name or a number from 0 to 9"),
    ({"class_labels": [11]}, "class label 11: give a name"),
    ({"class_labels": [1.0]}, "class label 1.0"),
    ({"class_labels": [True]}, "class label True"),
    ({"class_labels": None}, "class label None"),
    ({"class_labels": []}, "class_labels is empty"),
    ({"class_labels": "wite shark"}, "'wite shark' is not known: did you mean 'white shark'"),
    ({"class_labels": ["umbrella", "qq"]}, "'qq' is not known: did you mean"),
    ({"height": 15}, "height=15 is not a multiple of 4: use 12 or 16"),
    ({"width": 2}, "width=2 is not a multiple of 4: use 4"),
    ({"width": 16.0}, "width=16.0: give an integer"),
    ({"num_inference_steps": 0}, "num_inference_steps=0: give an integer of at least 1"),
    ({"num_inference_steps": 1001}, "num_inference_steps=1001: the scheduler has 1000"),
    ({"guidance_scale": float("nan")}, "guidance_scale=nan"),
    ({"guidance_scale": -1}, "guidance_scale=-1"),
    ({"eta": -0.5}, "eta=-0.5"),
    ({"eta": 1.5}, "eta=1.5: give a number from 0"),
    ({"output_type": "jpeg"}, "output_type='jpeg': choose one of pil, np, pt, latent"),
    ({"generator": [generator(0), generator(1)]}, "generator has 2 entries for 1 picture"),
    ({"generator": 7}, "give a torch.Generator"),
    (
        {"latents": torch.zeros(1, 4, 8, 9)},
        r"latents have shape \(1, 4, 8, 9\), this call needs \(1, 4, 8, 8\)",
    ),
    ({"latents": 5}, r"latents have the type int, this call needs \(1, 4, 8, 8\)"),
    ({"callback_on_step_end_tensor_inputs": ["noise"]}, "choose among"),
    ({"callback_on_step_end": 5}, "callback_on_step_end=5: give a function"),
    ({"attention_kwargs": 0.5}, "attention_kwargs=0.5: give a dict"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS, ids=[message[:40] for _, message in BAD_CALLS])
def test_a_call_that_cannot_work_is_refused_in_one_line_before_anything_runs(pipe, arguments, message):
    ran = []
    handle = pipe.transformer.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with pytest.raises(ValueError, match=message) as caught:
            pipe(**({"class_labels": [1]} | arguments))
    finally:
        handle.remove()
    assert "\n" not in str(caught.value)
    assert not ran


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="no label names, give class numbers from 0 to 9"):
        pipeline(id2label=None)("goldfish")
    for channels in (0, 5, 1.5):
        with pytest.raises(ValueError, match="guidance_channels="):
            pipeline(guidance_channels=channels)
    with pytest.raises(ValueError, match="draws with a DiT, got a SanaTransformer2DModel"):
        pipeline(tiny_sana.stock_transformer())
    for labels in ([1], {0: 5}, {"a": "x"}, {99: "x"}, {-1: "x"}, {0: ""}, {0: "a,,b"}, {0.5: "x"}):
        with pytest.raises(ValueError, match="id2label") as caught:
            pipeline(id2label=labels)
        assert "\n" not in str(caught.value)
    for defaults in ({"default_steps": 0}, {"default_steps": "5"}, {"default_guidance_scale": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(defaults))}="):
            pipeline(**defaults)
    fixed = pipeline(stock_transformer(out_channels=4))
    fixed.scheduler = dit_scheduler("ddpm")
    with pytest.raises(ValueError, match="predicts no variances"):
        fixed(1)
    with pytest.raises(ValueError, match="choose one of ddim, ddpm, dpm-solver"):
        dit_scheduler("ddpm-250")


def test_a_folder_in_the_original_layout_is_refused_in_one_line(tmp_path):
    torch.save({"x_embedder.proj.weight": torch.zeros(1)}, tmp_path / "DiT-XL-2-256x256.pt")
    with pytest.raises(ValueError, match="original layout") as caught:
        MHLADiTPipeline.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
