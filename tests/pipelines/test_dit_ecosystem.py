"""What Diffusers users do with a whole DiT pipeline works with our transformer in it, in the stock one and in ours."""

import numpy as np
import pytest
import torch
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig
from model_checks import close, stirred
from random_lora import save_random_lora
from tiny_dit import autoencoder, generator, stock_pipeline, stock_transformer
from tiny_dit_pipeline import draw, pipeline

from mhla_diffusion.models.convert import convert, restore
from mhla_diffusion.pipelines.dit import MHLADiTPipeline


@pytest.fixture(scope="module")
def pipe() -> MHLADiTPipeline:
    return pipeline()


def test_noise_and_latents_are_float32_in_a_half_precision_pipeline():
    half = pipeline().to(torch.bfloat16)
    latents = draw(half, output_type="latent")
    assert latents.dtype == torch.float32
    expected = draw(pipeline(), output_type="latent")
    assert ((latents - expected).norm() / expected.norm()) < 0.05
    assert draw(half).dtype == torch.float32


def test_two_pipelines_from_shared_components_and_only_the_given_transformer_changes():
    transformer = stock_transformer()
    first = pipeline(transformer)
    before = draw(first)
    second = MHLADiTPipeline(**first.components, default_steps=3)
    second.set_progress_bar_config(disable=True)
    second.transformer = convert(second.transformer)
    assert first.transformer is transformer and second.vae is first.vae
    after = draw(second)
    assert torch.equal(draw(first), before) and not close(after, before)
    second.transformer = restore(second.transformer)
    assert torch.equal(draw(second), before)


def test_a_lora_is_loaded_switched_fused_and_unloaded(tmp_path):
    save_random_lora(pipeline(), tmp_path)
    pipe = pipeline()
    before = draw(pipe)
    pipe.load_lora_weights(tmp_path, adapter_name="style")
    after = draw(pipe)
    assert not close(after, before)
    assert close(draw(pipe, attention_kwargs={"scale": 0.0}), before)
    pipe.set_adapters(["style"], [0.0])
    assert close(draw(pipe), before)
    pipe.set_adapters(["style"], [1.0])
    pipe.fuse_lora()
    assert close(draw(pipe), after)
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    assert close(draw(pipe), before)


def test_a_cache_keeps_its_state_through_the_steps_and_loses_it_at_the_end(pipe):
    cached = pipeline(convert(stock_transformer(num_layers=3)))
    plain = draw(cached)
    cached.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    for _ in range(2):
        assert close(draw(cached), plain)
    cached.transformer.disable_cache()
    cached.transformer.enable_cache(
        FirstBlockCacheConfig(threshold=1e3)
    )  # all steps take the first one's rest
    assert not close(draw(cached), plain)


def test_a_cache_forgets_a_call_that_was_broken_off():
    def broken_off(pipe, step, timestep, tensors):
        if step == 1:
            raise KeyboardInterrupt
        return {}

    cached = pipeline(convert(stock_transformer(num_layers=3)))
    cached.transformer.enable_cache(TaylorSeerCacheConfig(cache_interval=2))
    whole = draw(cached)
    with pytest.raises(KeyboardInterrupt):
        draw(cached, callback_on_step_end=broken_off)
    assert close(draw(cached), whole)


def test_the_stock_pipeline_caches_our_transformer_though_it_names_no_call():
    many = stock_transformer(num_layers=3, num_embeds_ada_norm=1000)  # the null class that it takes
    stock = stock_pipeline(stirred(convert(many, block_grid=(2, 2))))

    def array():
        return stock([1], num_inference_steps=4, generator=generator(0), output_type="np").images

    plain = array()
    stock.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    assert np.abs(array() - plain).max() < 1e-5
    stock.transformer.disable_cache()
    stock.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e3))
    first = array()
    assert np.abs(first - plain).max() > 1e-5 and np.array_equal(array(), first)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloading_twice_with_shared_components_draws_the_same_picture(offload):
    expected = draw(pipeline().to("cuda"), output_type="latent", generator=generator(0)).cpu()
    first = pipeline()
    getattr(first, offload)()
    second = MHLADiTPipeline(**first.components, default_steps=3)
    second.set_progress_bar_config(disable=True)
    getattr(second, offload)()
    for each in (first, second):
        latents = draw(each, output_type="latent").cpu()
        assert ((latents - expected).norm() / expected.norm()) < 1e-4


def test_the_autoencoder_decodes_in_tiles_and_slices(pipe):
    tiled = pipeline(pipe.transformer)
    tiled.vae = autoencoder()
    tiled.vae.enable_tiling()
    tiled.vae.enable_slicing()
    assert draw(tiled, (1, 2), height=40, width=40, num_inference_steps=1).shape == (2, 3, 40, 40)


def test_a_compiled_transformer_draws_the_same(pipe):
    compiled = pipeline(convert(restore(pipe.transformer), block_grid=(2, 2)))
    expected = draw(compiled)
    compiled.transformer = torch.compile(compiled.transformer, fullgraph=True, backend="aot_eager")
    assert close(draw(compiled), expected)
