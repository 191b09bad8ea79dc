import pytest
import torch
from diffusers import SanaTransformer2DModel
from peft import LoraConfig

from mhla_diffusion import MHLASanaTransformer2DModel
from mhla_diffusion.training.config import OptimizerConfig
from mhla_diffusion.training.parameters import (
    build_optimizer,
    decays,
    listed,
    parameter_groups,
    schedule_factor,
    trainable,
)

TOY = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3,
    "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 16,
    "sample_size": 8,
}  # fmt: skip
OURS = {
    "mhla_layers": [0, 2],
    "mhla_gate": True,
    "mhla_local_conv": 3,
    "mhla_norm_out": True,
    "qk_norm": "rms_norm_across_heads",
}


@pytest.fixture
def model():
    return MHLASanaTransformer2DModel(**TOY, **OURS)


def test_sets_are_exact(model):  # case T5
    everything = [name for name, _ in model.named_parameters()]
    assert trainable(model, "all") == everything
    attention = trainable(model, "attention")
    parts = [
        "to_q.weight",
        "to_k.weight",
        "to_v.weight",
        "norm_q.weight",
        "norm_k.weight",
        "to_out.0.weight",
        "to_out.0.bias",
    ]
    new = ["mixing.weight", "to_gate.weight", "local_conv.weight", "norm_out.weight"]
    expected = {f"transformer_blocks.{i}.attn1.{p}" for i in (0, 1, 2) for p in parts}
    expected |= {f"transformer_blocks.{i}.attn1.{p}" for i in (0, 2) for p in new}
    extra = {
        name for name in set(attention) - expected if name.endswith(".bias")
    }  # a gate or convolution may have one
    assert set(attention) - extra == expected
    mixing = trainable(model, "mixing")
    assert mixing == ["transformer_blocks.0.attn1.mixing.weight", "transformer_blocks.2.attn1.mixing.weight"]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == mixing


def test_lora_trains_adapters_and_matrices(model):
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    chosen = trainable(model, "lora")
    assert (
        sum("lora_A" in name for name in chosen) == 3 * 2 * 4
    )  # layers, self and cross attention, projections
    assert {name for name in chosen if "lora_" not in name} == {
        "transformer_blocks.0.attn1.mixing.weight",
        "transformer_blocks.2.attn1.mixing.weight",
    }


def test_a_frozen_matrix_stays_frozen():
    model = MHLASanaTransformer2DModel(**TOY, mhla_mixing_learnable=False)
    assert not any(".mixing." in name for name in trainable(model, "all"))
    with pytest.raises(ValueError, match="'mixing' is empty in MHLASanaTransformer2DModel"):
        trainable(model, "mixing")


def test_unknown_and_empty_sets(model):
    with pytest.raises(ValueError, match="trainable set 'everything'; allowed: all, attention, mixing, lora"):
        trainable(model, "everything")
    with pytest.raises(ValueError, match="empty in SanaTransformer2DModel"):
        trainable(SanaTransformer2DModel(**TOY), "mixing")


def test_groups(model):
    names = {f"transformer.{n}": p for n, p in model.named_parameters()}
    names["text_encoder.embed_tokens.weight"] = torch.nn.Parameter(torch.zeros(5, 4))
    names["text_encoder.layers.0.mlp.up_proj.weight"] = torch.nn.Parameter(torch.zeros(5, 4))
    config = OptimizerConfig(lr=1e-3, mixing_lr=0.02, weight_decay=0.1, text_encoder_lr=1e-4)
    groups = parameter_groups(names, config)
    assert sum(len(group["params"]) for group in groups) == len(names)
    where = {id(p): group for group in groups for p in group["params"]}
    for name, parameter in names.items():
        group = where[id(parameter)]
        if ".mixing." in name:
            assert (group["lr"], group["weight_decay"]) == (0.02 / 16, 0.0)
        elif name.startswith("text_encoder."):
            assert group["lr"] == 1e-4
        else:
            assert group["lr"] == 1e-3
        assert group["weight_decay"] in (0.0, 0.1) and (group["weight_decay"] > 0) == (
            decays(name, parameter) and ".mixing." not in name
        )
    undecayed = {
        n.rsplit(".", 2)[-2] for n, p in names.items() if where[id(p)]["weight_decay"] == 0 and p.ndim > 1
    }
    assert {"to_gate", "mixing", "embed_tokens"} <= undecayed and "to_q" not in undecayed
    assert not any(n.endswith("scale_shift_table") and where[id(p)]["weight_decay"] for n, p in names.items())
    assert build_optimizer(names, config).defaults["fused"]


def test_schedules():
    constant = OptimizerConfig(warmup=4)
    assert [schedule_factor(constant, s, 0, 100) for s in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert schedule_factor(constant, 50, 50, 100) == 0.25  # a continued run warms up again
    cosine = OptimizerConfig(warmup=0, schedule="cosine", lr_min=0.1)
    assert schedule_factor(cosine, 0, 0, 100) == 1.0
    assert schedule_factor(cosine, 50, 0, 100) == pytest.approx(0.55)
    assert schedule_factor(cosine, 100, 0, 100) == pytest.approx(0.1)


def test_parameters_of_all_layers_are_listed_once():
    """Also one that a layer itself holds, as Wan's `scale_shift_table`."""
    names = ["table", "blocks.0.scale", "blocks.1.scale", "blocks.0.norm.weight", "blocks.10.ff.0.weight"]
    assert listed(dict.fromkeys(names)) == "table (1), blocks.* (2), blocks.*.norm (1), blocks.*.ff.0 (1)"
