"""Diffusers' other Wan pipelines with our transformer: images and videos to video, experts, modular ones."""

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, ModularPipeline, WanImageToVideoPipeline, WanVideoToVideoPipeline
from model_checks import stirred
from PIL import Image
from tiny_wan import FIRST_LAST_FRAME, IMAGE_TO_VIDEO, model, stock_transformer
from tiny_wan_pipeline import (
    CHANNELS,
    components,
    generator,
    image_encoder,
    image_processor,
    stock_pipeline,
)

from mhla_diffusion import convert
from mhla_diffusion.models.wan import MHLAWanTransformer3DModel
from mhla_diffusion.pipelines.checks import FiniteWatch
from mhla_diffusion.pipelines.wan import MHLAWanPipeline

SIZE = {"height": 32, "width": 48}
# What the transformer is given besides its latents: a mask of four frames to a latent, and the latents of the image.
SEEN = {"in_channels": CHANNELS + 4 + CHANNELS}
# Kinds of image to video: what the transformer has, what the pipeline is told, and with which inputs it is called.
KINDS = {
    "Wan 2.1": (IMAGE_TO_VIDEO | SEEN, {}, {}),
    "first and last frame": (FIRST_LAST_FRAME | SEEN, {}, {"last_image": True}),
    "Wan 2.2 without image encoder": (SEEN, {"image_encoder": None}, {}),
    "TI2V": ({}, {"image_encoder": None, "expand_timesteps": True}, {}),
}


def picture(seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 255, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((48, 32))


def quiet(pipe: DiffusionPipeline) -> DiffusionPipeline:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def from_image(kind: str, convert_to=None, **more) -> WanImageToVideoPipeline:
    options, told, _ = KINDS[kind]
    transformer = stirred(stock_transformer(**options))
    if convert_to is not None:
        transformer = convert(transformer, block_grid=convert_to)
    parts = components(transformer) | {"image_encoder": image_encoder(), "image_processor": image_processor()}
    return quiet(WanImageToVideoPipeline(**(parts | told | more)))


def animate(kind: str, pipe, seeds=(0,), **arguments) -> torch.Tensor:
    inputs = {"last_image": picture(1)} if KINDS[kind][2] else {}
    return pipe(
        picture(),
        num_frames=9,
        num_inference_steps=2,
        generator=[generator(seed) for seed in seeds],
        output_type="pt",
        **({"prompt": ["a red apple"] * len(seeds)} | SIZE | inputs | arguments),
    ).frames


@pytest.mark.parametrize("kind", KINDS)
def test_images_become_videos_and_a_saved_pipeline_gives_the_same(kind, tmp_path):
    stock = animate(kind, from_image(kind))
    ours = from_image(kind, convert_to=(2, 2, 3))
    made = animate(kind, ours)
    assert made.shape == stock.shape == (1, 9, 3, 32, 48) and made.isfinite().all()
    assert (made - stock).abs().max() > 1e-4
    ours.save_pretrained(tmp_path)
    again = quiet(DiffusionPipeline.from_pretrained(tmp_path))
    assert type(again.transformer) is MHLAWanTransformer3DModel
    assert (animate(kind, again) - made).abs().max() < 1e-5
    assert (animate(kind, ours, height=48, width=32)).shape == (1, 9, 3, 48, 32)


def test_a_video_of_two_equals_its_single_run():
    pipe = from_image("TI2V", convert_to=(2, 2, 3))
    both = animate("TI2V", pipe, seeds=(3, 4))
    assert (animate("TI2V", pipe, seeds=(4,))[0] - both[1]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_several_videos_of_one_image(kind):
    pipe = from_image(kind, convert_to=(2, 2, 3))
    made = animate(kind, pipe, seeds=(3, 4), prompt="a red apple", num_videos_per_prompt=2)
    for seed, video in zip((3, 4), made, strict=True):
        assert (animate(kind, pipe, seeds=(seed,))[0] - video).abs().max() < 1e-5


def test_two_experts_of_which_one_is_ours():
    kind = "Wan 2.2 without image encoder"
    second = stirred(stock_transformer(seed=1, **SEEN))
    with_stock = from_image(kind, (2, 2, 3), transformer_2=second, boundary_ratio=0.9)
    with_ours = from_image(
        kind, (2, 2, 3), transformer_2=convert(second, block_grid=(2, 2, 3)), boundary_ratio=0.9
    )
    assert (animate(kind, with_stock) - animate(kind, with_ours)).abs().max() > 1e-4


def test_a_stock_pipeline_can_be_told_to_stop_at_values_that_are_not_finite():
    pipe = from_image("TI2V", convert_to=(2, 2, 3))
    with torch.no_grad():
        pipe.transformer.blocks[0].attn1.to_v.bias.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match="after step 1 of 2"):
        animate("TI2V", pipe, callback_on_step_end=FiniteWatch(None, ["latents"]))


def test_videos_become_videos():
    t2v = MHLAWanPipeline(**components())
    t2v.transformer.to(torch.bfloat16)
    # As docs/generate.md says; `from_pipe` would turn everything into float32.
    parts = (t2v.tokenizer, t2v.text_encoder, t2v.transformer, t2v.vae, t2v.scheduler)
    pipe = quiet(WanVideoToVideoPipeline(*parts))
    assert pipe.transformer is t2v.transformer and pipe.transformer.dtype == torch.bfloat16
    assert pipe.vae.dtype == torch.float32
    clip = [picture(seed) for seed in range(5)]

    def restyle(strength: float) -> torch.Tensor:
        return pipe(
            clip,
            "two blue emoji",
            num_inference_steps=4,
            strength=strength,
            generator=generator(0),
            output_type="pt",
            **SIZE,
        ).frames

    weak, strong = restyle(0.25), restyle(1.0)
    assert weak.shape == strong.shape == (1, 5, 3, 32, 48)
    assert weak.isfinite().all() and (weak - strong).abs().max() > 1e-3


def test_the_modular_pipeline_takes_our_transformer(tmp_path):
    pipe = stock_pipeline(stirred(model()))
    pipe.save_pretrained(tmp_path)
    modular = ModularPipeline.from_pretrained(str(tmp_path))
    modular.load_components()
    assert type(modular.transformer) is MHLAWanTransformer3DModel
    modular.set_progress_bar_config(disable=True)
    videos = modular(
        prompt="a red apple",
        num_frames=5,
        num_inference_steps=1,
        generator=generator(0),
        output="videos",
        **SIZE,
    )
    assert np.asarray(videos[0]).shape[0] == 5
