"""What Diffusers users do with a Wan transformer works on ours."""

import pytest
import torch
from accelerate import cpu_offload, infer_auto_device_map
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from tiny_wan import EVERYTHING, model, relative, run, stirred, stock_transformer, transformer_inputs
from torch.utils._python_dispatch import TorchDispatchMode

from mhla_diffusion.models.adapters import load_adapter, save_adapter
from mhla_diffusion.models.convert import convert
from mhla_diffusion.models.wan import MHLAWanRotaryPosEmbed, MHLAWanTransformer3DModel
from mhla_diffusion.wan_attention import MHLAWanAttnProcessor

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
HYBRID = {"mhla_layers": [1], **EVERYTHING}


def test_a_lora_can_be_trained_on_every_attention():
    ours = model(mhla_layers=[1])
    ours.add_adapter(LoraConfig(r=2, target_modules=TARGETS))
    trained = {name: p for name, p in ours.named_parameters() if "lora_" in name}
    assert len(trained) == 2 * 2 * 4 * 2  # layers, self- and cross-attention, projections, A and B
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_B" in name:  # zero at first, which would keep A's gradient zero
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    run(ours).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained.values())


def stock_lora(folder, seed: int = 0) -> tuple[dict, torch.Tensor]:
    """A LoRA made and saved with stock classes, and what the stock model computes with it."""
    stock = stock_transformer()
    stock.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=TARGETS))
    with torch.no_grad():
        for number, (name, parameter) in enumerate(stock.named_parameters()):
            if "lora_" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(seed + number))
    made = get_peft_model_state_dict(stock)
    WanPipeline.save_lora_weights(folder, transformer_lora_layers=made)
    with torch.no_grad():
        return made, run(stock)


@torch.no_grad()
def test_a_lora_made_on_the_stock_model_attaches_fully(tmp_path):
    made, expected = stock_lora(tmp_path)
    for ours in (model(mhla_layers=[]), convert(stock_transformer(), (2, 2, 3))):
        without = run(ours)
        pipe = WanPipeline(None, None, None, None, transformer=ours)
        pipe.load_lora_weights(tmp_path)
        attached = {name: p for name, p in ours.named_parameters() if "lora_" in name}
        assert len(made) == len(attached) == 2 * 16 and all(p.any() for p in attached.values())
        assert relative(run(ours), without) > 1e-3
        if ours.config.mhla_layers == []:
            assert relative(run(ours), expected) < 1e-6
        pipe.unload_lora_weights()
        assert torch.equal(run(ours), without)


@torch.no_grad()
def test_a_lora_in_the_original_names_attaches_as_well(tmp_path):
    """As programs around the original Wan code write it."""
    draw = torch.Generator().manual_seed(3)
    state = {}
    for i in range(2):
        for part in ("self_attn", "cross_attn"):
            for x in "qkvo":
                name = f"diffusion_model.blocks.{i}.{part}.{x}"
                state[f"{name}.lora_A.weight"] = torch.randn(2, 24, generator=draw)
                state[f"{name}.lora_B.weight"] = torch.randn(24, 2, generator=draw)
    ours = model()
    without = run(ours)
    load_adapter(ours, state_file(state, tmp_path))
    assert len([name for name, _ in ours.named_parameters() if "lora_" in name]) == 32
    assert relative(run(ours), without) > 1e-3


def state_file(state: dict, folder):
    save_file(state, folder / "pytorch_lora_weights.safetensors")
    return folder


@torch.no_grad()
def test_an_adapter_carries_lora_pairs_and_new_weights(tmp_path):
    ours = model(mhla_layers=[1], mhla_gate=True).requires_grad_(False)
    ours.add_adapter(LoraConfig(r=2, target_modules=TARGETS))
    ours.blocks[1].attn1.mixing.requires_grad_(True)
    stirred(ours)
    path = save_adapter(ours, tmp_path)
    fresh = model(mhla_layers=[1], mhla_gate=True)
    before = run(fresh)
    load_adapter(fresh, path)
    assert torch.equal(fresh.blocks[1].attn1.mixing.weight, ours.blocks[1].attn1.mixing.weight)
    assert len([name for name, _ in fresh.named_parameters() if "lora_" in name]) == 32
    fresh.unload_lora()
    assert torch.equal(run(fresh), before)


class CountingProcessor(MHLAWanAttnProcessor):
    calls = 0

    def __call__(self, *args, **kwargs):
        CountingProcessor.calls += 1
        return super().__call__(*args, **kwargs)


PYRAMID = PyramidAttentionBroadcastConfig(
    spatial_attention_block_skip_range=2,
    spatial_attention_block_identifiers=("blocks",),
    current_timestep_callback=lambda: 500,
)


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "computed"),
    [
        (FirstBlockCacheConfig(threshold=0.0), [3, 3, 3]),
        (FirstBlockCacheConfig(threshold=1e3), [3, 1, 1]),
        (PYRAMID, [3, 0, 3]),
        (
            MagCacheConfig(mag_ratios=[1.0] * 4, num_inference_steps=4, threshold=1e3, retention_ratio=0.1),
            [3, 0, 0],
        ),
        (TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1), [3, 0, 3]),
    ],
    ids=["first block, none", "first block", "pyramid attention broadcast", "mag", "taylor"],
)
def test_caches_leave_out_what_they_should(config, computed):
    ours, plain = model(num_layers=3), model(num_layers=3)
    for layer in ours.blocks:
        layer.attn1.set_processor(CountingProcessor())
    ours.enable_cache(config)
    for step, count in enumerate(computed):
        inputs = transformer_inputs(seed=step)
        CountingProcessor.calls = 0
        with ours.cache_context("cond", step_index=step, num_inference_steps=4):
            out = run(ours, **inputs)
        assert CountingProcessor.calls == count and out.isfinite().all()
        if step == 0 or computed == [3, 3, 3]:
            assert relative(out, run(plain, **inputs)) < 1e-6
    ours.disable_cache()
    assert torch.equal(run(ours), run(plain))


@torch.no_grad()
@pytest.mark.parametrize("kind", [{"offload_type": "leaf_level"}, {"num_blocks_per_group": 1}])
def test_group_offload_finds_every_weight_where_it_is_used(kind):
    ours = stirred(model(**HYBRID))
    expected = run(ours)
    cpu = torch.device("cpu")
    ours.enable_group_offload(onload_device=cpu, offload_device=cpu, **kind)
    assert torch.equal(run(ours), expected)


@torch.no_grad()
def test_weights_that_are_there_only_while_their_module_runs_are_enough():
    """As under sequential offload: outside of its own forward every module's weights are on the meta device."""
    for options in (
        HYBRID,
        {"mhla_norm_across_heads": True},
        {"mhla_layers": [0], "mhla_other_layers": "softmax"},
    ):
        ours = stirred(model(**options))
        expected = run(ours)
        cpu_offload(ours, torch.device("cpu"))
        attention = next(layer.attn1 for layer in ours.blocks if hasattr(layer.attn1, "mixing"))
        assert attention.mixing.weight.is_meta and attention.norm_q.weight.is_meta
        assert torch.equal(run(ours), expected)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("kind", [{"offload_type": "leaf_level"}, {"num_blocks_per_group": 1}])
def test_group_offload_on_a_gpu_gives_the_same_output(kind):
    ours = stirred(model(**HYBRID)).to("cuda")
    inputs = {name: value.cuda() for name, value in transformer_inputs().items()}
    expected = run(ours, **inputs)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    ours.enable_group_offload(onload_device=cuda, offload_device=cpu, **kind)
    assert relative(run(ours, **inputs), expected) < 1e-5


@torch.no_grad()
def test_layerwise_casting_leaves_mixing_norms_and_frequencies_alone():
    ours = model(**HYBRID)
    frequencies = ours.rope.frequencies.clone()
    ours.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    attention = ours.blocks[1].attn1
    assert attention.to_q.weight.dtype == attention.local_conv.weight.dtype == torch.float8_e4m3fn
    assert {x.weight.dtype for x in (attention.mixing, attention.norm_q, attention.norm_out)} == {
        torch.float32
    }
    assert torch.equal(ours.rope.frequencies, frequencies)
    assert run(ours).isfinite().all()


@torch.no_grad()
def test_the_mixing_stays_in_float32_in_a_half_precision_model(tmp_path):
    ours = model(mhla_layers=[1], mhla_gate=True)
    expected = run(ours)
    ours.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        half = MHLAWanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=dtype)
        assert half.dtype == dtype and half.blocks[1].attn1.mixing.weight.dtype == torch.float32
        assert half.blocks[0].scale_shift_table.dtype == torch.float32  # stock keeps it so
        assert relative(run(half, **transformer_inputs(dtype=dtype)).float(), expected) < 2e-2


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The following device_map keys")
def test_a_device_map_never_cuts_a_layer_and_reaches_the_disk(tmp_path):
    ours = stirred(model(num_layers=3, **EVERYTHING))
    ours.save_pretrained(tmp_path / "model")
    size = sum(parameter.nbytes for parameter in ours.blocks[0].parameters())
    mapped = infer_auto_device_map(
        ours, {"cpu": 3 * size, "disk": 1 << 30}, no_split_module_classes=ours._no_split_modules
    )
    layers = [name for name in mapped if name.startswith("blocks")]
    assert len(layers) == 3 and all(name.count(".") == 1 for name in layers)
    places = dict.fromkeys([name for name, _ in ours.named_children() if name != "blocks"], "cpu")
    places |= {f"blocks.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
    places["scale_shift_table"] = "cpu"  # the model's own parameter, in no submodule
    spread = MHLAWanTransformer3DModel.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert spread.blocks[1].attn1.mixing.weight.is_meta
    assert relative(run(spread), run(ours)) < 1e-6


@torch.no_grad()
def test_fused_projections_give_the_same_and_are_not_saved(tmp_path):
    ours = stirred(model(**HYBRID))
    expected, keys = run(ours), ours.state_dict().keys()
    ours.fuse_qkv_projections()
    used = []
    ours.blocks[1].attn1.to_qkv.register_forward_hook(lambda *_: used.append(1))
    assert relative(run(ours), expected) < 1e-6 and used
    ours.save_pretrained(tmp_path)
    assert MHLAWanTransformer3DModel.from_pretrained(tmp_path).state_dict().keys() == keys
    ours.unfuse_qkv_projections()
    assert ours.state_dict().keys() == keys


def test_processors_can_be_listed_and_a_foreign_one_for_all_is_refused():
    ours = model(mhla_layers=[0])
    before = {name: type(processor) for name, processor in ours.attn_processors.items()}
    assert sorted(before) == sorted(f"blocks.{i}.{x}.processor" for i in range(2) for x in ("attn1", "attn2"))
    with pytest.raises(ValueError, match="restore"):
        ours.set_attn_processor(WanAttnProcessor())
    assert {name: type(processor) for name, processor in ours.attn_processors.items()} == before


def test_the_stock_class_is_told_apart_by_the_config(tmp_path):
    """Diffusers drops weights that a class does not know with a log line; the file says whose they are."""
    model().save_pretrained(tmp_path)
    assert WanTransformer3DModel.load_config(tmp_path)["_class_name"] == "MHLAWanTransformer3DModel"
    assert isinstance(MHLAWanTransformer3DModel.from_pretrained(tmp_path), WanTransformer3DModel)


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        assert getattr(out, "dtype", None) != torch.float64, f"{function.name()} makes a float64 tensor"
        return out


def test_no_float64_tensor_is_made_for_positions_where_a_device_has_none(monkeypatch):
    """Apple and NPU devices raise on float64. `exact_dtype` says the same to the operator, see test_wan.py."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)  # what stock Wan asks
    with NoFloat64():
        rope = MHLAWanRotaryPosEmbed(12, (1, 2, 2), 64)
        assert rope(torch.zeros(1, 4, 5, 8, 12)).grid == (5, 4, 6)


@torch.no_grad()
def test_a_backend_for_the_softmax_layers_leaves_mhla_alone():
    ours = stirred(model(**HYBRID))
    expected = run(ours)
    ours.set_attention_backend("native")
    assert relative(run(ours), expected) < 1e-6
    assert ours.blocks[0].attn1.processor._attention_backend == "native"
    with pytest.raises(ValueError, match="mhla convert .* --block-grid 3,5,10"):
        MHLAWanTransformer3DModel.from_single_file("wan.safetensors")


@pytest.mark.parametrize("options", [HYBRID, {"mhla_layers": [0], "mhla_other_layers": "softmax"}])
def test_training_under_autocast_reaches_every_weight(options):
    ours = stirred(model(**options)).train()
    with torch.no_grad():
        expected = run(ours)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(ours)
    assert relative(out.float(), expected) < 3e-2
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())


@pytest.mark.gpu
@torch.no_grad()
def test_a_model_on_the_gpu_converts_there():
    converted = stirred(convert(stock_transformer().to("cuda"), (2, 2, 3), layers="1/2", gate=True))
    inputs = {name: x.to("cuda") for name, x in transformer_inputs().items()}
    out = run(converted, **inputs)
    converted.set_mhla_backend("reference")
    assert relative(out, run(converted, **inputs)) < 1e-5


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_by_inductor_in_one_graph_on_the_gpu(regional):
    torch._dynamo.reset()
    ours = stirred(model(**HYBRID)).to("cuda")
    inputs = {name: x.to("cuda") for name, x in transformer_inputs().items()}
    expected = run(ours, **inputs)
    (ours.compile_repeated_blocks if regional else ours.compile)(fullgraph=True)
    assert relative(run(ours, **inputs), expected) < 1e-4


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("size", [(5, 8, 12), (7, 10, 14)])
def test_half_precision_on_the_gpu_stays_close_to_float32_on_the_cpu(size):
    expected = run(stirred(model(**HYBRID)), **transformer_inputs(size=size))
    for dtype in (torch.bfloat16, torch.float16):
        ours = stirred(model(**HYBRID)).to("cuda", dtype)
        inputs = transformer_inputs(size=size, dtype=dtype)
        out = run(ours, **{name: x.to("cuda") for name, x in inputs.items()})
        assert relative(out.cpu().float(), expected) < 3e-2


@pytest.mark.gpu
@torch.no_grad()
def test_the_fused_kernels_equal_the_reference_on_the_gpu_at_the_ragged_default():
    ours = stirred(model(num_layers=1, attention_head_dim=128, mhla_block_grid=(3, 5, 10), **EVERYTHING)).to(
        "cuda"
    )
    inputs = {name: x.to("cuda") for name, x in transformer_inputs(batch=1, size=(21, 60, 104)).items()}
    out = run(ours, **inputs)
    ours.set_mhla_backend("reference")
    assert relative(out, run(ours, **inputs)) < 1e-5
