"""What Diffusers users do with a SANA-Video transformer works on ours, and caches and regional compilation besides."""

import pytest
import torch
from accelerate import cpu_offload, infer_auto_device_map
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
    TaylorSeerCacheConfig,
)
from diffusers.models.transformers.transformer_sana_video import SanaLinearAttnProcessor3_0
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from tiny_sana_video import EVERYTHING, model, run, stock_transformer, transformer_inputs
from tiny_wan import relative, stirred

from mhla_diffusion.models.adapters import load_adapter, save_adapter
from mhla_diffusion.models.convert import convert
from mhla_diffusion.models.sana_video import MHLASanaVideoTransformer3DModel
from mhla_diffusion.sana_video_attention import MHLASanaVideoAttnProcessor

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
HYBRID = {"mhla_layers": [1], **EVERYTHING}


@torch.no_grad()
def test_a_lora_made_on_the_stock_model_attaches_fully(tmp_path):
    stock = stock_transformer()
    stock.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=TARGETS))
    for number, (name, parameter) in enumerate(stock.named_parameters()):
        if "lora_" in name:
            parameter.normal_(generator=torch.Generator().manual_seed(number))
    made = get_peft_model_state_dict(stock)
    SanaVideoPipeline.save_lora_weights(tmp_path, transformer_lora_layers=made)
    expected = run(stock)
    for ours in (model(mhla_layers=[]), convert(stock_transformer(), (1, 1, 1))):
        without = run(ours)
        pipe = SanaVideoPipeline(None, None, None, ours, None)
        pipe.load_lora_weights(tmp_path)
        attached = {name: p for name, p in ours.named_parameters() if "lora_" in name}
        assert len(made) == len(attached) == 2 * 16 and all(p.any() for p in attached.values())
        assert relative(run(ours), without) > 1e-3 and relative(run(ours), expected) < 1e-5
        pipe.unload_lora_weights()
        assert torch.equal(run(ours), without)


def test_an_adapter_carries_lora_pairs_and_new_weights(tmp_path):
    ours = model(mhla_layers=[1], mhla_gate=True).requires_grad_(False)
    ours.add_adapter(LoraConfig(r=2, target_modules=TARGETS))
    ours.transformer_blocks[1].attn1.mixing.requires_grad_(True)
    stirred(ours)
    run(ours).square().sum().backward()
    assert all(p.grad is not None for p in ours.parameters() if p.requires_grad)
    path = save_adapter(ours, tmp_path)
    fresh = model(mhla_layers=[1], mhla_gate=True)
    with torch.no_grad():
        before = run(fresh)
        load_adapter(fresh, path)
        mixings = [made.transformer_blocks[1].attn1.mixing.weight for made in (fresh, ours)]
        assert torch.equal(*mixings)
        assert len([name for name, _ in fresh.named_parameters() if "lora_" in name]) == 32
        fresh.unload_lora()
        assert torch.equal(run(fresh), before)


class CountingProcessor(MHLASanaVideoAttnProcessor):
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
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("config", "computed"),
    [
        (FirstBlockCacheConfig(threshold=1e3), [3, 1, 1]),
        (PYRAMID, [3, 0, 3]),
        (
            MagCacheConfig(mag_ratios=[1.0] * 4, num_inference_steps=4, threshold=1e3, retention_ratio=0.1),
            [3, 0, 0],
        ),
        (TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1), [3, 0, 3]),
    ],
    ids=["first block", "pyramid attention broadcast", "mag", "taylor"],
)
def test_caches_leave_out_what_they_should(config, computed, named):
    """Also where the pipeline gives the call no name, as the stock one for SANA-Video does."""
    ours, plain = model(num_layers=3), model(num_layers=3)
    for layer in ours.transformer_blocks:
        layer.attn1.set_processor(CountingProcessor())
    ours.enable_cache(config)
    for step, count in enumerate(computed):
        inputs = transformer_inputs(seed=step)
        CountingProcessor.calls = 0
        if named:
            with ours.cache_context("cond"):
                out = run(ours, **inputs)
        else:
            out = run(ours, **inputs)
        assert CountingProcessor.calls == count and out.isfinite().all()
        if step == 0:
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
@pytest.mark.parametrize("options", [HYBRID, {"mhla_layers": [0], "mhla_other_layers": "softmax"}])
def test_weights_that_are_there_only_while_their_module_runs_are_enough(options):
    """As under sequential offload: outside of its own forward every module's weights are on the meta device."""
    ours = stirred(model(**options))
    expected = run(ours)
    cpu_offload(ours, torch.device("cpu"))
    attention = next(x.attn1 for x in ours.transformer_blocks if hasattr(x.attn1, "mixing"))
    assert attention.mixing.weight.is_meta and attention.norm_q.weight.is_meta
    assert torch.equal(run(ours), expected)


@torch.no_grad()
def test_layerwise_casting_leaves_mixing_norms_and_frequencies_alone():
    ours = model(**HYBRID)
    frequencies = ours.rope.frequencies.clone()
    ours.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    attention = ours.transformer_blocks[1].attn1
    assert attention.to_q.weight.dtype == attention.local_conv.weight.dtype == torch.float8_e4m3fn
    kept = {x.weight.dtype for x in (attention.mixing, attention.norm_q, attention.norm_out)}
    assert kept == {torch.float32} and torch.equal(ours.rope.frequencies, frequencies)
    assert run(ours).isfinite().all()


@torch.no_grad()
def test_the_mixing_stays_in_float32_in_a_half_precision_model(tmp_path):
    ours = model(mhla_layers=[1], mhla_gate=True)
    expected = run(ours)
    ours.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        half = MHLASanaVideoTransformer3DModel.from_pretrained(tmp_path, torch_dtype=dtype)
        assert half.dtype == dtype
        assert half.transformer_blocks[1].attn1.mixing.weight.dtype == torch.float32
        assert half.rope.frequencies.dtype == torch.float32
        assert relative(run(half, **transformer_inputs(dtype=dtype)).float(), expected) < 2e-2


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The following device_map keys")
def test_a_device_map_never_cuts_a_layer_and_reaches_the_disk(tmp_path):
    ours = stirred(model(num_layers=3, **EVERYTHING))
    ours.save_pretrained(tmp_path / "model")
    size = sum(parameter.nbytes for parameter in ours.transformer_blocks[0].parameters())
    mapped = infer_auto_device_map(
        ours, {"cpu": 3 * size, "disk": 1 << 30}, no_split_module_classes=ours._no_split_modules
    )
    layers = [name for name in mapped if name.startswith("transformer_blocks")]
    assert len(layers) == 3 and all(name.count(".") == 1 for name in layers)
    places = dict.fromkeys([name for name, _ in ours.named_children() if name != "transformer_blocks"], "cpu")
    places |= {f"transformer_blocks.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
    places["scale_shift_table"] = "cpu"  # the model's own parameter, in no submodule
    spread = MHLASanaVideoTransformer3DModel.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert spread.transformer_blocks[1].attn1.mixing.weight.is_meta
    assert relative(run(spread), run(ours)) < 1e-6


@torch.no_grad()
def test_fused_projections_give_the_same_and_are_not_saved(tmp_path):
    ours = stirred(model(**HYBRID))
    expected, keys = run(ours), ours.state_dict().keys()
    ours.fuse_qkv_projections()
    used = []
    ours.transformer_blocks[1].attn1.to_qkv.register_forward_hook(lambda *_: used.append(1))
    assert relative(run(ours), expected) < 1e-6 and used
    ours.save_pretrained(tmp_path)
    assert MHLASanaVideoTransformer3DModel.from_pretrained(tmp_path).state_dict().keys() == keys
    ours.unfuse_qkv_projections()
    assert ours.state_dict().keys() == keys


def test_processors_can_be_listed_and_a_foreign_one_for_all_is_refused():
    ours = model(mhla_layers=[0])
    before = {name: type(processor) for name, processor in ours.attn_processors.items()}
    names = [f"transformer_blocks.{i}.{x}.processor" for i in range(2) for x in ("attn1", "attn2")]
    assert sorted(before) == sorted(names)
    with pytest.raises(ValueError, match="restore"):
        ours.set_attn_processor(SanaLinearAttnProcessor3_0())
    assert {name: type(processor) for name, processor in ours.attn_processors.items()} == before


@torch.no_grad()
def test_a_backend_for_the_softmax_layers_leaves_mhla_alone():
    ours = stirred(model(mhla_other_layers="softmax", **HYBRID))
    expected = run(ours)
    ours.set_attention_backend("native")
    assert relative(run(ours), expected) < 1e-6
    assert ours.transformer_blocks[0].attn1.processor._attention_backend == "native"


def test_files_say_whose_they_are_and_single_ones_name_the_converter(tmp_path):
    """Diffusers drops weights that a class does not know with a log line; the file says whose they are."""
    model().save_pretrained(tmp_path)
    named = SanaVideoTransformer3DModel.load_config(tmp_path)["_class_name"]
    assert named == "MHLASanaVideoTransformer3DModel"
    assert isinstance(MHLASanaVideoTransformer3DModel.from_pretrained(tmp_path), SanaVideoTransformer3DModel)
    with pytest.raises(ValueError, match="mhla convert .* --block-grid 3,5,10"):
        MHLASanaVideoTransformer3DModel.from_single_file("SANA_Video_2B_480p.pth")


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
@pytest.mark.parametrize("options", [HYBRID, {}])
@pytest.mark.parametrize("size", [(5, 8, 12), (7, 10, 14)])
def test_on_the_gpu_every_precision_is_close_to_float32_on_the_cpu(options, size):
    ours = stirred(convert(stock_transformer(), (2, 2, 3)) if not options else model(**options))
    expected = run(ours, **transformer_inputs(size=size))
    for dtype, near in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2), (torch.float16, 3e-2)):
        ours.to("cuda", dtype)
        inputs = {name: x.to("cuda") for name, x in transformer_inputs(size=size, dtype=dtype).items()}
        assert relative(run(ours, **inputs).cpu().float(), expected) < near


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


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_by_inductor_in_one_graph_on_the_gpu(regional):
    torch._dynamo.reset()
    ours = stirred(model(**HYBRID)).to("cuda")
    inputs = {name: x.to("cuda") for name, x in transformer_inputs().items()}
    expected = run(ours, **inputs)
    (ours.compile_repeated_blocks if regional else ours.compile)(fullgraph=True)
    assert relative(run(ours, **inputs), expected) < 1e-3  # convolutions in TF32
