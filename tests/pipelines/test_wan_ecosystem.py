"""What Diffusers users do with a whole Wan pipeline works with our transformer in it, in the stock one and in ours."""

import pytest
import torch
from diffusers import (
    FirstBlockCacheConfig,
    WanPipeline,
)
from model_checks import close, stirred
from tiny_wan import stock_transformer
from tiny_wan_pipeline import draw, lora, pipeline, transformer

from mhla_diffusion.models.adapters import load_adapter
from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.wan import MHLAWanPipeline

BOTH = pytest.mark.parametrize("cls", [WanPipeline, MHLAWanPipeline])


@BOTH
def test_a_lora_made_on_stock_wan_is_loaded_weighted_fused_and_unloaded(cls, tmp_path):
    pipe = pipeline(cls)
    plain = draw(pipe)
    pipe.load_lora_weights(lora(tmp_path), adapter_name="style")
    loaded = draw(pipe)
    assert not close(loaded, plain)
    assert close(draw(pipe, attention_kwargs={"scale": 0.0}), plain)
    pipe.set_adapters(["style"], [0.5])
    assert not close(draw(pipe), loaded)
    pipe.set_adapters(["style"], [1.0])
    pipe.fuse_lora()
    assert (draw(pipe) - loaded).abs().max() < 1e-4
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    assert (draw(pipe) - plain).abs().max() < 1e-4


def test_a_lora_with_a_mixing_goes_into_either_expert(tmp_path):
    source = lora(tmp_path, mixing=True)
    experts = {"transformer_2": transformer(), "boundary_ratio": 0.9}
    plain = draw(pipeline(**experts))
    for second in (False, True):
        pipe = pipeline(**(experts | {"transformer_2": transformer()}))
        pipe.load_lora_weights(source, load_into_transformer_2=second)
        assert [
            bool(getattr(part, "peft_config", {})) for part in (pipe.transformer, pipe.transformer_2)
        ] == [
            not second,
            second,
        ]
        assert not close(draw(pipe), plain)
        pipe.unload_lora_weights()
        assert close(draw(pipe), plain)
    stock = pipeline(**(experts | {"transformer_2": stirred(stock_transformer(num_layers=3))}))
    before = draw(stock)
    stock.load_lora_weights(lora(tmp_path / "stock"), load_into_transformer_2=True)
    assert stock.transformer_2.peft_config and not close(draw(stock), before)
    with pytest.raises(ValueError, match="has no transformer_2"):
        pipeline().load_lora_weights(source, load_into_transformer_2=True)


def test_with_a_cache_the_layer_at_fault_is_still_found():
    pipe = pipeline()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    with torch.no_grad():
        pipe.transformer.blocks[2].attn1.to_v.bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"after step 1 of 4, first in transformer\.blocks\.2"):
        draw(pipe)


@pytest.mark.parametrize("regional", [False, True])
def test_in_a_compiled_transformer_too(regional):
    torch._dynamo.reset()
    pipe = pipeline()
    compiled = pipe.transformer.compile_repeated_blocks if regional else pipe.transformer.compile
    compiled(backend="eager")
    assert draw(pipe).isfinite().all()
    with torch.no_grad():
        pipe.transformer.blocks[1].ffn.net[2].bias.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match=r"first in transformer\.blocks\.1"):
        draw(pipe)


@BOTH
def test_the_video_is_decoded_in_slices_and_tiles(cls):
    pipe = pipeline(cls)
    settings = {"height": 64, "width": 64, "num_inference_steps": 1, "num_videos_per_prompt": 2}
    whole = draw(pipe, **settings)
    pipe.vae.enable_slicing()
    assert close(draw(pipe, **settings), whole)
    pipe.vae.enable_tiling(
        tile_sample_min_height=32,
        tile_sample_min_width=32,
        tile_sample_stride_height=16,
        tile_sample_stride_width=16,
    )
    tiled = draw(pipe, **settings)
    assert tiled.shape == whole.shape and tiled.isfinite().all() and not torch.equal(tiled, whole)
    assert (tiled - whole).abs().mean() < 0.1


@BOTH
def test_shards_and_half_precision(cls, tmp_path):
    pipe = pipeline(cls)
    pipe.save_pretrained(tmp_path, max_shard_size="20KB")
    assert any("-of-" in path.name for path in (tmp_path / "transformer").iterdir())
    again = cls.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert close(draw(again), draw(pipe))
    half = cls.from_pretrained(tmp_path, torch_dtype={"default": torch.bfloat16, "vae": torch.float32})
    half.set_progress_bar_config(disable=True)
    assert {block.attn1.mixing.weight.dtype for block in half.transformer.blocks} == {torch.float32}
    assert (half.transformer.dtype, half.vae.dtype) == (torch.bfloat16, torch.float32)
    assert draw(half).isfinite().all()


def test_converting_touches_nothing_but_the_transformer():
    pipe = pipeline(transformer=stirred(stock_transformer()))
    others = {name: part for name, part in pipe.components.items() if name != "transformer"}
    kinds = [type(module) for module in (*pipe.vae.modules(), *pipe.text_encoder.modules())]
    expected = draw(pipe)
    pipe.transformer = convert(pipe.transformer, layers=[])
    assert all(getattr(pipe, name) is part for name, part in others.items())
    assert [type(module) for module in (*pipe.vae.modules(), *pipe.text_encoder.modules())] == kinds
    assert torch.equal(draw(pipe), expected)  # no layer of MHLA: stock bit for bit


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("how", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offload_on_the_gpu(cls, how, tmp_path):
    source = lora(tmp_path, mixing=True)
    plain = pipeline(cls)
    load_adapter(plain, source)
    expected = draw(plain.to("cuda"))
    pipe = pipeline(cls)
    load_adapter(pipe, source)
    getattr(pipe, how)()
    for _ in range(2):
        assert (draw(pipe) - expected).abs().max() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_the_layer_at_fault_is_found_in_a_compiled_or_offloaded_pipeline_on_the_gpu(regional, offload):
    torch._dynamo.reset()
    pipe = pipeline()
    with torch.no_grad():
        pipe.transformer.blocks[1].ffn.net[2].bias.fill_(float("inf"))
    if offload:
        pipe.enable_model_cpu_offload()
    else:
        pipe.to("cuda")
    if regional:
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
    else:
        pipe.transformer.compile()
    with pytest.raises(FloatingPointError, match=r"after step 1 of 4, first in transformer\.blocks\.1"):
        draw(pipe)


@pytest.mark.gpu
@BOTH
def test_model_offload_twice_with_shared_components_and_a_lora_loaded_behind_it(cls, tmp_path):
    source = lora(tmp_path)
    plain = pipeline(cls).to("cuda")
    expected = draw(plain)
    plain.load_lora_weights(source)
    with_lora = draw(plain)
    pipe = pipeline(cls)
    pipe.enable_model_cpu_offload()
    pipe.enable_model_cpu_offload()
    assert (draw(pipe) - expected).abs().max() < 1e-3
    second = cls(**pipe.components)
    second.set_progress_bar_config(disable=True)
    second.enable_model_cpu_offload()
    for used in (second, pipe):
        assert (draw(used) - expected).abs().max() < 1e-3
    pipe.load_lora_weights(source)
    assert (draw(pipe) - with_lora).abs().max() < 1e-3
