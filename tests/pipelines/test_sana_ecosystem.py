"""What Diffusers users do with a whole pipeline works with our transformer in it, in the stock pipeline and in ours."""

import json

import pytest
import torch
from diffusers import DiffusionPipeline, FirstBlockCacheConfig, SanaPipeline, TaylorSeerCacheConfig
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from tiny_sana import components, generator, stock_transformer

from mhla_diffusion.loading import load_pipeline
from mhla_diffusion.models.adapters import load_adapter, save_adapter
from mhla_diffusion.models.convert import convert
from mhla_diffusion.models.model_card import IMPORT_LINE
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

CALL = {"height": 32, "width": 32, "num_inference_steps": 4, "output_type": "pt", "max_sequence_length": 8}
CALL |= {"use_resolution_binning": False}
BOTH = pytest.mark.parametrize("cls", [SanaPipeline, MHLASanaPipeline])


def transformer(**options):
    return convert(stock_transformer(num_layers=3), block_grid=(3, 2), **options)


def pipeline(cls=MHLASanaPipeline, **options) -> SanaPipeline:
    pipe = cls(**components(transformer(**options)))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: SanaPipeline, seed: int = 0, **changes) -> torch.Tensor:
    return pipe(["a red apple", "two"], generator=generator(seed), **(CALL | changes)).images.cpu()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a - b).abs().max() < 1e-5


def lora(folder, seed: int = 0, rank: int = 2, mixing: bool = False, targets=("to_q", "to_v")) -> str:
    """A LoRA made on a converted transformer, or with `mixing` one that brings its mixings."""
    made = transformer().requires_grad_(False)
    made.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets)))
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
        SanaPipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(made))
    return str(folder)


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
@pytest.mark.parametrize(
    "cache",
    [
        lambda: FirstBlockCacheConfig(threshold=1e9),
        lambda: TaylorSeerCacheConfig(disable_cache_before_step=2, taylor_factors_dtype=torch.float32),
    ],
)
def test_caches_skip_steps_and_forget_one_picture_before_the_next(cls, cache):
    pipe = pipeline(cls)
    plain = draw(pipe)
    pipe.transformer.enable_cache(cache())
    read = []
    pipe.transformer.transformer_blocks[1].attn1.mixing.register_forward_hook(lambda *_: read.append(1))
    first = draw(pipe)
    assert 1 <= len(read) < CALL["num_inference_steps"] and not close(first, plain)
    assert torch.equal(draw(pipe), first)
    pipe.transformer.disable_cache()
    assert close(draw(pipe), plain)


@BOTH
@pytest.mark.parametrize("kind", [{"offload_type": "leaf_level"}, {"num_blocks_per_group": 1}])
def test_group_offload_of_the_whole_pipeline(cls, kind, tmp_path):
    expected = draw(pipeline(cls))
    pipe = pipeline(cls)
    cpu = torch.device("cpu")
    pipe.enable_group_offload(onload_device=cpu, offload_device=cpu, **kind)
    assert close(draw(pipe), expected)
    load_adapter(pipe, lora(tmp_path, mixing=True))
    with_adapter = draw(pipe)
    plain = pipeline(cls)
    load_adapter(plain, tmp_path)
    assert close(with_adapter, draw(plain)) and not close(with_adapter, expected)


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


def test_fp8_storage_and_fused_projections_in_a_pipeline():
    pipe = pipeline()
    plain = draw(pipe)
    pipe.transformer.fuse_qkv_projections()
    assert close(draw(pipe), plain)
    pipe.transformer.unfuse_qkv_projections()
    pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert (draw(pipe) - plain).abs().mean() < 0.1


def test_a_pushed_pipeline_says_how_it_is_loaded(tmp_path):
    pipe = pipeline()
    pipe.save_pretrained(tmp_path)
    pipe.amend_card(tmp_path, "owner/name")
    card = (tmp_path / "README.md").read_text()
    assert f'{IMPORT_LINE}\n\npipe = mhla_diffusion.load_pipeline("owner/name", hub=True)' in card
    assert type(load_pipeline(tmp_path)) is MHLASanaPipeline  # a card beside it disturbs nothing


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
