"""What Diffusers users do with a whole Wan pipeline works with our transformer in it, in the stock one and in ours."""

import pytest
import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    WanPipeline,
)
from model_checks import stirred
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from tiny_wan import model, stock_transformer
from tiny_wan_pipeline import components, generator

from mhla_diffusion.loading import load_pipeline
from mhla_diffusion.models.adapters import load_adapter, save_adapter
from mhla_diffusion.models.convert import convert
from mhla_diffusion.models.model_card import IMPORT_LINE
from mhla_diffusion.pipelines.wan import MHLAWanPipeline

CALL = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 4, "max_sequence_length": 8}
CALL |= {"output_type": "pt", "negative_prompt": "green"}
BOTH = pytest.mark.parametrize("cls", [WanPipeline, MHLAWanPipeline])


def transformer(**options) -> torch.nn.Module:
    return stirred(model(num_layers=3, **options))


def pipeline(cls=MHLAWanPipeline, **more) -> WanPipeline:
    pipe = cls(**(components(transformer()) | more))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make(pipe: WanPipeline, seed: int = 0, **changes) -> torch.Tensor:
    return pipe("a red apple", generator=generator(seed), **(CALL | changes)).frames.cpu()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a - b).abs().max() < 1e-5


def lora(folder, seed: int = 0, mixing: bool = False) -> str:
    """A LoRA made on the stock transformer, or with `mixing` one on ours that brings its mixings."""
    made = (transformer() if mixing else stock_transformer(num_layers=3)).requires_grad_(False)
    made.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"]))
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(generator=generator(seed))
        elif mixing and "mixing" in name:
            parameter.requires_grad_(True).data += 0.2 * torch.rand(
                parameter.shape, generator=generator(seed)
            )
    if mixing:
        save_adapter(made, folder)
    else:
        WanPipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(made))
    return str(folder)


@BOTH
def test_a_lora_made_on_stock_wan_is_loaded_weighted_fused_and_unloaded(cls, tmp_path):
    pipe = pipeline(cls)
    plain = make(pipe)
    pipe.load_lora_weights(lora(tmp_path), adapter_name="style")
    loaded = make(pipe)
    assert not close(loaded, plain)
    assert close(make(pipe, attention_kwargs={"scale": 0.0}), plain)
    pipe.set_adapters(["style"], [0.5])
    assert not close(make(pipe), loaded)
    pipe.set_adapters(["style"], [1.0])
    pipe.fuse_lora()
    assert (make(pipe) - loaded).abs().max() < 1e-4
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    assert (make(pipe) - plain).abs().max() < 1e-4


def test_a_lora_with_a_mixing_goes_into_either_expert(tmp_path):
    source = lora(tmp_path, mixing=True)
    experts = {"transformer_2": transformer(), "boundary_ratio": 0.9}
    plain = make(pipeline(**experts))
    for second in (False, True):
        pipe = pipeline(**(experts | {"transformer_2": transformer()}))
        pipe.load_lora_weights(source, load_into_transformer_2=second)
        assert [
            bool(getattr(part, "peft_config", {})) for part in (pipe.transformer, pipe.transformer_2)
        ] == [
            not second,
            second,
        ]
        assert not close(make(pipe), plain)
        pipe.unload_lora_weights()
        assert close(make(pipe), plain)
    stock = pipeline(**(experts | {"transformer_2": stirred(stock_transformer(num_layers=3))}))
    before = make(stock)
    stock.load_lora_weights(lora(tmp_path / "stock"), load_into_transformer_2=True)
    assert stock.transformer_2.peft_config and not close(make(stock), before)
    with pytest.raises(ValueError, match="has no transformer_2"):
        pipeline().load_lora_weights(source, load_into_transformer_2=True)


@BOTH
@pytest.mark.parametrize(
    "cache",
    [
        lambda _: FirstBlockCacheConfig(threshold=1e9),
        lambda _: TaylorSeerCacheConfig(disable_cache_before_step=2, taylor_factors_dtype=torch.float32),
        lambda _: MagCacheConfig(
            threshold=1e9, num_inference_steps=4, retention_ratio=0.1, mag_ratios=[1.0] * 4
        ),
        lambda _: SeaCacheConfig(
            threshold=1e9, raw_vision_callback=lambda model, args, inputs: list(inputs["hidden_states"])
        ),
        # Wan's pipelines call the model once for each of the two captions, as if there were no guidance.
        lambda pipe: FasterCacheConfig(
            current_timestep_callback=lambda: pipe.current_timestep, is_guidance_distilled=True
        ),
    ],
    ids=["first block", "taylor", "mag", "sea", "faster"],
)
def test_caches_skip_steps_and_forget_one_video_before_the_next(cls, cache):
    pipe = pipeline(cls)
    plain = make(pipe)
    pipe.transformer.enable_cache(cache(pipe))
    read = []
    pipe.transformer.blocks[1].attn1.mixing.register_forward_hook(lambda *_: read.append(1))
    first = make(pipe)
    assert 2 <= len(read) < 2 * CALL["num_inference_steps"] and not close(first, plain)
    assert torch.equal(make(pipe), first)
    pipe.transformer.disable_cache()
    assert close(make(pipe), plain)


def test_with_a_cache_the_layer_at_fault_is_still_found():
    pipe = pipeline()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    with torch.no_grad():
        pipe.transformer.blocks[2].attn1.to_v.bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"after step 1 of 4, first in transformer\.blocks\.2"):
        make(pipe)


@pytest.mark.parametrize("regional", [False, True])
def test_in_a_compiled_transformer_too(regional):
    torch._dynamo.reset()
    pipe = pipeline()
    compiled = pipe.transformer.compile_repeated_blocks if regional else pipe.transformer.compile
    compiled(backend="eager")
    assert make(pipe).isfinite().all()
    with torch.no_grad():
        pipe.transformer.blocks[1].ffn.net[2].bias.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match=r"first in transformer\.blocks\.1"):
        make(pipe)


@BOTH
@pytest.mark.parametrize("kind", [{"offload_type": "leaf_level"}, {"num_blocks_per_group": 1}])
def test_group_offload_of_the_transformer(cls, kind, tmp_path):
    expected = make(pipeline(cls))
    pipe = pipeline(cls)
    cpu = torch.device("cpu")
    pipe.transformer.enable_group_offload(onload_device=cpu, offload_device=cpu, **kind)
    assert close(make(pipe), expected)
    load_adapter(pipe, lora(tmp_path, mixing=True))
    plain = pipeline(cls)
    load_adapter(plain, tmp_path)
    assert close(make(pipe), make(plain)) and not close(make(pipe), expected)


@BOTH
def test_the_video_is_decoded_in_slices_and_tiles(cls):
    pipe = pipeline(cls)
    settings = {"height": 64, "width": 64, "num_inference_steps": 1, "num_videos_per_prompt": 2}
    whole = make(pipe, **settings)
    pipe.vae.enable_slicing()
    assert close(make(pipe, **settings), whole)
    pipe.vae.enable_tiling(
        tile_sample_min_height=32,
        tile_sample_min_width=32,
        tile_sample_stride_height=16,
        tile_sample_stride_width=16,
    )
    tiled = make(pipe, **settings)
    assert tiled.shape == whole.shape and tiled.isfinite().all() and not torch.equal(tiled, whole)
    assert (tiled - whole).abs().mean() < 0.1


def test_fp8_storage_and_fused_projections_in_a_pipeline():
    pipe = pipeline()
    plain = make(pipe)
    pipe.transformer.fuse_qkv_projections()
    assert close(make(pipe), plain)
    pipe.transformer.unfuse_qkv_projections()
    pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert (make(pipe) - plain).abs().mean() < 0.1


@BOTH
def test_shards_and_half_precision(cls, tmp_path):
    pipe = pipeline(cls)
    pipe.save_pretrained(tmp_path, max_shard_size="20KB")
    assert any("-of-" in path.name for path in (tmp_path / "transformer").iterdir())
    again = cls.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert close(make(again), make(pipe))
    half = cls.from_pretrained(tmp_path, torch_dtype={"default": torch.bfloat16, "vae": torch.float32})
    half.set_progress_bar_config(disable=True)
    assert {block.attn1.mixing.weight.dtype for block in half.transformer.blocks} == {torch.float32}
    assert (half.transformer.dtype, half.vae.dtype) == (torch.bfloat16, torch.float32)
    assert make(half).isfinite().all()


def test_a_pushed_pipeline_says_how_it_is_loaded(tmp_path):
    pipe = pipeline()
    pipe.save_pretrained(tmp_path)
    pipe.amend_card(tmp_path, "owner/name")
    card = (tmp_path / "README.md").read_text()
    assert f'{IMPORT_LINE}\n\npipe = mhla_diffusion.load_pipeline("owner/name", hub=True)' in card
    assert type(load_pipeline(tmp_path)) is MHLAWanPipeline


def test_converting_touches_nothing_but_the_transformer():
    pipe = pipeline(transformer=stirred(stock_transformer()))
    others = {name: part for name, part in pipe.components.items() if name != "transformer"}
    kinds = [type(module) for module in (*pipe.vae.modules(), *pipe.text_encoder.modules())]
    expected = make(pipe)
    pipe.transformer = convert(pipe.transformer, layers=[])
    assert all(getattr(pipe, name) is part for name, part in others.items())
    assert [type(module) for module in (*pipe.vae.modules(), *pipe.text_encoder.modules())] == kinds
    assert torch.equal(make(pipe), expected)  # no layer of MHLA: stock bit for bit


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("how", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offload_on_the_gpu(cls, how, tmp_path):
    source = lora(tmp_path, mixing=True)
    plain = pipeline(cls)
    load_adapter(plain, source)
    expected = make(plain.to("cuda"))
    pipe = pipeline(cls)
    load_adapter(pipe, source)
    getattr(pipe, how)()
    for _ in range(2):
        assert (make(pipe) - expected).abs().max() < 1e-3


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
        make(pipe)


@pytest.mark.gpu
@BOTH
def test_model_offload_twice_with_shared_components_and_a_lora_loaded_behind_it(cls, tmp_path):
    source = lora(tmp_path)
    plain = pipeline(cls).to("cuda")
    expected = make(plain)
    plain.load_lora_weights(source)
    with_lora = make(plain)
    pipe = pipeline(cls)
    pipe.enable_model_cpu_offload()
    pipe.enable_model_cpu_offload()
    assert (make(pipe) - expected).abs().max() < 1e-3
    second = cls(**pipe.components)
    second.set_progress_bar_config(disable=True)
    second.enable_model_cpu_offload()
    for used in (second, pipe):
        assert (make(used) - expected).abs().max() < 1e-3
    pipe.load_lora_weights(source)
    assert (make(pipe) - with_lora).abs().max() < 1e-3
