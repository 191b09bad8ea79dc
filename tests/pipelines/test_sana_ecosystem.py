"""What Diffusers users do with a whole pipeline works with our transformer in it, in the stock pipeline and in ours."""

import json

import pytest
import torch
from diffusers import DiffusionPipeline, SanaPipeline
from model_checks import close
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from tiny_sana import stock_transformer
from tiny_sana_pipeline import draw, lora, pipeline, transformer

from mhla_diffusion.models.adapters import load_adapter, save_adapter
from mhla_diffusion.models.convert import convert
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

BOTH = pytest.mark.parametrize("cls", [SanaPipeline, MHLASanaPipeline])


@BOTH
def test_loras_are_loaded_weighted_fused_and_unloaded(cls, tmp_path):
    one, two = lora(tmp_path / "one", 1), lora(tmp_path / "two", 2, rank=3, targets=("to_k", "to_out.0"))
    pipe = pipeline(cls)
    plain = draw(pipe)
    pipe.load_lora_weights(one, adapter_name="one")
    with_one = draw(pipe)
    pipe.load_lora_weights(two, adapter_name="two")
    pipe.set_adapters(["one", "two"], [1.0, 0.0])
    assert close(draw(pipe), with_one) and not close(with_one, plain)
    pipe.set_adapters(["one", "two"], [0.5, 0.5])
    mixed = draw(pipe)
    assert not close(mixed, with_one)
    half = draw(pipe, attention_kwargs={"scale": 0.0})
    assert close(half, plain)
    pipe.delete_adapters("two")
    pipe.set_adapters("one")
    assert close(draw(pipe), with_one)
    pipe.disable_lora()
    assert close(draw(pipe), plain)
    pipe.enable_lora()
    pipe.fuse_lora()
    assert (draw(pipe) - with_one).abs().max() < 1e-4
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    assert (draw(pipe) - plain).abs().max() < 1e-4


@BOTH
def test_a_lora_is_swapped_in_place(cls, tmp_path):
    one, two = lora(tmp_path / "one", 1), lora(tmp_path / "two", 2)
    expected = []
    for source in (one, two):
        pipe = pipeline(cls)
        pipe.load_lora_weights(source)
        expected.append(draw(pipe))
    pipe = pipeline(cls)
    pipe.load_lora_weights(one, adapter_name="style")
    pipe.load_lora_weights(two, adapter_name="style", hotswap=True)
    assert close(draw(pipe), expected[1]) and not close(expected[0], expected[1])


@BOTH
def test_a_lora_for_more_layers_is_refused_whole(cls, tmp_path):
    bigger = convert(stock_transformer(num_layers=4))
    bigger.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    SanaPipeline.save_lora_weights(tmp_path, transformer_lora_layers=get_peft_model_state_dict(bigger))
    pipe = pipeline(cls)
    with pytest.raises(ValueError, match=r"4 of its 16 weights have no place .*transformer_blocks\.3"):
        pipe.load_lora_weights(tmp_path)
    assert pipe.get_list_adapters() == {} and close(draw(pipe), draw(pipeline(cls)))


@BOTH
def test_a_lora_with_a_mixing_is_one_file_and_one_call(cls, tmp_path):
    source = lora(tmp_path, mixing=True)
    pipe = pipeline(cls)
    plain = draw(pipe)
    load_adapter(pipe, source, adapter_name="style")
    loaded = draw(pipe)
    save_adapter(pipe, tmp_path / "again", adapter_name="style")
    pipe.unload_lora_weights()
    assert close(draw(pipe), plain) and not close(loaded, plain)
    load_adapter(pipe, tmp_path / "again")
    assert close(draw(pipe), loaded)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    pipe.save_pretrained(tmp_path / "whole")
    whole = cls.from_pretrained(tmp_path / "whole")
    whole.set_progress_bar_config(disable=True)
    assert (draw(whole) - loaded).abs().max() < 1e-4


@BOTH
def test_the_picture_is_decoded_in_tiles(cls):
    pipe = pipeline(cls)
    whole = draw(pipe, height=64, width=64)
    pipe.vae.enable_tiling(
        tile_sample_min_height=32,
        tile_sample_min_width=32,
        tile_sample_stride_height=24,
        tile_sample_stride_width=24,
    )
    tiled = draw(pipe, height=64, width=64)
    assert tiled.shape == whole.shape and tiled.isfinite().all() and not torch.equal(tiled, whole)
    assert (tiled - whole).abs().mean() < 0.1


@BOTH
def test_two_pipelines_share_components(cls):
    first = pipeline(cls)
    second = cls(**first.components)
    second.set_progress_bar_config(disable=True)
    assert torch.equal(draw(first), draw(second)) and second.transformer is first.transformer


@BOTH
def test_shards_half_precision_and_a_variant(cls, tmp_path):
    pipe = pipeline(cls)
    pipe.save_pretrained(tmp_path, max_shard_size="20KB", variant="fp16")
    files = {path.name for path in (tmp_path / "transformer").iterdir()}
    assert any("-of-" in name and ".fp16" in name for name in files)
    again = cls.from_pretrained(tmp_path, variant="fp16")
    again.set_progress_bar_config(disable=True)
    assert close(draw(again), draw(pipe))
    half = cls.from_pretrained(tmp_path, variant="fp16", torch_dtype=torch.bfloat16)
    blocks = half.transformer.transformer_blocks
    assert {block.attn1.mixing.weight.dtype for block in blocks} == {torch.float32}
    assert half.transformer.dtype == torch.bfloat16 == half.text_encoder.dtype


def test_both_ways_of_naming_the_transformer_load(tmp_path):
    pipeline(SanaPipeline).save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer"] == ["mhla_diffusion", "MHLASanaTransformer2DModel"]
    given = DiffusionPipeline.from_pretrained(tmp_path, transformer=transformer())
    given.set_progress_bar_config(disable=True)
    assert close(draw(given), draw(pipeline(SanaPipeline)))


@pytest.mark.gpu
@BOTH
def test_model_offload_twice_and_with_shared_components(cls):
    expected = draw(pipeline(cls).to("cuda"))
    pipe = pipeline(cls)
    pipe.enable_model_cpu_offload()
    pipe.enable_model_cpu_offload()
    assert (draw(pipe) - expected).abs().max() < 1e-3
    second = cls(**pipe.components)
    second.set_progress_bar_config(disable=True)
    second.enable_model_cpu_offload()
    for used in (second, pipe):
        assert (draw(used) - expected).abs().max() < 1e-3
    assert next(pipe.transformer.parameters()).device.type == "cpu"


@pytest.mark.gpu
@BOTH
def test_sequential_offload_takes_an_adapter_before_it_and_refuses_one_after(cls, tmp_path):
    source = lora(tmp_path, mixing=True)
    plain = pipeline(cls).to("cuda")
    load_adapter(plain, source)
    expected = draw(plain)
    pipe = pipeline(cls)
    load_adapter(pipe, source)
    pipe.enable_sequential_cpu_offload()
    assert (draw(pipe) - expected).abs().max() < 1e-3
    later = pipeline(cls)
    later.enable_sequential_cpu_offload()
    with pytest.raises(ValueError, match="load the adapter, and then enable_sequential_cpu_offload"):
        load_adapter(later, source)


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("kind", [{"offload_type": "leaf_level"}, {"num_blocks_per_group": 1}])
@pytest.mark.parametrize("use_stream", [False, True])
def test_group_offload_on_the_gpu(cls, kind, use_stream, tmp_path):
    source = lora(tmp_path, mixing=True)
    plain = pipeline(cls).to("cuda")
    load_adapter(plain, source)
    pipe = pipeline(cls)
    devices = {"onload_device": torch.device("cuda"), "offload_device": torch.device("cpu")}
    # By blocks, what lies around the blocks is fetched for `forward`, which no decoder runs: `decode` would miss it.
    kept = {"exclude_modules": ["vae"]} if "num_blocks_per_group" in kind else {}
    pipe.enable_group_offload(**devices, use_stream=use_stream, **kind, **kept)
    load_adapter(pipe, source)
    for _ in range(2):
        assert (draw(pipe) - draw(plain)).abs().max() < 1e-3


@pytest.mark.gpu
@BOTH
def test_a_device_map_puts_the_pipeline_on_the_gpu(cls, tmp_path):
    pipeline(cls).save_pretrained(tmp_path)
    for device_map in ("cuda", "balanced"):
        pipe = cls.from_pretrained(tmp_path, device_map=device_map)
        pipe.set_progress_bar_config(disable=True)
        assert (draw(pipe) - draw(pipeline(cls).to("cuda"))).abs().max() < 1e-3


@pytest.mark.gpu
@BOTH
def test_a_compiled_pipeline_swaps_loras_without_compiling_again(cls, tmp_path):
    torch._dynamo.reset()
    one, two = lora(tmp_path / "one", 1), lora(tmp_path / "two", 2, rank=3)
    expected = []
    for source in (one, two):
        pipe = pipeline(cls).to("cuda")
        pipe.load_lora_weights(source)
        expected.append(draw(pipe))
    pipe = pipeline(cls).to("cuda")
    pipe.enable_lora_hotswap(target_rank=3)
    pipe.load_lora_weights(one, adapter_name="style")
    pipe.transformer.compile(fullgraph=True)
    assert (draw(pipe) - expected[0]).abs().max() < 1e-3
    with torch._dynamo.config.patch(error_on_recompile=True):
        pipe.load_lora_weights(two, adapter_name="style", hotswap=True)
        assert (draw(pipe) - expected[1]).abs().max() < 1e-3
