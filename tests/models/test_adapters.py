"""LoRA pairs and the weights that a stock model lacks, in one file: saved, loaded, swapped, fused and taken away."""

import json

import pytest
import torch
from diffusers import SanaPipeline
from model_checks import relative
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_sana import components, stock_pipeline, stock_transformer, transformer_inputs

from mhla_diffusion.models.adapters import load_adapter, new_weights, save_adapter
from mhla_diffusion.models.convert import convert
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
MIXINGS = [f"transformer_blocks.{i}.attn1.mixing.weight" for i in range(2)]


def base(**options) -> MHLASanaTransformer2DModel:
    return convert(stock_transformer(), block_grid=(2, 2), **options)


def run(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**transformer_inputs()).sample


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def trained(seed: int = 0, rank: int = 2, mixing: bool = True, name: str = "default", **options):
    """A base with a LoRA (alpha twice the rank) and, if asked for, mixings that moved."""
    model = base(**options)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS), name)
    draw = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if "mixing" in key or "to_gate" in key:
            parameter.requires_grad_(mixing)
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.rand(parameter.shape, generator=draw)
    return model


def test_one_call_saves_and_one_call_loads_pairs_and_new_weights(tmp_path):
    model = trained(gate=True)
    path = save_adapter(model, tmp_path)
    stored = load_file(path)
    assert {key.removeprefix("transformer.") for key in stored if "lora" not in key} == {
        name for name in new_weights(model) if "mixing" in name or "to_gate" in name
    }
    again = base(gate=True)
    before, plain = weights_of(again), run(again)
    load_adapter(again, tmp_path)
    assert relative(run(again), run(model)) < 1e-6 and relative(plain, run(model)) > 1e-2
    for name, weight in new_weights(model).items():
        assert torch.equal(new_weights(again)[name], weight)
    again.unload_lora()
    assert weights_of(again).keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(again).items())
    assert relative(run(again), plain) < 1e-6


def test_what_is_loaded_is_saved_again(tmp_path):
    save_adapter(trained(), tmp_path / "a")
    again = base().requires_grad_(False)
    load_adapter(again, tmp_path / "a", adapter_name="style")
    save_adapter(again, tmp_path / "b", adapter_name="style")
    first, second = (load_file(tmp_path / part / "pytorch_lora_weights.safetensors") for part in "ab")
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_a_mixing_alone_is_an_adapter(tmp_path):
    model = base()
    model.requires_grad_(False)
    for name, weight in new_weights(model).items():
        weight.data += 0.1
        weight.requires_grad_(name == MIXINGS[0])
    save_adapter(model, tmp_path)
    again = base()
    load_adapter(again, tmp_path / "pytorch_lora_weights.safetensors")
    assert torch.equal(new_weights(again)[MIXINGS[0]], new_weights(model)[MIXINGS[0]])
    assert torch.equal(new_weights(again)[MIXINGS[1]], new_weights(base())[MIXINGS[1]])
    again.unload_lora()
    assert torch.equal(new_weights(again)[MIXINGS[0]], new_weights(base())[MIXINGS[0]])


def test_a_file_of_pairs_alone_is_a_stock_one_with_its_scale(tmp_path):
    """Alpha is twice the rank: losing it would halve the effect without a word."""
    model = trained(mixing=False)
    path = save_adapter(model, tmp_path)
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["lora_adapter_metadata"])["transformer.lora_alpha"] == 4
    pipe = stock_pipeline(base())
    pipe.load_lora_weights(tmp_path)
    assert relative(run(pipe.transformer), run(model)) < 1e-6
    ours = base()
    SanaPipeline.save_lora_weights(
        tmp_path / "stock",
        transformer_lora_layers=get_peft_model_state_dict(model),
        transformer_lora_adapter_metadata=model.peft_config["default"].to_dict(),
    )
    load_adapter(ours, tmp_path / "stock")
    assert relative(run(ours), run(model)) < 1e-6


def test_weights_that_peft_keeps_a_copy_of_are_saved_and_loaded(tmp_path):
    model = base()
    model.add_adapter(LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["mixing"]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1
    save_adapter(model, tmp_path)
    again = base()
    load_adapter(again, tmp_path)
    assert relative(run(again), run(model)) < 1e-6
    assert torch.equal(new_weights(again)[MIXINGS[0]], new_weights(base())[MIXINGS[0]] + 0.1)


def test_the_stock_call_refuses_such_a_file_and_ours_takes_it(tmp_path):
    model = trained()
    save_adapter(model, tmp_path)
    pipe = stock_pipeline(base())
    with pytest.raises(ValueError, match="'lora'"):
        pipe.load_lora_weights(tmp_path)
    load_adapter(pipe, tmp_path, adapter_name="style")
    assert pipe.get_active_adapters() == ["style"]
    assert relative(run(pipe.transformer), run(model)) < 1e-6
    pipe.unload_lora_weights()
    assert relative(run(pipe.transformer), run(base())) < 1e-6


@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_our_pipeline_takes_it_in_the_stock_call(tmp_path, low_cpu_mem_usage):
    model = trained()
    save_adapter(model, tmp_path)
    pipe = MHLASanaPipeline(**components(base()))
    pipe.load_lora_weights(tmp_path, adapter_name="style", low_cpu_mem_usage=low_cpu_mem_usage)
    assert relative(run(pipe.transformer), run(model)) < 1e-6
    pipe.delete_adapters("style")
    assert relative(run(pipe.transformer), run(base())) < 1e-6
    stock = MHLASanaPipeline(**components())
    pairs = {f"transformer.{k}": v for k, v in get_peft_model_state_dict(trained(mixing=False)).items()}
    stock.load_lora_weights(pairs, adapter_name="style")
    assert stock.get_active_adapters() == ["style"]


def test_two_adapters_with_a_mixing_do_not_mix(tmp_path):
    save_adapter(trained(0), tmp_path / "a")
    save_adapter(trained(1), tmp_path / "b")
    save_adapter(trained(2, mixing=False), tmp_path / "pairs")
    model = base()
    load_adapter(model, tmp_path / "a", adapter_name="a")
    loaded = run(model)
    with pytest.raises(ValueError, match="loaded already") as caught:
        load_adapter(model, tmp_path / "b", adapter_name="b")
    assert "\n" not in str(caught.value) and torch.equal(run(model), loaded)
    load_adapter(model, tmp_path / "pairs", adapter_name="pairs")
    model.set_adapters(["a", "pairs"], [1.0, 0.0])
    assert relative(run(model), loaded) < 1e-6
    model.delete_adapters("a")
    model.set_adapters("pairs")
    assert relative(run(model), run(trained(2, mixing=False))) < 1e-6


def test_an_adapter_is_swapped_in_place(tmp_path):
    for seed in (0, 1):
        save_adapter(trained(seed, rank=2 + seed), tmp_path / str(seed))
    save_adapter(trained(2, mixing=False), tmp_path / "pairs")
    model = base()
    model.enable_lora_hotswap(target_rank=3)
    load_adapter(model, tmp_path / "0", adapter_name="style")
    places = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    for source, made in (("1", trained(1, rank=3)), ("pairs", trained(2, mixing=False)), ("0", trained(0))):
        load_adapter(model, tmp_path / source, adapter_name="style", hotswap=True)
        assert relative(run(model), run(made)) < 1e-6
        assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == places
    model.unload_lora()
    assert all(torch.equal(weight, base().state_dict()[name]) for name, weight in weights_of(model).items())


def test_a_fused_adapter_stays_when_it_is_unloaded(tmp_path):
    save_adapter(trained(), tmp_path)
    model = base()
    load_adapter(model, tmp_path)
    loaded = run(model)
    model.fuse_lora()
    assert relative(run(model), loaded) < 1e-5
    model.unfuse_lora()
    assert relative(run(model), loaded) < 1e-5
    model.fuse_lora()
    model.unload_lora()
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert relative(run(model), loaded) < 1e-5
    load_adapter(model, tmp_path)  # what it starts from is now the fused model
    model.unload_lora()
    assert relative(run(model), loaded) < 1e-5


def another(**changes) -> dict[str, torch.Tensor]:
    """An adapter of a model with other layers or another width."""
    model = convert(stock_transformer(**changes), block_grid=changes.pop("block_grid", (2, 2)))
    model.add_adapter(LoraConfig(r=2, target_modules=TARGETS))
    return {f"transformer.{name}": tensor for name, tensor in get_peft_model_state_dict(model).items()}


def pair(rows: int = 0, columns: int = 0) -> dict[str, torch.Tensor]:
    """One LoRA pair of these ranks on a layer that is there; 0 leaves that half out."""
    halves = {"A": torch.ones(rows, 16), "B": torch.ones(16, columns)}
    path = "transformer.transformer_blocks.0.attn1.to_q.lora_"
    return {f"{path}{half}.weight": tensor for half, tensor in halves.items() if tensor.numel()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: another(num_layers=3),
            r"16 of its 48 weights have no place \(transformer.transformer_blocks.2",
        ),
        (lambda: another(num_attention_heads=4, cross_attention_dim=32), "have no place"),
        (lambda: {"transformer." + MIXINGS[0]: torch.eye(9)}, r"of shape \(9, 9\) for \(4, 4\)"),
        (lambda: {MIXINGS[0]: torch.eye(4)}, "1 of its 1 weights have no place"),
        (
            lambda: {f"transformer.{MIXINGS[0]}": torch.eye(4), "transformer.x.weight": torch.ones(1)},
            "x.weight",
        ),
        (lambda: {"text_encoder.layer.lora_A.weight": torch.ones(2, 2)}, "text_encoder"),
        (lambda: pair(rows=2, columns=3), "2 of its 2 weights have no place"),
        (
            lambda: pair(rows=2),
            r"1 of its 1 weights have no place .transformer.*lora_A.weight: its other half",
        ),
        (lambda: pair(columns=2), r"1 of its 1 weights have no place .transformer.*lora_B.weight"),
        (lambda: {f"transformer.{MIXINGS[0]}": torch.eye(4) / 0}, "holds infinite values or NaN"),
        (lambda: {name: x * torch.inf for name, x in pair(2, 2).items()}, "holds infinite values or NaN"),
        (dict, "it is empty"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_whole(make, message):
    model = base()
    before = weights_of(model)
    with pytest.raises(ValueError, match=message) as caught:
        load_adapter(model, make())
    assert "\n" not in str(caught.value)
    assert weights_of(model).keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())


@pytest.mark.parametrize("pipeline_unfuses", [True, False])
def test_an_adapter_that_is_unfused_again_is_taken_away(tmp_path, pipeline_unfuses):
    save_adapter(trained(), tmp_path / "one")
    save_adapter(trained(1, mixing=False), tmp_path / "pairs")
    pipe = SanaPipeline(**components(base()))
    before = run(pipe.transformer)
    for fused in (["style"], ["pairs"], None):
        load_adapter(pipe, tmp_path / "one", adapter_name="style")
        load_adapter(pipe, tmp_path / "pairs", adapter_name="pairs")
        pipe.fuse_lora(adapter_names=fused)
        (pipe if pipeline_unfuses else pipe.transformer).unfuse_lora()
        pipe.unload_lora_weights()
        assert relative(run(pipe.transformer), before) < 1e-5


def test_pairs_alone_fused_leave_the_mixing_of_another_adapter_where_it_was(tmp_path):
    save_adapter(trained(), tmp_path / "one")
    save_adapter(trained(1, mixing=False), tmp_path / "pairs")
    model = base()
    load_adapter(model, tmp_path / "one", adapter_name="style")
    load_adapter(model, tmp_path / "pairs", adapter_name="pairs")
    model.fuse_lora(adapter_names=["pairs"])
    model.unload_lora()
    assert all(torch.equal(weights_of(model)[name], base().state_dict()[name]) for name in MIXINGS)


def test_an_adapter_that_is_not_there_is_named(tmp_path):
    for source, message in ((tmp_path / "none", "there is no adapter .*none"), (5, "got a int")):
        with pytest.raises(ValueError, match=message) as caught:
            load_adapter(base(), source)
        assert "\n" not in str(caught.value)


def test_an_adapter_of_another_name_is_not_saved_without_its_pairs(tmp_path):
    save_adapter(trained(), tmp_path / "one")
    model = base()
    load_adapter(model, tmp_path / "one", adapter_name="style")
    with pytest.raises(ValueError, match="adapter_name='default': the model has 'style'"):
        save_adapter(model, tmp_path / "two")


@pytest.mark.parametrize("mixing", [False, True])
def test_weights_on_the_disk_take_no_adapter(tmp_path, mixing):
    save_adapter(trained(mixing=mixing), tmp_path / "lora")
    model, cpu = base(), torch.device("cpu")
    options = {"offload_type": "leaf_level", "offload_to_disk_path": str(tmp_path / "weights")}
    model.enable_group_offload(onload_device=cpu, offload_device=cpu, **options)
    with pytest.raises(ValueError, match="load the adapter, and then enable_group_offload") as caught:
        load_adapter(model, tmp_path / "lora")
    assert "\n" not in str(caught.value)


def test_whole_stock_weights_are_no_adapter(tmp_path):
    model = base()
    model.add_adapter(LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["proj_out"]))
    with pytest.raises(ValueError, match="holds weights of the stock model .proj_out"):
        save_adapter(model, tmp_path)


def test_nothing_to_save_and_a_stock_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to save"):
        save_adapter(base().requires_grad_(False), tmp_path)
    with pytest.raises(ValueError, match="got a SanaTransformer2DModel"):
        load_adapter(stock_pipeline(), tmp_path)
    with pytest.raises(ValueError, match="got a SanaTransformer2DModel"):
        save_adapter(stock_transformer(), tmp_path)


def test_a_model_saved_with_adapters_attached_is_refused_with_what_to_do(tmp_path):
    trained().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="saved while adapters were attached") as caught:
        MHLASanaTransformer2DModel.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
