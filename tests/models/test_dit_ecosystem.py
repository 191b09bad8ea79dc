"""What Diffusers users do with a transformer works on DiT with MHLA, the stock class of which knows none of it."""

import pytest
import torch
from accelerate import infer_auto_device_map
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.models.attention_processor import AttnProcessor2_0
from peft import LoraConfig, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict
from tiny_dit import EVERYTHING, model, relative, run, stirred, stock_transformer, transformer_inputs

from mhla_diffusion.attention import MHLAAttnProcessor
from mhla_diffusion.models.dit import MHLADiTTransformer2DModel

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def test_a_lora_can_be_trained_on_every_attention():
    ours = model()
    ours.add_adapter(LoraConfig(r=2, target_modules=TARGETS))
    trained = {name: p for name, p in ours.named_parameters() if "lora_" in name}
    assert len(trained) == 2 * 4 * 2  # layers, projections, A and B
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_B" in name:  # zero at first, which would keep A's gradient zero
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    run(ours).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained.values())


@torch.no_grad()
def test_a_lora_made_on_the_stock_model_attaches_fully_and_scales():
    """The stock DiT has no adapter methods, so PEFT puts it in; ours takes the same weights with Diffusers' own."""
    stock = inject_adapter_in_model(
        LoraConfig(r=2, lora_alpha=2, target_modules=TARGETS), stock_transformer()
    )
    for name, parameter in stock.named_parameters():
        if "lora_" in name:
            parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    made = get_peft_model_state_dict(stock)
    expected = run(stock)

    ours = model(mhla_layers=[])
    without = run(ours)
    ours.load_lora_adapter(made, prefix=None)
    attached = [name for name, _ in ours.named_parameters() if "lora_" in name]
    assert len(made) == len(attached) == 2 * 8
    assert relative(run(ours), expected) < 1e-6 and relative(expected, without) > 1e-2
    assert relative(run(ours, **transformer_inputs(), cross_attention_kwargs={"scale": 0.0}), without) < 1e-6
    ours.unload_lora()
    assert torch.equal(run(ours), without)
    mhla = model()
    mhla.load_lora_adapter(made, prefix=None)
    assert len([name for name, _ in mhla.named_parameters() if "lora_" in name]) == 2 * 8


class CountingProcessor(MHLAAttnProcessor):
    calls = 0

    def __call__(self, *args, **kwargs):
        CountingProcessor.calls += 1
        return super().__call__(*args, **kwargs)


PYRAMID = PyramidAttentionBroadcastConfig(
    spatial_attention_block_skip_range=2,
    spatial_attention_block_identifiers=("transformer_blocks",),
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
    for layer in ours.transformer_blocks:
        layer.attn1.set_processor(CountingProcessor())
    ours.enable_cache(config)
    for step, count in enumerate(computed):
        inputs = transformer_inputs(seed=step)
        CountingProcessor.calls = 0
        with ours.cache_context("cond_uncond", step_index=step, num_inference_steps=4):
            out = run(ours, **inputs)
        assert CountingProcessor.calls == count and out.isfinite().all()
        if step == 0 or computed == [3, 3, 3]:
            assert relative(out, run(plain, **inputs)) < 1e-6
    ours.disable_cache()
    assert torch.equal(run(ours), run(plain))


@torch.no_grad()
@pytest.mark.parametrize("kind", [{"offload_type": "leaf_level"}, {"num_blocks_per_group": 1}])
def test_group_offload_finds_every_weight_where_it_is_used(kind):
    ours = stirred(model(**EVERYTHING))
    expected = run(ours)
    cpu = torch.device("cpu")
    ours.enable_group_offload(onload_device=cpu, offload_device=cpu, **kind)
    assert torch.equal(run(ours), expected)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("kind", [{"offload_type": "leaf_level"}, {"num_blocks_per_group": 1}])
def test_group_offload_on_a_gpu_gives_the_same_output(kind):
    ours = stirred(model(**EVERYTHING)).to("cuda")
    inputs = {name: value.cuda() for name, value in transformer_inputs().items()}
    expected = run(ours, **inputs)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    ours.enable_group_offload(onload_device=cuda, offload_device=cpu, **kind)
    assert relative(run(ours, **inputs), expected) < 1e-5


@torch.no_grad()
def test_layerwise_casting_leaves_the_mixing_alone():
    ours = model()
    ours.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert ours.transformer_blocks[0].attn1.to_q.weight.dtype == torch.float8_e4m3fn
    assert ours.transformer_blocks[0].attn1.mixing.weight.dtype == torch.float32
    assert run(ours).isfinite().all()


@torch.no_grad()
def test_a_device_map_never_cuts_a_layer_and_reaches_the_disk(tmp_path):
    ours = stirred(model(num_layers=3, **EVERYTHING))
    ours.save_pretrained(tmp_path / "model")
    size = sum(parameter.nbytes for parameter in ours.transformer_blocks[0].parameters())
    mapped = infer_auto_device_map(
        ours, {"cpu": 3 * size, "disk": 1 << 30}, no_split_module_classes=ours._no_split_modules
    )
    layers = [name for name in mapped if name.startswith("transformer_blocks")]
    assert len(layers) == 3 and all(name.count(".") == 1 for name in layers)
    assert {mapped[name] for name in layers} == {"cpu", "disk"}
    places = dict.fromkeys([name for name, _ in ours.named_children() if name != "transformer_blocks"], "cpu")
    places |= {f"transformer_blocks.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
    spread = MHLADiTTransformer2DModel.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert spread.transformer_blocks[1].attn1.mixing.weight.is_meta
    assert relative(run(spread), run(ours)) < 1e-6


@torch.no_grad()
def test_fused_projections_give_the_same_and_are_not_saved(tmp_path):
    ours = stirred(model(**EVERYTHING))
    expected, keys = run(ours), ours.state_dict().keys()
    ours.fuse_qkv_projections()
    used = []
    ours.transformer_blocks[0].attn1.to_qkv.register_forward_hook(lambda *_: used.append(1))
    assert relative(run(ours), expected) < 1e-6 and used
    ours.save_pretrained(tmp_path)
    assert MHLADiTTransformer2DModel.from_pretrained(tmp_path).state_dict().keys() == keys
    ours.unfuse_qkv_projections()
    assert ours.state_dict().keys() == keys


def pairs(seed: int, rank: int = 2) -> dict[str, torch.Tensor]:
    """LoRA weights as a file holds them."""
    trained = model()
    trained.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS))
    draw = torch.Generator().manual_seed(seed)
    made = get_peft_model_state_dict(trained)
    return {f"transformer.{name}": torch.randn(x.shape, generator=draw) for name, x in made.items()}


def test_only_plain_projections_are_fused():
    class Quantised(torch.nn.Linear):
        """As the 4 and 8 bit layers are."""

    ours = model()
    ours.transformer_blocks[1].attn1.to_k = Quantised(16, 16)
    with pytest.raises(ValueError, match="copies plain linear layers"):
        ours.fuse_qkv_projections()
    assert not any(layer.attn1.fused_projections for layer in ours.transformer_blocks)


@torch.no_grad()
def test_a_lora_is_swapped_fused_and_refused_when_it_has_no_place():
    ours = stirred(model())
    without = run(ours)
    ours.load_lora_adapter(pairs(1), adapter_name="style")
    first = run(ours)
    ours.load_lora_adapter(pairs(2), adapter_name="style", hotswap=True)
    second = run(ours)
    assert relative(first, without) > 1e-2 and relative(second, first) > 1e-2
    ours.fuse_lora()
    assert relative(run(ours), second) < 1e-5
    ours.unfuse_lora()
    ours.unload_lora()
    assert relative(run(ours), without) < 1e-5
    foreign = {name.replace("blocks.1", "blocks.7"): x for name, x in pairs(1).items()}
    with pytest.raises(ValueError, match="8 of its 16 weights have no place") as caught:
        ours.load_lora_adapter(foreign)
    assert "\n" not in str(caught.value)
    assert not any("lora_" in name for name, _ in ours.named_parameters())


def test_processors_can_be_listed_and_a_foreign_one_for_all_is_refused():
    ours = model(mhla_layers=[0])
    before = {name: type(processor) for name, processor in ours.attn_processors.items()}
    assert sorted(before) == [f"transformer_blocks.{i}.attn1.processor" for i in range(2)]
    with pytest.raises(ValueError, match="restore"):
        ours.set_attn_processor(AttnProcessor2_0())
    assert {name: type(processor) for name, processor in ours.attn_processors.items()} == before


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_by_inductor_in_one_graph_on_the_gpu(regional):
    torch._dynamo.reset()
    ours = stirred(model(mhla_layers=[0], **EVERYTHING)).to("cuda")
    inputs = {name: x.to("cuda") for name, x in transformer_inputs().items()}
    expected = run(ours, **inputs)
    (ours.compile_repeated_blocks if regional else ours.compile)(fullgraph=True)
    assert relative(run(ours, **inputs), expected) < 1e-4


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("size", [(8, 8), (10, 14)])
def test_half_precision_on_the_gpu_stays_close_to_float32_on_the_cpu(size):
    expected = run(stirred(model(**EVERYTHING)), **transformer_inputs(size=size))
    for dtype in (torch.bfloat16, torch.float16):
        ours = stirred(model(**EVERYTHING)).to("cuda", dtype)
        inputs = transformer_inputs(size=size, dtype=dtype)
        out = run(ours, **{name: x.to("cuda") for name, x in inputs.items()})
        assert relative(out.cpu().float(), expected) < 3e-2


@pytest.mark.gpu  # where the extra `quantize` is installed
@torch.no_grad()
def test_torchao_quantises_the_linear_layers_and_leaves_the_mixing():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    ours = stirred(model(**EVERYTHING))
    expected = run(ours)
    quantize_(ours.to("cuda"), Int8WeightOnlyConfig(version=2))
    attention = ours.transformer_blocks[0].attn1
    assert type(attention.to_q.weight).__name__ == "Int8Tensor"
    assert attention.mixing.weight.dtype == torch.float32
    inputs = {name: x.to("cuda") for name, x in transformer_inputs().items()}
    assert 0 < relative(run(ours, **inputs).cpu(), expected) < 5e-2
