"""What Diffusers users do with a transformer works alike on DiT, SANA, SANA-Video and Wan with MHLA."""

import pytest
import torch
from accelerate import cpu_offload, infer_auto_device_map
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.models.attention_processor import AttnProcessor2_0
from families import DIT, EACH, SANA, SANA_VIDEO, SOFTMAX_BESIDE, VIDEO, WAN, Family
from model_checks import relative, stirred
from peft import LoraConfig

from mhla_diffusion.models.adapters import load_adapter, save_adapter

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


GROUPS = pytest.mark.parametrize("kind", [{"offload_type": "leaf_level"}, {"num_blocks_per_group": 1}])


def lora_weights(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}


@EACH
@pytest.mark.parametrize("layers", [[1], None], ids=["a hybrid", "all layers"])
def test_a_lora_can_be_trained_on_every_attention(family, layers):
    ours = family.model(mhla_layers=layers)
    ours.add_adapter(LoraConfig(r=2, target_modules=TARGETS))
    trained = lora_weights(ours)
    assert len(trained) == 2 * len(family.attentions) * 4 * 2  # layers, attentions, projections, A and B
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_B" in name:  # zero at first, which would keep A's gradient zero
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    family.run(ours).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained.values())


@VIDEO
def test_an_adapter_carries_lora_pairs_and_new_weights(family, tmp_path):
    ours = family.model(mhla_layers=[1], mhla_gate=True).requires_grad_(False)
    ours.add_adapter(LoraConfig(r=2, target_modules=TARGETS))
    family.layer(ours, 1).attn1.mixing.requires_grad_(True)
    stirred(ours)
    family.run(ours).square().sum().backward()
    assert all(p.grad is not None for p in ours.parameters() if p.requires_grad)
    path = save_adapter(ours, tmp_path)
    fresh = family.model(mhla_layers=[1], mhla_gate=True)
    with torch.no_grad():
        before = family.run(fresh)
        load_adapter(fresh, path)
        assert torch.equal(*(family.layer(made, 1).attn1.mixing.weight for made in (fresh, ours)))
        assert len(lora_weights(fresh)) == 32
        fresh.unload_lora()
        assert torch.equal(family.run(fresh), before)


def counting(processor: type) -> type:
    class Counting(processor):
        calls = 0

        def __call__(self, *args, **kwargs):
            Counting.calls += 1
            return super().__call__(*args, **kwargs)

    return Counting


def pyramid(family: Family) -> PyramidAttentionBroadcastConfig:
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_block_identifiers=(family.layers,),
        current_timestep_callback=lambda: 500,
    )


CACHES = {
    "first block, none": (lambda _: FirstBlockCacheConfig(threshold=0.0), [3, 3, 3]),
    "first block": (lambda _: FirstBlockCacheConfig(threshold=1e3), [3, 1, 1]),
    "pyramid attention broadcast": (pyramid, [3, 0, 3]),
    "mag": (
        lambda _: MagCacheConfig(
            mag_ratios=[1.0] * 4, num_inference_steps=4, threshold=1e3, retention_ratio=0.1
        ),
        [3, 0, 0],
    ),
    "taylor": (lambda _: TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1), [3, 0, 3]),
}


@torch.no_grad()
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("family", "named"),
    [(DIT, True), (WAN, True), (SANA_VIDEO, True), (SANA_VIDEO, False)],
    ids=["DiT", "Wan", "SANA-Video", "SANA-Video, unnamed"],
)
def test_caches_leave_out_what_they_should(family, named, cache):
    """Also where the pipeline gives the call no name, as the stock one for SANA-Video does."""
    config, computed = CACHES[cache]
    ours, plain = family.model(num_layers=3), family.model(num_layers=3)
    processor = counting(family.processor)
    for index in range(3):
        family.layer(ours, index).attn1.set_processor(processor())
    ours.enable_cache(config(family))
    for step, count in enumerate(computed):
        inputs = family.tiny.transformer_inputs(seed=step)
        processor.calls = 0
        if named:
            with ours.cache_context("cond", step_index=step, num_inference_steps=4):
                out = family.run(ours, **inputs)
        else:
            out = family.run(ours, **inputs)
        assert processor.calls == count and out.isfinite().all()
        if step == 0 or computed == [3, 3, 3]:
            assert relative(out, family.run(plain, **inputs)) < 1e-6
    ours.disable_cache()
    assert torch.equal(family.run(ours), family.run(plain))


@torch.no_grad()
@EACH
@GROUPS
@pytest.mark.parametrize("layers", [[1], None], ids=["a hybrid", "all layers"])
def test_group_offload_finds_every_weight_where_it_is_used(family, kind, layers):
    ours = stirred(family.model(**(family.full | {"mhla_layers": layers})))
    expected = family.run(ours)
    cpu = torch.device("cpu")
    ours.enable_group_offload(onload_device=cpu, offload_device=cpu, **kind)
    assert torch.equal(family.run(ours), expected)


@torch.no_grad()
@EACH
@GROUPS
def test_group_offload_to_the_disk_reads_no_weight_that_is_not_there(family, kind, tmp_path):
    ours = stirred(family.model(**family.full))
    expected = family.run(ours)
    cpu = torch.device("cpu")
    ours.enable_group_offload(
        onload_device=cpu, offload_device=cpu, offload_to_disk_path=str(tmp_path), **kind
    )
    assert len(list(tmp_path.iterdir())) > 1
    for _ in range(2):
        assert relative(family.run(ours), expected) < 1e-6


@torch.no_grad()
@EACH
@pytest.mark.parametrize("options", [None, SOFTMAX_BESIDE], ids=["everything", "softmax beside"])
def test_weights_that_are_there_only_while_their_module_runs_are_enough(family, options):
    """As under sequential offload: outside of its own forward every module's weights are on the meta device."""
    ours = stirred(family.model(**(options or family.full)))
    expected = family.run(ours)
    cpu_offload(ours, torch.device("cpu"))
    attention = family.layer(ours, 1 if options is None else 0).attn1
    read = [part for part in (attention.mixing, attention.norm_q) if part is not None]
    assert all(part.weight.is_meta for part in read)
    assert torch.equal(family.run(ours), expected)


@torch.no_grad()
@EACH
def test_layerwise_casting_leaves_mixing_norms_and_frequencies_alone(family):
    ours = family.model(**family.full)
    frequencies = ours.rope.frequencies.clone() if hasattr(ours, "rope") else None
    ours.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    attention = family.layer(ours, 1).attn1
    assert attention.to_q.weight.dtype == attention.local_conv.weight.dtype == torch.float8_e4m3fn
    kept = [x for x in (attention.mixing, attention.norm_q, attention.norm_out) if x is not None]
    assert {x.weight.dtype for x in kept} == {torch.float32}
    assert frequencies is None or torch.equal(ours.rope.frequencies, frequencies)
    assert family.run(ours).isfinite().all()


@torch.no_grad()
@EACH
@pytest.mark.parametrize("options", [{"mhla_layers": [1], "mhla_gate": True}, {}], ids=["a hybrid", "plain"])
def test_the_mixing_stays_in_float32_in_a_half_precision_model(family, options, tmp_path):
    ours = family.model(**options)
    expected = family.run(ours)
    ours.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        half = family.ours.from_pretrained(tmp_path, torch_dtype=dtype)
        assert half.dtype == dtype and family.layer(half, 1).attn1.mixing.weight.dtype == torch.float32
        assert not family.is_video or half.rope.frequencies.dtype == torch.float32
        if family is WAN:
            assert half.blocks[0].scale_shift_table.dtype == torch.float32  # stock keeps it so
        inputs = family.tiny.transformer_inputs(dtype=dtype)
        assert relative(family.run(half, **inputs).float(), expected) < 2e-2


@torch.no_grad()
@EACH
@pytest.mark.filterwarnings("ignore:The following device_map keys")
def test_a_device_map_never_cuts_a_layer_and_reaches_the_disk(family, tmp_path):
    ours = stirred(family.model(num_layers=3, **family.tiny.EVERYTHING))
    ours.save_pretrained(tmp_path / "model")
    size = sum(parameter.nbytes for parameter in family.layer(ours, 0).parameters())
    room = (4 if family is SANA else 3) * size  # for what is around the layers, and some of these
    mapped = infer_auto_device_map(
        ours, {"cpu": room, "disk": 1 << 30}, no_split_module_classes=ours._no_split_modules
    )
    layers = [name for name in mapped if name.startswith(family.layers)]
    assert len(layers) == 3 and all(name.count(".") == 1 for name in layers)
    assert {mapped[name] for name in layers} == {"cpu", "disk"}
    names = [name for name, _ in (*ours.named_children(), *ours.named_parameters(recurse=False))]
    places = dict.fromkeys([name for name in names if name != family.layers], "cpu")
    places |= {f"{family.layers}.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
    spread = family.ours.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert family.layer(spread, 1).attn1.mixing.weight.is_meta
    assert relative(family.run(spread), family.run(ours)) < 1e-6


@EACH
def test_the_slower_way_of_loading_may_be_asked_for_as_of_stock_models(family, tmp_path):
    ours = stirred(family.model(**family.full))
    ours.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = [
            family.ours.from_pretrained(tmp_path, torch_dtype=dtype, low_cpu_mem_usage=low).state_dict()
            for low in (False, True)
        ]
        assert all(torch.equal(x, loaded[1][name]) for name, x in loaded[0].items())


@torch.no_grad()
@EACH
def test_fused_projections_give_the_same_and_are_not_saved(family, tmp_path):
    ours = stirred(family.model(**family.full))
    expected, keys = family.run(ours), ours.state_dict().keys()
    ours.fuse_qkv_projections()
    used = []
    family.layer(ours, 1).attn1.to_qkv.register_forward_hook(lambda *_: used.append(1))
    assert relative(family.run(ours), expected) < 1e-6 and used
    ours.save_pretrained(tmp_path)
    assert family.ours.from_pretrained(tmp_path).state_dict().keys() == keys
    ours.unfuse_qkv_projections()
    assert ours.state_dict().keys() == keys


@EACH
def test_processors_can_be_listed_and_a_foreign_one_for_all_is_refused(family):
    ours = family.model(mhla_layers=[0])
    before = {name: type(processor) for name, processor in ours.attn_processors.items()}
    names = [f"{family.layers}.{i}.{x}.processor" for i in range(2) for x in family.attentions]
    assert sorted(before) == sorted(names)
    for foreign in (family.foreign, AttnProcessor2_0):
        with pytest.raises(ValueError, match="restore"):
            ours.set_attn_processor(foreign())
    assert {name: type(processor) for name, processor in ours.attn_processors.items()} == before


@torch.no_grad()
@VIDEO
def test_a_backend_for_the_softmax_layers_leaves_mhla_alone(family):
    softmax = {"mhla_other_layers": "softmax"} if family is SANA_VIDEO else {}  # its own layers are linear
    ours = stirred(family.model(**family.full, **softmax))
    expected = family.run(ours)
    ours.set_attention_backend("native")
    assert relative(family.run(ours), expected) < 1e-6
    assert family.layer(ours, 0).attn1.processor._attention_backend == "native"


@VIDEO
def test_files_say_whose_they_are_and_a_single_one_is_read(family, tmp_path):
    """Diffusers drops weights that a class does not know with a log line; the file says whose they are."""
    family.model().save_pretrained(tmp_path)
    stock = type(family.tiny.stock_transformer())
    assert stock.load_config(tmp_path)["_class_name"] == family.ours.__name__
    assert isinstance(family.ours.from_pretrained(tmp_path), stock)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    read = family.ours.from_single_file(file, config=tmp_path)
    expected = family.ours.from_pretrained(tmp_path).state_dict()
    assert read.state_dict().keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in read.state_dict().items())


@VIDEO
@pytest.mark.parametrize("softmax", [False, True])
def test_training_under_autocast_reaches_every_weight(family, softmax):
    ours = stirred(family.model(**(SOFTMAX_BESIDE if softmax else family.full))).train()
    with torch.no_grad():
        expected = family.run(ours)
    with torch.autocast("cpu", torch.bfloat16):
        out = family.run(ours)
    assert relative(out.float(), expected) < 3e-2
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())


@pytest.mark.gpu
@torch.no_grad()
@EACH
@GROUPS
@pytest.mark.parametrize("use_stream", [False, True])
def test_group_offload_on_a_gpu_gives_the_same_output(family, kind, use_stream):
    ours = stirred(family.model(**family.full)).to("cuda")
    inputs = family.on_gpu()
    expected = family.run(ours, **inputs)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    ours.enable_group_offload(onload_device=cuda, offload_device=cpu, use_stream=use_stream, **kind)
    for _ in range(2):
        assert relative(family.run(ours, **inputs), expected) < 1e-5


@pytest.mark.gpu
@torch.no_grad()
@EACH
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_by_inductor_in_one_graph_on_the_gpu(family, regional):
    torch._dynamo.reset()
    options = family.full | ({"mhla_layers": [0]} if family is DIT else {})
    ours = stirred(family.model(**options)).to("cuda")
    inputs = family.on_gpu()
    expected = family.run(ours, **inputs)
    (ours.compile_repeated_blocks if regional else ours.compile)(fullgraph=True)
    near = 1e-3 if family is SANA_VIDEO else 1e-4  # its convolutions run in TF32
    assert relative(family.run(ours, **inputs), expected) < near


SIZES = [(DIT, (8, 8)), (DIT, (10, 14)), (WAN, (5, 8, 12)), (WAN, (7, 10, 14))]


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(("family", "size"), SIZES)
def test_half_precision_on_the_gpu_stays_close_to_float32_on_the_cpu(family, size):
    expected = family.run(stirred(family.model(**family.full)), **family.tiny.transformer_inputs(size=size))
    for dtype in (torch.bfloat16, torch.float16):
        ours = stirred(family.model(**family.full)).to("cuda", dtype)
        out = family.run(ours, **family.on_gpu(size=size, dtype=dtype))
        assert relative(out.cpu().float(), expected) < 3e-2


# SANA as it is converted, with a softmax layer beside MHLA.
CONVERTED_SANA = {
    "num_layers": 3,
    "mhla_layers": [0, 1],
    "mhla_other_layers": "softmax",
    "mhla_block_grid": (4, 4),
    "mhla_feature_eps": 0.0,
    "mhla_denominator_eps": 1e-15,
    "mhla_gate": True,
    "mhla_local_conv": 3,
    "mhla_norm_out": True,
}
QUANTISED = [(DIT, DIT.tiny.EVERYTHING), (SANA, CONVERTED_SANA)]


@pytest.mark.gpu  # where the extra `quantize` is installed
@torch.no_grad()
@pytest.mark.parametrize(("family", "options"), QUANTISED, ids=["DiT", "SANA"])
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_quantises_the_linear_layers_and_leaves_the_mixing(family, options, bits, tmp_path):
    from bitsandbytes.nn import Linear4bit, Linear8bitLt
    from diffusers import BitsAndBytesConfig

    whole = stirred(family.model(**options))
    expected = family.run(whole)
    whole.save_pretrained(tmp_path)
    chosen = {4: {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}, 8: {"load_in_8bit": True}}
    ours = family.ours.from_pretrained(
        tmp_path,
        quantization_config=BitsAndBytesConfig(**chosen[bits]),
        torch_dtype=torch.bfloat16,
        device_map={"": "cuda"},
    )
    attention = family.layer(ours, 0).attn1
    assert isinstance(attention.to_q, Linear4bit if bits == 4 else Linear8bitLt)
    assert attention.mixing.weight.dtype == torch.float32
    out = family.run(ours, **family.on_gpu(dtype=torch.bfloat16)).float().cpu()
    assert out.isfinite().all() and relative(out, expected) < 0.3
