"""What Diffusers users do with a Wan transformer, beside what test_ecosystem.py asks of each family."""

import pytest
import torch
from accelerate import cpu_offload
from diffusers import WanPipeline
from model_checks import relative, stirred
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from tiny_wan import EVERYTHING, model, run, stock_transformer, transformer_inputs
from torch.utils._python_dispatch import TorchDispatchMode

from mhla_diffusion.models.adapters import load_adapter
from mhla_diffusion.models.convert import convert
from mhla_diffusion.models.wan import MHLAWanRotaryPosEmbed

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
HYBRID = {"mhla_layers": [1], **EVERYTHING}


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


def original_lora() -> dict[str, torch.Tensor]:
    """As programs around the original Wan code write it."""
    draw = torch.Generator().manual_seed(3)
    state = {}
    for i in range(2):
        for part in ("self_attn", "cross_attn"):
            for x in "qkvo":
                name = f"diffusion_model.blocks.{i}.{part}.{x}"
                state[f"{name}.lora_A.weight"] = torch.randn(2, 24, generator=draw)
                state[f"{name}.lora_B.weight"] = torch.randn(24, 2, generator=draw)
    return state


@torch.no_grad()
@pytest.mark.parametrize("of", ["a file", "tensors"])
def test_a_lora_in_the_original_names_attaches_as_well(of, tmp_path):
    ours = model()
    without = run(ours)
    load_adapter(ours, state_file(original_lora(), tmp_path) if of == "a file" else original_lora())
    assert len([name for name, _ in ours.named_parameters() if "lora_" in name]) == 32
    assert relative(run(ours), without) > 1e-3


@pytest.mark.parametrize(
    ("old", "new"),
    [("blocks", "layers"), ("diffusion_model.blocks.0.self_attn.", "lora_unet_blocks_0_attn_")],
)
def test_names_that_nobody_can_translate_are_refused_in_one_line(old, new, tmp_path):
    ours, state = model(), {name.replace(old, new): x for name, x in original_lora().items()}
    for source in (state_file(state, tmp_path), state):
        with pytest.raises(
            ValueError, match="cannot be read as a LoRA for MHLAWanTransformer3DModel"
        ) as caught:
            load_adapter(ours, source)
        assert "\n" not in str(caught.value) and not getattr(ours, "peft_config", None)


def state_file(state: dict, folder):
    save_file(state, folder / "pytorch_lora_weights.safetensors")
    return folder


@torch.no_grad()
def test_a_norm_across_heads_is_there_only_while_its_module_runs():
    """As under sequential offload: outside of its own forward every module's weights are on the meta device."""
    ours = stirred(model(mhla_norm_across_heads=True))
    expected = run(ours)
    cpu_offload(ours, torch.device("cpu"))
    assert ours.blocks[0].attn1.norm_out.weight.is_meta and ours.blocks[0].attn1.norm_q.weight.is_meta
    assert torch.equal(run(ours), expected)


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
def test_the_fused_kernels_equal_the_reference_on_the_gpu_at_the_ragged_default():
    ours = stirred(model(num_layers=1, attention_head_dim=128, mhla_block_grid=(3, 5, 10), **EVERYTHING)).to(
        "cuda"
    )
    inputs = {name: x.to("cuda") for name, x in transformer_inputs(batch=1, size=(21, 60, 104)).items()}
    out = run(ours, **inputs)
    ours.set_mhla_backend("reference")
    assert relative(out, run(ours, **inputs)) < 1e-5
