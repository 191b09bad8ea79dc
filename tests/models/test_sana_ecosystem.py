"""What Diffusers users do with a transformer works on ours: caches, fused projections, offload, quantisation, cards."""

import pytest
import torch
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SanaTransformer2DModel,
    TaylorSeerCacheConfig,
    TorchAoConfig,
)
from model_checks import relative
from peft import LoraConfig
from safetensors import safe_open
from tiny_sana import stock_transformer, transformer_inputs

from mhla_diffusion.models.convert import convert
from mhla_diffusion.models.model_card import IMPORT_LINE, with_import_line
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERYTHING = {"gate": True, "local_conv": 3, "norm_out": True}


def model(**options) -> MHLASanaTransformer2DModel:
    """Three layers: MHLA, MHLA, softmax, with every weight off its start."""
    ours = convert(stock_transformer(num_layers=3), layers=[0, 1], other_layers="softmax", **options)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.05 * torch.rand(parameter.shape, generator=draw)
    return ours.eval()


def run(target: torch.nn.Module, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    where = next(target.parameters()).device
    place = "cpu" if where.type == "meta" else where
    inputs = {name: value.to(place) for name, value in transformer_inputs(seed=seed, dtype=dtype).items()}
    with torch.no_grad():
        return target(**inputs).sample


def mixings_read(target: MHLASanaTransformer2DModel) -> list[int]:
    """Grows by a layer's index whenever that layer's mixing is read."""
    seen = []
    for index in (0, 1):
        mixing = target.transformer_blocks[index].attn1.mixing
        mixing.register_forward_hook(lambda *_, index=index: seen.append(index))
    return seen


NEVER, OFTEN = "never", "often"
CACHES = {
    "first block": {
        NEVER: lambda: FirstBlockCacheConfig(threshold=0.0),
        OFTEN: lambda: FirstBlockCacheConfig(threshold=1e9),
    },
    "magnitude": {
        NEVER: lambda: MagCacheConfig(threshold=0.0, mag_ratios=[0.5] * 4, num_inference_steps=4),
        OFTEN: lambda: MagCacheConfig(
            threshold=9.0, mag_ratios=[1.0] * 4, num_inference_steps=4, retention_ratio=0.25
        ),
    },
    "taylor": {
        NEVER: lambda: TaylorSeerCacheConfig(disable_cache_before_step=9),
        OFTEN: lambda: TaylorSeerCacheConfig(
            cache_interval=4, disable_cache_before_step=1, taylor_factors_dtype=torch.float32
        ),
    },
    "attention broadcast": {
        NEVER: lambda: broadcast(1),
        OFTEN: lambda: broadcast(2),
    },
}


def broadcast(every: int) -> PyramidAttentionBroadcastConfig:
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=every, current_timestep_callback=lambda: 500
    )


def four_steps(target: MHLASanaTransformer2DModel) -> list[torch.Tensor]:
    return [run(target, seed) for seed in range(4)]


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_never_skips_changes_nothing_and_one_that_does_skips_our_layers(name):
    """Called as SANA's pipelines call it: without a context that names the denoising call."""
    plain = four_steps(model())
    never = model()
    never.enable_cache(CACHES[name][NEVER]())
    assert all(relative(a, b) < 1e-6 for a, b in zip(four_steps(never), plain, strict=True))

    often = model()
    read = mixings_read(often)
    often.enable_cache(CACHES[name][OFTEN]())
    first = four_steps(often)
    computed = len(read)
    assert 2 <= computed < 8 and relative(first[0], plain[0]) < 1e-6
    assert all(x.isfinite().all() for x in first) and max(map(relative, first, plain)) > 1e-6
    often._reset_stateful_cache()  # as every pipeline does when a picture is done
    assert all(torch.equal(a, b) for a, b in zip(four_steps(often), first, strict=True))
    often.disable_cache()
    assert all(relative(a, b) < 1e-6 for a, b in zip(four_steps(often), plain, strict=True))


def test_two_denoising_calls_a_step_do_not_share_a_cache():
    ours, plain = model(), model()
    ours.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    for seed in range(2):
        for name, other in (("cond", 10), ("uncond", 20)):
            with ours.cache_context(name):
                assert relative(run(ours, seed + other), run(plain, seed + other)) < 1e-6


@pytest.mark.parametrize("options", [{}, EVERYTHING])
def test_fused_projections_give_the_same_and_are_not_saved(options, tmp_path):
    ours = model(**options)
    expected, keys = run(ours), ours.state_dict().keys()
    ours.fuse_qkv_projections()
    used = []
    ours.transformer_blocks[0].attn1.to_qkv.register_forward_hook(lambda *_: used.append(1))
    assert relative(run(ours), expected) < 1e-6 and used
    attn = ours.transformer_blocks[0].attn1
    assert {
        part.weight.untyped_storage().data_ptr() for part in (attn.to_q, attn.to_k, attn.to_v, attn.to_qkv)
    } == {attn.to_qkv.weight.data_ptr()}
    ours.save_pretrained(tmp_path)
    again = MHLASanaTransformer2DModel.from_pretrained(tmp_path)
    assert again.state_dict().keys() == keys and relative(run(again), expected) < 1e-6
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert relative(run(compiled), expected) < 1e-6
    ours.unfuse_qkv_projections()
    assert ours.state_dict().keys() == keys and relative(run(ours), expected) < 1e-6


def test_a_softmax_backend_reaches_the_softmax_layers():
    ours = model()
    expected = run(ours)
    ours.set_attention_backend("_native_math")
    backends = [
        getattr(block.attn1.processor, "_attention_backend", None) for block in ours.transformer_blocks
    ]
    assert backends[:2] == [None, None] and backends[2] == "_native_math"
    assert relative(run(ours), expected) < 1e-5


def test_projections_with_a_lora_are_not_fused():
    ours = model()
    ours.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(ValueError, match="fuse_lora"):
        ours.fuse_qkv_projections()
    fused = model()
    fused.fuse_qkv_projections()
    with pytest.raises(ValueError, match="unfuse_qkv_projections"):
        fused.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(ValueError, match="unfuse_qkv_projections"):
        fused.load_lora_adapter(
            {"transformer_blocks.0.attn1.to_q.lora_A.weight": torch.ones(2, 16)}, prefix=None
        )


def test_the_whole_model_and_its_layers_compile_without_a_graph_break():
    torch._dynamo.reset()
    ours = model(**EVERYTHING)
    explained = torch._dynamo.explain(ours)(**transformer_inputs())
    assert explained.graph_break_count == 0 and explained.graph_count == 1
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    expected = run(ours)
    ours.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert relative(run(ours), expected) < 1e-6
    # One for each kind of layer, and one for the first layer, whose input is laid out channel by channel.
    assert counters["stats"]["unique_graphs"] == 3


def test_a_swapped_lora_needs_no_new_graph(tmp_path):
    torch._dynamo.reset()
    sources = []
    for seed in range(2):
        trained = model()
        trained.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]))
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(generator=torch.Generator().manual_seed(seed))
        trained.save_lora_adapter(tmp_path / str(seed))
        sources.append((tmp_path / str(seed), run(trained)))
    ours = model()
    ours.load_lora_adapter(sources[0][0], prefix=None, adapter_name="style")
    ours.compile(fullgraph=True, backend="aot_eager")
    assert relative(run(ours), sources[0][1]) < 1e-6
    with torch._dynamo.config.patch(error_on_recompile=True):
        ours.load_lora_adapter(sources[1][0], prefix=None, adapter_name="style", hotswap=True)
        assert relative(run(ours), sources[1][1]) < 1e-6


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_storage_keeps_mixing_and_norms(storage):
    ours = model(**EVERYTHING)
    expected = run(ours)
    ours.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)
    attention = ours.transformer_blocks[0].attn1
    kept = {name for name, p in attention.named_parameters() if p.dtype == torch.float32}
    assert kept == {"mixing.weight", "norm_out.weight"}
    assert relative(run(ours), expected) < 0.3
    assert {name for name, p in attention.named_parameters() if p.dtype == torch.float32} == kept


@pytest.mark.filterwarnings("ignore:The following device_map keys:UserWarning")
def test_shards_go_to_chosen_devices_and_to_the_disk(tmp_path):
    ours = model(**EVERYTHING)
    ours.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    expected = run(ours)
    whole = MHLASanaTransformer2DModel.from_pretrained(tmp_path / "model", device_map={"": "cpu"})
    assert relative(run(whole), expected) < 1e-6
    names = {name.split(".")[0] for name in ours.state_dict()}
    places = dict.fromkeys(names - {"transformer_blocks"}, "cpu")
    places |= {f"transformer_blocks.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
    spread = MHLASanaTransformer2DModel.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert spread.transformer_blocks[1].attn1.mixing.weight.is_meta
    assert relative(run(spread), expected) < 1e-6


def test_a_single_file_is_read_by_the_stock_class_and_converted(tmp_path):
    """In Diffusers' own layout; test_single_file.py has what our classes read."""
    stock = stock_transformer()
    stock.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    read = SanaTransformer2DModel.from_single_file(str(file), config=str(tmp_path), local_files_only=True)
    assert relative(run(convert(read)), run(convert(stock))) < 1e-6


def test_a_card_gets_the_import_line_once(tmp_path):
    ours = model()
    ours.amend_card(tmp_path, "owner/name")
    card = (tmp_path / "README.md").read_text()
    assert f"{IMPORT_LINE}\n" in card and 'MHLASanaTransformer2DModel.from_pretrained("owner/name")' in card
    ours.amend_card(tmp_path, "owner/name")
    assert (tmp_path / "README.md").read_text() == card
    made = "---\nlibrary_name: diffusers\n---\n\n# A card\n"
    text = with_import_line(made, "owner/name", "MHLASanaPipeline", is_pipeline=True)
    assert text.startswith(made.rstrip()) and 'mhla_diffusion.load_pipeline("owner/name", hub=True)' in text
    assert text.count(IMPORT_LINE) == 1


def test_saved_files_say_that_they_are_pytorch(tmp_path):
    model().save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "pt"


@pytest.mark.gpu  # where the extra `quantize` is installed; nothing in it needs a GPU
@pytest.mark.parametrize("live", [True, False])
def test_torchao_quantises_the_linear_layers_and_leaves_the_mixing(live, tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    ours = model(**EVERYTHING)
    expected, mixing = run(ours), ours.transformer_blocks[0].attn1.mixing.weight.detach().clone()
    if live:
        quantize_(ours.to(DEVICE), Int8WeightOnlyConfig(version=2))
    else:
        ours.save_pretrained(tmp_path)
        ours = MHLASanaTransformer2DModel.from_pretrained(
            tmp_path,
            quantization_config=TorchAoConfig(Int8WeightOnlyConfig(version=2)),
            torch_dtype=torch.bfloat16,
        ).to(DEVICE)
    attention = ours.transformer_blocks[0].attn1
    for layer in (attention.to_q, attention.to_out[0], attention.to_gate):
        assert type(layer.weight).__name__ == "Int8Tensor"
    assert type(attention.mixing.weight) is torch.nn.Parameter
    assert torch.equal(attention.mixing.weight.cpu(), mixing) and mixing.dtype == torch.float32
    out = run(ours, dtype=torch.float32 if live else torch.bfloat16)
    assert 0 < relative(out.cpu().float(), expected) < (2e-2 if live else 5e-2)
