"""MHLAWanPipeline: stock Wan's videos, defaults kept, sizes and frames by rule, faults named before they cost time."""

import json
import logging
import warnings

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, UniPCMultistepScheduler, WanPipeline
from model_checks import close, stirred
from tiny_wan import TEXT_WIDTH, model, stock_transformer
from tiny_wan_pipeline import CHANNELS, components, generator, stock_pipeline

from mhla_diffusion import convert, load_pipeline
from mhla_diffusion.models.wan import MHLAWanTransformer3DModel
from mhla_diffusion.pipelines.wan import MHLAWanPipeline

SIZE = {"height": 32, "width": 48, "num_frames": 5}


def pipeline(
    transformer: torch.nn.Module | None = None, parts: dict | None = None, **options
) -> MHLAWanPipeline:
    options = {
        "default_steps": 2,
        "default_height": 32,
        "default_width": 48,
        "default_frames": 5,
        "max_sequence_length": 8,
    } | options
    pipe = MHLAWanPipeline(**(components(transformer) | (parts or {})), **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pipe() -> MHLAWanPipeline:
    return pipeline()


def make(pipe: DiffusionPipeline, prompt="a red apple", seed: int = 0, **arguments) -> torch.Tensor:
    arguments = {"generator": generator(seed), "output_type": "pt"} | arguments
    return pipe(prompt, **arguments).frames


def captions(count: int = 1, seed: int = 3) -> torch.Tensor:
    return torch.randn(count, 6, TEXT_WIDTH, generator=generator(seed))


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("guidance", [5.0, 1.0])
@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
def test_with_a_stock_transformer_it_is_the_stock_pipeline_bit_for_bit(scheduler, guidance):
    stock, ours = stock_pipeline(), pipeline(stirred(stock_transformer()))
    if scheduler == "unipc":
        for each in (stock, ours):
            each.scheduler = UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
            )
    settings = {"num_inference_steps": 3, "guidance_scale": guidance, "max_sequence_length": 8, **SIZE}
    prompts, negative = ["a red apple", "two"], "green"
    expected = make(stock, prompts, negative_prompt=negative, **settings)
    assert torch.equal(make(ours, prompts, negative_prompt=negative, **settings), expected)
    assert expected.shape == (2, 5, 3, 32, 48)


def test_a_saved_pipeline_makes_videos_with_its_own_settings(tmp_path):
    saved = pipeline(
        default_guidance_scale=2.0, default_fps=8, default_negative_prompt="green", expand_timesteps=True
    )
    saved.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == "MHLAWanPipeline"
    assert index["transformer"] == ["mhla_diffusion", "MHLAWanTransformer3DModel"]
    expected = make(saved)
    assert expected.shape == (1, 5, 3, 32, 48)
    for again in (MHLAWanPipeline.from_pretrained(tmp_path), load_pipeline(tmp_path)):
        again.set_progress_bar_config(disable=True)
        assert type(again) is MHLAWanPipeline and again.fps == 8 and again.config.expand_timesteps
        assert close(make(again), expected)
        assert again.num_timesteps == 2 and again.guidance_scale == 2.0
    explicit = make(saved, num_inference_steps=2, guidance_scale=2.0, negative_prompt="green", **SIZE)
    assert torch.equal(explicit, expected)
    assert not torch.equal(make(saved, negative_prompt="blue"), expected)


def test_whole_numbers_are_rates_and_scales_without_a_word_and_others_are_refused(
    tmp_path, caplog, monkeypatch
):
    pipeline(default_guidance_scale=3, default_fps=24).save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    assert load_pipeline(tmp_path).fps == 24
    assert "Expected types" not in caplog.text
    for default, told in (
        ({"default_steps": 0}, "default_steps=0: give an integer"),
        ({"default_frames": 8.5}, "default_frames=8.5: give an integer"),
        ({"default_height": "32"}, "default_height='32': give an integer"),
        ({"default_fps": 0}, "fps is 0: give the frames of a second"),
    ):
        with pytest.raises(ValueError, match=told):
            pipeline(**default)


def test_the_stock_pipeline_loads_our_transformer_and_ours_takes_its_parts(tmp_path):
    stock = stock_pipeline(stirred(model()))
    stock.save_pretrained(tmp_path)
    again = DiffusionPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert type(again) is WanPipeline and type(again.transformer) is MHLAWanTransformer3DModel
    settings = {"num_inference_steps": 2, "max_sequence_length": 8, **SIZE}
    expected = make(stock, **settings)
    assert close(make(again, **settings), expected)
    ours = MHLAWanPipeline.from_pipe(again)
    ours.set_progress_bar_config(disable=True)
    assert ours.transformer is again.transformer
    assert close(make(ours, **settings), expected)


def test_an_index_that_names_the_stock_model_for_our_weights_is_refused(tmp_path):
    pipeline().save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["transformer"] = ["diffusers", "WanTransformer3DModel"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="would drop") as caught:
        MHLAWanPipeline.from_pretrained(tmp_path)
    one_line(caught)


def test_a_folder_in_wans_own_layout_is_told_apart(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "WanModel", "dim": 24}))
    (tmp_path / "diffusion_pytorch_model.safetensors").touch()
    with pytest.raises(ValueError, match="in its original layout .*`mhla convert ") as caught:
        MHLAWanPipeline.from_pretrained(tmp_path)
    one_line(caught)


def test_video_i_of_a_batch_equals_its_single_run_and_prompts_come_first(pipe):
    prompts = ["a red apple", "two", "blue whale on green"]
    generators = [generator(seed) for seed in range(6)]
    batch = make(pipe, prompts, negative_prompt="green", num_videos_per_prompt=2, generator=generators)
    assert batch.shape[0] == 6
    for index in range(6):
        assert close(batch[index], make(pipe, prompts[index // 2], negative_prompt="green", seed=index)[0])
        assert all(not close(batch[index], batch[other]) for other in range(index))


def test_given_embeddings_serve_several_videos_of_each_prompt(pipe):
    embeds = {"prompt_embeds": captions(2), "negative_prompt_embeds": captions(2, seed=4)}
    batch = make(
        pipe, None, num_videos_per_prompt=3, generator=[generator(seed) for seed in range(6)], **embeds
    )
    for index in (0, 2, 3, 5):
        mine = {name: x[index // 3 : index // 3 + 1] for name, x in embeds.items()}
        assert close(batch[index], make(pipe, None, seed=index, **mine)[0])


@pytest.mark.parametrize(("frames", "near"), [(80, "77 or 81"), (4, "1 or 5"), (15, "13 or 17")])
def test_frame_counts_that_no_video_has_are_refused_with_the_nearest(pipe, frames, near):
    with pytest.raises(
        ValueError, match=f"num_frames={frames} is not a multiple of 4 and one: use {near}"
    ) as caught:
        pipe("a", num_frames=frames)
    one_line(caught)


def test_sizes_are_rounded_down_and_the_warning_names_them(pipe):
    with pytest.warns(
        UserWarning, match=r"height=40 is rounded down to 32, a multiple of 16 \(the next one is 48\)"
    ):
        rounded = make(pipe, height=40, num_frames=1)
    with pytest.warns(UserWarning, match="width=63 is rounded down to 48") as seen:
        assert torch.equal(make(pipe, width=63, num_frames=1), rounded)
    assert seen[0].filename == __file__ and rounded.shape == (1, 1, 3, 32, 48)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make(pipe, height=48, width=32, num_frames=9).shape == (1, 9, 3, 48, 32)


def test_wans_own_sizes_make_latents_of_every_length():
    big = pipeline(stirred(model(mhla_block_grid=(3, 5, 10), rope_max_seq_len=128)), default_steps=1)
    for height, width, frames in ((480, 832, 81), (832, 480, 33), (720, 1280, 17), (704, 1280, 1)):
        size = {"height": height, "width": width, "num_frames": frames}
        made = make(big, guidance_scale=1.0, output_type="latent", **size)
        assert (
            made.shape == (1, CHANNELS, (frames + 3) // 4, height // 8, width // 8) and made.isfinite().all()
        )


def test_wan_22_with_a_timestep_for_each_token(pipe):
    per_token = pipeline(pipe.transformer, expand_timesteps=True)
    assert close(make(per_token), make(pipe))


def test_two_experts_share_the_steps():
    second = stirred(convert(stock_transformer(seed=1), block_grid=(2, 2, 3)), seed=6)
    parts = {"transformer_2": second}
    both = pipeline(None, parts, boundary_ratio=0.9, default_steps=3)
    assert [both.expert(torch.tensor(t))[0] for t in (950.0, 900.0, 899.0)] == [
        "transformer", "transformer", "transformer_2",
    ]  # fmt: skip
    made = make(both)
    stock = WanPipeline(**both.components, boundary_ratio=0.9)
    stock.set_progress_bar_config(disable=True)
    settings = {"num_inference_steps": 3, "max_sequence_length": 8, "negative_prompt": "", **SIZE}
    assert torch.equal(make(stock, **settings), made)
    assert not torch.equal(make(both, guidance_scale_2=1.5), made)
    with pytest.raises(ValueError, match="has no transformer_2"):
        pipeline(boundary_ratio=0.9)("a")


def test_callbacks_see_and_change_the_tensors_they_ask_for(pipe):
    seen = []

    def callback(pipe, step, timestep, tensors):
        seen.append((step, sorted(tensors)))
        return {"latents": tensors["latents"] * 0} if step == 1 else None

    names = ["latents", "prompt_embeds"]
    made = make(
        pipe, output_type="latent", callback_on_step_end=callback, callback_on_step_end_tensor_inputs=names
    )
    assert seen == [(0, names), (1, names)] and made.shape == (1, CHANNELS, 2, 4, 6) and not made.any()


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("output_type", ["latent", "np"])
def test_a_callback_that_returns_values_that_are_not_finite_is_named(pipe, at, output_type):
    def callback(pipe, step, timestep, tensors):
        return {"latents": tensors["latents"] / 0} if step == at else None

    told = f"after step {at + 1} of 2, as callback_on_step_end returned them: check what it returns"
    with pytest.raises(FloatingPointError, match=told) as caught:
        make(pipe, output_type=output_type, callback_on_step_end=callback)
    one_line(caught)


def test_given_noise_and_every_kind_of_output(pipe):
    noise = torch.randn(1, CHANNELS, 2, 4, 6, generator=generator(0))
    frames = make(pipe, latents=noise)
    assert torch.equal(frames, make(pipe, seed=0))
    arrays = pipe("a red apple", latents=noise).frames
    assert torch.equal(torch.from_numpy(arrays).permute(0, 1, 4, 2, 3), frames)
    pictures = pipe("a red apple", latents=noise, output_type="pil", return_dict=False)[0]
    assert len(pictures) == 1 and len(pictures[0]) == 5 and pictures[0][0].size == (48, 32)


def broken(at: str) -> MHLAWanPipeline:
    """A pipeline one of whose weights is infinite."""
    pipe = pipeline(stirred(model(num_layers=3)))
    with torch.no_grad():
        dict(pipe.transformer.named_parameters())[at].view(-1)[0] = float("inf")
    return pipe


@pytest.mark.parametrize(
    ("at", "layer"),
    [
        ("patch_embedding.bias", "patch_embedding"),
        ("blocks.1.attn1.to_v.bias", "blocks.1"),
        ("proj_out.bias", "proj_out"),
    ],
)
def test_latents_that_are_not_finite_raise_with_step_and_layer(at, layer):
    pipe = broken(at)
    with pytest.raises(
        FloatingPointError, match=rf"after step 1 of 2, first in transformer\.{layer}: "
    ) as caught:
        make(pipe)
    one_line(caught)
    assert not pipe.transformer.blocks[0]._forward_hooks


def test_the_second_expert_and_later_steps_are_named():
    second = broken("blocks.2.ffn.net.2.bias").transformer
    pipe = pipeline(
        None, {"transformer_2": second}, boundary_ratio=0.9, default_steps=4, expand_timesteps=True
    )
    with pytest.raises(FloatingPointError, match=r"after step [234] of 4, first in transformer_2\.blocks\.2"):
        make(pipe)


def test_captions_and_decoders_that_are_not_finite_are_told_apart(pipe):
    bad = captions()
    bad[0, 0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="and so are the embeddings of the prompt"):
        make(pipe, None, prompt_embeds=bad, guidance_scale=1.0)
    decoder = pipeline(pipe.transformer)
    with torch.no_grad():
        decoder.vae.post_quant_conv.bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="the decoder"):
        make(decoder)
    assert make(decoder, output_type="latent").isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"prompt": None}, "give either prompt or prompt_embeds"),
        ({"prompt": []}, "give a string or a non-empty list"),
        ({"prompt": "a", "negative_prompt": ["b", "c"]}, "negative_prompt has 2 entries for 1"),
        ({"prompt": "a", "num_inference_steps": 0}, "num_inference_steps=0: give an integer of at least 1"),
        ({"prompt": "a", "num_inference_steps": 1001}, "the scheduler has 1000"),
        ({"prompt": "a", "guidance_scale": float("nan")}, "guidance_scale=nan: give a finite number"),
        ({"prompt": "a", "guidance_scale_2": 3.0}, "guidance_scale_2 is for pipelines of two experts"),
        ({"prompt": "a", "num_frames": 0}, "num_frames=0: give an integer of at least 1"),
        ({"prompt": "a", "height": 15}, "height=15 is smaller than 16"),
        ({"prompt": "a", "width": 48.0}, "width=48.0: give an integer"),
        ({"prompt": "a", "height": 2048}, "128 rows of tokens, but the rotary table holds 64"),
        ({"prompt": "a", "output_type": "mp4"}, "output_type='mp4': choose one of"),
        ({"prompt": "a", "generator": [1]}, "give a torch.Generator"),
        ({"prompt": "a", "generator": [torch.Generator()] * 2}, "generator has 2 entries for 1 video"),
        ({"prompt": "a", "latents": torch.zeros(1, 4, 5, 4, 6)}, r"this call needs \(1, 4, 2, 4, 6\)"),
        (
            {"prompt": "a", "latents": torch.full((1, 4, 2, 4, 6), float("inf"))},
            "latents hold infinite values or NaN: give finite ones",
        ),
        ({"prompt_embeds": torch.zeros(1, 6, 5)}, r"here \(1, any, 12\)"),
        ({"prompt_embeds": [[0.0] * 12]}, "prompt_embeds have the type list: give a tensor"),
        (
            {"prompt_embeds": torch.zeros(1, 6, 12), "negative_prompt_embeds": np.zeros((1, 6, 12))},
            "negative_prompt_embeds have the type ndarray",
        ),
        ({"prompt": "a", "attention_kwargs": 0.5}, "attention_kwargs=0.5: give a dict"),
        ({"prompt": "a", "callback_on_step_end_tensor_inputs": ["x"]}, "choose among"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(pipe, arguments, told):
    with pytest.raises(ValueError, match=told) as caught:
        pipe(**arguments)
    one_line(caught)


def test_guidance_without_a_text_encoder_needs_negative_embeddings(pipe):
    bare = pipeline(pipe.transformer, {"text_encoder": None, "tokenizer": None})
    with pytest.raises(ValueError, match="give them, or guidance_scale=1.0"):
        make(bare, None, prompt_embeds=captions(), guidance_scale=5.0)
    with pytest.raises(ValueError, match="no text encoder, give prompt_embeds"):
        make(bare, "a", guidance_scale=1.0)
    assert make(bare, None, prompt_embeds=captions(), guidance_scale=1.0).isfinite().all()
