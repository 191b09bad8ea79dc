"""MHLASanaPipeline: saved defaults, batches equal to single runs, faults named before anything runs."""

import json

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, SanaPipeline
from diffusers.callbacks import PipelineCallback
from model_checks import close
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from random_lora import save_random_lora
from tiny_sana import components, generator, stock_pipeline, stock_transformer

from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

DEFAULTS = {"default_steps": 3, "default_guidance_scale": 3.0, "max_sequence_length": 8}


def pipeline(**defaults) -> MHLASanaPipeline:
    pipe = MHLASanaPipeline(**components(convert(stock_transformer())), **(DEFAULTS | defaults))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pipe() -> MHLASanaPipeline:
    return pipeline()


def draw(pipe: DiffusionPipeline, prompt="a red apple", seed: int = 0, **arguments) -> torch.Tensor:
    arguments = {"generator": generator(seed), "output_type": "pt"} | arguments
    return pipe(prompt, **arguments).images


def test_a_saved_pipeline_just_draws_with_its_own_defaults(tmp_path):
    saved = pipeline(
        default_height=24,
        default_width=40,
        default_negative_prompt="blue",
        complex_human_instruction=["an emoji", "of "],
    )
    saved.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["_class_name"] == "MHLASanaPipeline"
    assert index["transformer"] == ["mhla_diffusion", "MHLASanaTransformer2DModel"]
    assert index["complex_human_instruction"] == "an emoji\nof "  # a list would be taken for a component
    assert index["default_steps"] == 3 and index["use_resolution_binning"] is False

    again = MHLASanaPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    image = again("a red apple", generator=generator(0)).images[0]
    assert image.size == (40, 24)
    assert again.num_timesteps == 3 and again.guidance_scale == 3.0
    spelled_out = draw(
        pipeline(),
        height=24,
        width=40,
        negative_prompt="blue",
        complex_human_instruction=["an emoji", "of "],
    )
    assert close(draw(again), spelled_out)
    assert np.abs(np.asarray(image) - spelled_out[0].permute(1, 2, 0).numpy() * 255).max() < 0.51
    unguided = draw(again, guidance_scale=1.0, num_inference_steps=2, complex_human_instruction="")
    assert again.num_timesteps == 2
    plain = draw(pipeline(), guidance_scale=1.0, num_inference_steps=2, height=24, width=40)
    assert close(unguided, plain) and not close(unguided, spelled_out)


def test_the_default_size_is_the_one_the_transformer_was_made_for(pipe):
    assert pipe.default_size == (32, 32) and pipe.size_multiple == 4
    assert draw(pipe).shape == (1, 3, 32, 32)


def test_the_stock_pipeline_loads_our_transformer_through_diffusers(tmp_path):
    stock = stock_pipeline(convert(stock_transformer()))
    stock.save_pretrained(tmp_path)
    again = DiffusionPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert type(again) is SanaPipeline
    arguments = {"height": 32, "width": 32, "use_resolution_binning": False, "num_inference_steps": 2}
    assert close(draw(again, **arguments), draw(stock, **arguments))
    # The same components, called the same way, draw the same picture in our pipeline.
    ours = MHLASanaPipeline(**again.components)
    ours.set_progress_bar_config(disable=True)
    lines = ["a", "red"]
    expected = draw(stock, **arguments, complex_human_instruction=lines)
    assert torch.equal(draw(ours, **arguments, complex_human_instruction=lines), expected)


def test_it_is_made_from_a_stock_pipeline_with_either_transformer():
    for transformer in (stock_transformer(), convert(stock_transformer())):
        stock = stock_pipeline(transformer)
        ours = MHLASanaPipeline.from_pipe(stock, default_steps=2)
        assert ours.transformer is transformer and ours.vae is stock.vae and ours.config.default_steps == 2
        # What the stock pipeline puts before a prompt by default, ours made from it does too.
        arguments = {"height": 32, "width": 32, "num_inference_steps": 2}
        expected = draw(stock, **arguments, use_resolution_binning=False)
        assert torch.equal(draw(ours, **arguments), expected)
        assert not torch.equal(draw(ours, **arguments, complex_human_instruction=""), expected)
    assert MHLASanaPipeline.from_pipe(ours, default_steps=3).config.complex_human_instruction
    stock = stock_pipeline(stock_transformer(sample_size=16))
    assert MHLASanaPipeline.from_pipe(stock).config.use_resolution_binning
    assert not MHLASanaPipeline.from_pipe(stock, use_resolution_binning=False).config.use_resolution_binning


def test_item_i_of_a_batch_equals_its_single_run(pipe):
    prompts = ["a red apple", "an emoji of a whale on green", "two"]
    negatives = ["blue", "", "flat apple"]
    batch = draw(
        pipe,
        prompts,
        negative_prompt=negatives,
        num_images_per_prompt=2,
        generator=[generator(seed) for seed in range(6)],
    )
    assert batch.shape == (6, 3, 32, 32)
    for i in range(6):
        single = draw(pipe, prompts[i // 2], seed=i, negative_prompt=negatives[i // 2])
        assert close(batch[i], single[0])
    assert not close(batch[0], batch[1])  # the same prompt, another seed
    one_negative = draw(pipe, prompts[:2], negative_prompt="blue", generator=[generator(0), generator(1)])
    assert close(one_negative[1], draw(pipe, prompts[1], seed=1, negative_prompt="blue")[0])


def test_masks_are_repeated_in_the_order_of_the_embeddings(pipe):
    embeds, mask, negative, negative_mask = pipe.encode_prompt(
        ["a", "a red apple on a whale"], True, "", 2, max_sequence_length=8
    )
    assert embeds.shape[0] == mask.shape[0] == negative.shape[0] == negative_mask.shape[0] == 4
    assert mask.sum(1).tolist() == [2, 2, 7, 7]
    assert torch.equal(embeds[0], embeds[1]) and not torch.equal(embeds[1], embeds[2])


def test_embeddings_in_place_of_prompts(pipe):
    embeds, mask, negative, negative_mask = pipe.encode_prompt(["a whale", "two"], max_sequence_length=8)
    generators = [generator(0), generator(1)]
    expected = draw(pipe, ["a whale", "two"], generator=generators)
    generators = [generator(0), generator(1)]
    given = {"prompt_embeds": embeds, "prompt_attention_mask": mask, "generator": generators}
    assert torch.equal(draw(pipe, None, **given), expected)
    given["generator"] = [generator(0), generator(1)]
    given |= {"negative_prompt_embeds": negative, "negative_prompt_attention_mask": negative_mask}
    assert torch.equal(draw(pipe, None, **given), expected)


def test_a_pipeline_without_a_text_encoder_draws_from_embeddings(pipe):
    embeds, mask, negative, negative_mask = pipe.encode_prompt("a whale", max_sequence_length=8)
    given = {"prompt_embeds": embeds, "prompt_attention_mask": mask}
    both = given | {"negative_prompt_embeds": negative, "negative_prompt_attention_mask": negative_mask}
    bare = MHLASanaPipeline(**pipe.components | {"text_encoder": None, "tokenizer": None}, **DEFAULTS)
    bare.set_progress_bar_config(disable=True)
    assert torch.equal(draw(bare, None, **both), draw(pipe, "a whale"))
    with pytest.raises(ValueError, match="give them, or guidance_scale=1.0"):
        draw(bare, None, **given)
    assert torch.equal(
        draw(bare, None, **given, guidance_scale=1.0), draw(pipe, "a whale", guidance_scale=1.0)
    )
    with pytest.raises(ValueError, match="no text encoder, give prompt_embeds"):
        draw(bare, "a whale", guidance_scale=1.0)


def test_every_output_type(pipe):
    image = draw(pipe, output_type="pil")[0]
    array = draw(pipe, output_type="np")
    tensor = draw(pipe)
    latents = draw(pipe, output_type="latent")
    assert image.size == (32, 32) and image.mode == "RGB"
    assert array.shape == (1, 32, 32, 3) and 0 <= array.min() and array.max() <= 1
    assert np.allclose(array, tensor.permute(0, 2, 3, 1).numpy())
    assert latents.shape == (1, 4, 8, 8)
    assert torch.equal(
        pipe("a red apple", generator=generator(0), output_type="pt", return_dict=False)[0], tensor
    )


def test_latents_given_are_the_noise_that_is_used(pipe):
    noise = torch.randn(1, 4, 8, 8, generator=generator(0))
    assert torch.equal(draw(pipe, latents=noise, generator=None), draw(pipe, seed=0))


def test_callbacks_see_and_change_the_latents(pipe):
    seen = []

    def callback(pipe, step, timestep, tensors):
        seen.append((step, sorted(tensors)))
        return {"latents": torch.zeros_like(tensors["latents"])} if "latents" in tensors else {}

    latents = draw(pipe, output_type="latent", callback_on_step_end=callback)
    assert seen == [(step, ["latents"]) for step in range(3)] and not latents.any()
    seen.clear()
    only = ["prompt_embeds"]
    draw(pipe, callback_on_step_end=callback, callback_on_step_end_tensor_inputs=only)
    assert seen == [(step, only) for step in range(3)]

    class Stop(PipelineCallback):
        tensor_inputs = ["latents"]

        def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
            seen.append(step_index)
            pipeline._interrupt = True
            return callback_kwargs

    seen.clear()
    stopped = draw(
        pipe, output_type="latent", callback_on_step_end=Stop(cutoff_step_ratio=None, cutoff_step_index=0)
    )
    assert seen == [0] and stopped.isfinite().all()


def test_latents_that_are_not_finite_raise_and_name_the_step():
    pipe = pipeline()

    def spoil(pipe, step, timestep, tensors):
        return {"latents": tensors["latents"] * float("nan")} if step == spoilt else {}

    for spoilt in (0, 2):  # the last step's latents are those that are decoded
        with pytest.raises(FloatingPointError, match=f"after step {spoilt + 1} of 3") as caught:
            draw(pipe, callback_on_step_end=spoil)
        assert "\n" not in str(caught.value)
    with torch.no_grad():
        pipe.transformer.proj_out.weight[0] = float("inf")
    with pytest.raises(FloatingPointError, match="after step 1 of 3"):
        draw(pipe, output_type="latent")


def test_resolution_binning_maps_any_size_and_resizes_back():
    transformer = convert(stock_transformer(sample_size=16), block_grid=(2, 2))
    pipe = MHLASanaPipeline(**components(transformer), **DEFAULTS, use_resolution_binning=True)
    pipe.set_progress_bar_config(disable=True)
    image = draw(pipe, output_type="pil", height=50, width=99, num_inference_steps=1, guidance_scale=1)[0]
    assert image.size == (99, 50)


def test_a_lora_is_loaded_switched_and_saved_with_the_stock_methods(tmp_path):
    save_random_lora(pipeline(), tmp_path)
    pipe = pipeline()
    before = draw(pipe)
    pipe.load_lora_weights(tmp_path, adapter_name="style")
    after = draw(pipe)
    assert not close(after, before)
    pipe.set_adapters(["style"], [0.0])
    assert close(draw(pipe), before)
    pipe.unload_lora_weights()
    assert torch.equal(draw(pipe), before)


BAD_CALLS = [
    ({"height": 30}, "height=30 is not a multiple of 4: use 28 or 32"),
    ({"width": 3}, "width=3 is not a multiple of 4: use 4"),
    ({"height": 0}, "height=0: give an integer of at least 1"),
    ({"width": 32.0}, "width=32.0: give an integer"),
    ({"num_inference_steps": 0}, "num_inference_steps=0: give an integer of at least 1"),
    ({"num_inference_steps": -5}, "num_inference_steps=-5"),
    ({"num_inference_steps": True}, "num_inference_steps=True"),
    ({"guidance_scale": float("nan")}, "guidance_scale=nan: give a finite number"),
    ({"guidance_scale": float("inf")}, "guidance_scale=inf"),
    ({"guidance_scale": -1}, "guidance_scale=-1: give a finite number of at least 0"),
    ({"guidance_scale": "4"}, "guidance_scale='4'"),
    ({"num_images_per_prompt": 0}, "num_images_per_prompt=0"),
    ({"max_sequence_length": 0}, "max_sequence_length=0"),
    ({"prompt": []}, "prompt=.*non-empty list of strings"),
    ({"prompt": ["a", 3]}, "prompt=.*non-empty list of strings"),
    ({"prompt": ("a", "b")}, "prompt=.*non-empty list of strings"),
    ({"prompt": None}, "either prompt or prompt_embeds"),
    ({"prompt": ["a", "b"], "negative_prompt": ["c"]}, "negative_prompt has 1 entries for 2 prompt"),
    ({"negative_prompt": 3}, "negative_prompt=3"),
    ({"generator": [generator(0), generator(1)]}, "generator has 2 entries for 1 picture"),
    ({"prompt": ["a", "b"], "generator": [generator(0)]}, "generator has 1 entries for 2 picture"),
    ({"generator": 7}, "give a torch.Generator"),
    (
        {"latents": torch.zeros(1, 4, 8, 9)},
        r"latents have shape \(1, 4, 8, 9\), this call needs \(1, 4, 8, 8\)",
    ),
    ({"output_type": "jpeg"}, "output_type='jpeg': choose one of pil, np, pt, latent"),
    ({"use_resolution_binning": True}, "this transformer has 8: pass use_resolution_binning=False"),
    ({"latents": 5}, r"latents have the type int, this call needs \(1, 4, 8, 8\)"),
    ({"callback_on_step_end_tensor_inputs": ["noise"]}, "choose among"),
    ({"callback_on_step_end": 5}, "callback_on_step_end=5: give a function"),
    ({"attention_kwargs": 0.5}, "attention_kwargs=0.5: give a dict"),
    ({"complex_human_instruction": [5]}, r"complex_human_instruction=\[5\]: give a string"),
    ({"prompt_embeds": torch.zeros(1, 8, 16)}, "either prompt or prompt_embeds"),
    ({"prompt": None, "prompt_embeds": torch.zeros(1, 8, 16)}, "need a prompt_attention_mask of shape"),
    (
        {"prompt": None, "prompt_embeds": torch.zeros(1, 5, 16), "prompt_attention_mask": torch.ones(1, 5)},
        "pass max_sequence_length=5",
    ),
    (
        {"negative_prompt_embeds": torch.zeros(1, 8, 16), "negative_prompt_attention_mask": torch.ones(1, 8)},
        "negative_prompt_embeds go with prompt_embeds",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS, ids=[message[:40] for _, message in BAD_CALLS])
def test_a_call_that_cannot_work_is_refused_in_one_line_before_anything_runs(pipe, arguments, message):
    ran = []
    handles = [
        part.register_forward_pre_hook(lambda *_: ran.append(1))
        for part in (pipe.text_encoder, pipe.transformer)
    ]
    try:
        with pytest.raises(ValueError, match=message) as caught:
            pipe(**({"prompt": "a red apple"} | arguments))
    finally:
        for handle in handles:
            handle.remove()
    assert "\n" not in str(caught.value)
    assert not ran


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload", "group"])
def test_offloading_draws_the_same_picture_and_takes_a_lora_in_any_order(offload, tmp_path):
    trained = pipeline().transformer
    trained.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"]))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=generator(7))
    MHLASanaPipeline.save_lora_weights(tmp_path, transformer_lora_layers=get_peft_model_state_dict(trained))

    def offloaded(lora_first: bool) -> MHLASanaPipeline:
        pipe = pipeline()
        steps = [lambda: pipe.load_lora_weights(tmp_path), lambda: offload_to_cpu(pipe, offload)]
        for step in steps if lora_first else reversed(steps):
            step()
        return pipe

    plain = pipeline()
    plain.load_lora_weights(tmp_path)
    expected = draw(plain.to("cuda"), output_type="latent").cpu()
    for lora_first in (True, False):
        latents = draw(offloaded(lora_first), output_type="latent").cpu()
        assert ((latents - expected).norm() / expected.norm()) < 1e-4


def offload_to_cpu(pipe: MHLASanaPipeline, how: str) -> None:
    if how != "group":
        getattr(pipe, how)()
        return
    pipe.text_encoder.to("cuda")
    pipe.vae.to("cuda")
    devices = {"onload_device": torch.device("cuda"), "offload_device": torch.device("cpu")}
    pipe.transformer.enable_group_offload(**devices, offload_type="leaf_level")


@pytest.mark.gpu
def test_half_precision_on_the_gpu_stays_close_to_float32_on_the_cpu():
    expected = draw(pipeline(), output_type="latent")
    for dtype in (torch.bfloat16, torch.float16):
        latents = draw(pipeline().to("cuda", dtype), output_type="latent").cpu()
        assert ((latents - expected).norm() / expected.norm()) < 0.05
