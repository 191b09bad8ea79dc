"""Diffusers' SANA-Video pipelines with our transformer: with one block, what they make with their own."""

import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    SanaImageToVideoPipeline,
    SanaVideoPipeline,
    TaylorSeerCacheConfig,
    UniPCMultistepScheduler,
)
from model_checks import close, stirred
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from PIL import Image
from tiny_sana_video import EVERYTHING, model, stock_transformer
from tiny_sana_video_pipeline import components
from tiny_wan_pipeline import generator

from mhla_diffusion.loading import load_pipeline
from mhla_diffusion.models.adapters import load_adapter, save_adapter
from mhla_diffusion.models.convert import convert
from mhla_diffusion.models.sana_video import MHLASanaVideoTransformer3DModel
from mhla_diffusion.pipelines.checks import FiniteWatch

CALL = {"height": 64, "width": 96, "frames": 9, "num_inference_steps": 3, "output_type": "pt"}
CALL |= {"max_sequence_length": 8, "use_resolution_binning": False, "complex_human_instruction": []}
CLASSES = {"text": SanaVideoPipeline, "image": SanaImageToVideoPipeline}
BOTH = pytest.mark.parametrize("kind", CLASSES)


def pipeline(kind: str = "text", transformer: torch.nn.Module | None = None, **more) -> DiffusionPipeline:
    parts = components(stirred(model(num_layers=3)) if transformer is None else transformer)
    if kind == "image":
        parts["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=8.0)
    pipe = CLASSES[kind](**(parts | more))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make(pipe: DiffusionPipeline, seeds=(0,), **changes) -> torch.Tensor:
    image = {}
    if isinstance(pipe, SanaImageToVideoPipeline):
        image = {"image": Image.linear_gradient("L").resize((96, 64)).convert("RGB")}
    generators = [generator(seed) for seed in seeds]
    return pipe(prompt=["a red apple"] * len(seeds), generator=generators, **image, **(CALL | changes)).frames


@BOTH
def test_one_block_makes_stock_videos_and_a_saved_pipeline_gives_the_same(kind, tmp_path):
    stock = stirred(stock_transformer())
    expected = make(pipeline(kind, stock))
    assert expected.shape == (1, 9, 3, 64, 96)
    assert close(make(pipeline(kind, convert(stock, (1, 1, 1)))), expected)
    assert torch.equal(make(pipeline(kind, convert(stock, layers=[]))), expected)
    pipe = pipeline(kind, stirred(convert(stock, (2, 2, 3), gate=True, local_conv=3)))
    made = make(pipe)
    assert made.isfinite().all() and (made - expected).abs().max() > 1e-3
    pipe.save_pretrained(tmp_path, max_shard_size="20KB")
    for again in (DiffusionPipeline.from_pretrained(tmp_path), load_pipeline(tmp_path)):
        assert type(again) is CLASSES[kind]
        assert type(again.transformer) is MHLASanaVideoTransformer3DModel
        again.set_progress_bar_config(disable=True)
        assert close(make(again), made)


@BOTH
def test_any_size_and_a_video_of_two_equals_its_single_run(kind):
    pipe = pipeline(kind)
    both = make(pipe, seeds=(3, 4))
    assert close(make(pipe, seeds=(4,))[0], both[1])
    assert make(pipe, height=96, width=64, frames=5).shape == (1, 5, 3, 96, 64)


def test_a_stock_class_named_for_our_weights_is_refused(tmp_path):
    pipeline().save_pretrained(tmp_path)
    index = tmp_path / "model_index.json"
    text = index.read_text().replace('"mhla_diffusion"', '"diffusers"')
    index.write_text(text.replace("MHLASanaVideoTransformer3DModel", "SanaVideoTransformer3DModel"))
    with pytest.raises(ValueError, match="would drop.*MHLASanaVideoTransformer3DModel"):
        load_pipeline(tmp_path)


@pytest.mark.parametrize("scheduler", [FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler])
def test_other_schedulers(scheduler):
    options = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    chosen = scheduler() if scheduler is FlowMatchEulerDiscreteScheduler else scheduler(**options)
    assert make(pipeline(scheduler=chosen)).isfinite().all()


def test_a_lora_is_loaded_weighted_fused_and_unloaded_and_brings_a_mixing(tmp_path):
    made = stock_transformer(num_layers=3).requires_grad_(False)
    made.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"]))
    for number, (name, parameter) in enumerate(made.named_parameters()):
        if "lora_" in name:
            parameter.data.normal_(generator=generator(number))
    SanaVideoPipeline.save_lora_weights(tmp_path, transformer_lora_layers=get_peft_model_state_dict(made))
    pipe = pipeline()
    plain = make(pipe)
    pipe.load_lora_weights(tmp_path, adapter_name="style")
    loaded = make(pipe)
    assert not close(loaded, plain) and close(make(pipe, attention_kwargs={"scale": 0.0}), plain)
    pipe.fuse_lora()
    assert (make(pipe) - loaded).abs().max() < 1e-4
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    assert (make(pipe) - plain).abs().max() < 1e-4
    other = stirred(model(num_layers=3)).requires_grad_(False)
    other.transformer_blocks[1].attn1.mixing.requires_grad_(True).weight.data.fill_(0.2)
    load_adapter(pipe, save_adapter(other, tmp_path / "mixing"))
    assert not close(make(pipe), plain)
    pipe.unload_lora_weights()
    assert (make(pipe) - plain).abs().max() < 1e-4


@BOTH
@pytest.mark.parametrize(
    "cache",
    [
        FirstBlockCacheConfig(threshold=1e9),
        TaylorSeerCacheConfig(disable_cache_before_step=2, taylor_factors_dtype=torch.float32),
    ],
    ids=["first block", "taylor"],
)
def test_caches_skip_steps_and_forget_one_video_before_the_next(kind, cache):
    pipe = pipeline(kind)
    settings = {"num_inference_steps": 5}
    plain = make(pipe, **settings)
    pipe.transformer.enable_cache(cache)
    read = []
    pipe.transformer.transformer_blocks[1].attn1.mixing.register_forward_hook(lambda *_: read.append(1))
    first = make(pipe, **settings)
    assert 1 <= len(read) < 5 and not torch.equal(first, plain)
    assert torch.equal(make(pipe, **settings), first)
    pipe.transformer.disable_cache()
    assert close(make(pipe, **settings), plain)


@pytest.mark.parametrize("offload", [{"offload_type": "leaf_level"}, {"num_blocks_per_group": 1}])
def test_group_offload_of_the_transformer(offload):
    pipe = pipeline(transformer=stirred(model(**EVERYTHING)))
    expected = make(pipe)
    cpu = torch.device("cpu")
    pipe.transformer.enable_group_offload(onload_device=cpu, offload_device=cpu, **offload)
    assert close(make(pipe), expected)


def test_half_precision_and_fp8_storage_keep_the_mixing(tmp_path):
    pipe = pipeline()
    plain = make(pipe)
    pipe.save_pretrained(tmp_path)
    half = load_pipeline(tmp_path, torch_dtype={"default": torch.bfloat16, "vae": torch.float32})
    half.set_progress_bar_config(disable=True)
    assert {layer.attn1.mixing.weight.dtype for layer in half.transformer.transformer_blocks} == {
        torch.float32
    }
    assert (half.transformer.dtype, half.vae.dtype) == (torch.bfloat16, torch.float32)
    assert (make(half) - plain).abs().mean() < 0.1
    pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert (make(pipe) - plain).abs().mean() < 0.1


@BOTH
def test_a_stock_pipeline_can_be_told_to_stop_at_values_that_are_not_finite(kind):
    pipe = pipeline(kind)
    with torch.no_grad():
        pipe.transformer.transformer_blocks[0].ff.conv_point.weight.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match="after step 1 of 3"):
        make(pipe, callback_on_step_end=FiniteWatch(None, ["latents"]))


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("how", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offload_on_the_gpu(kind, how):
    expected = make(pipeline(kind).to("cuda")).cpu()
    pipe = pipeline(kind)
    getattr(pipe, how)()
    for _ in range(2):
        assert (make(pipe).cpu() - expected).abs().max() < 1e-3
