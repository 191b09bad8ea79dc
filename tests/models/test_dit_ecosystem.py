"""What Diffusers users do with a DiT transformer, beside what test_ecosystem.py asks of each family."""

import pytest
import torch
from model_checks import relative, stirred
from peft import LoraConfig, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict
from tiny_dit import EVERYTHING, model, run, stock_transformer, transformer_inputs

from mhla_diffusion.models.dit import fetches_itself

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


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
    with pytest.raises(ValueError, match="joins plain linear layers"):
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


@pytest.mark.parametrize(
    ("kind", "by_itself"), [({"num_blocks_per_group": 1}, False), ({"offload_type": "leaf_level"}, True)]
)
def test_an_embedder_whose_own_parts_are_offloaded_fetches_itself(kind, by_itself):
    ours, cpu = model(), torch.device("cpu")
    embedder = ours.transformer_blocks[0].norm1.emb
    assert not fetches_itself(embedder)
    ours.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)  # has hooks of the same kind
    assert not fetches_itself(embedder)
    ours.enable_group_offload(onload_device=cpu, offload_device=cpu, **kind)
    assert fetches_itself(embedder) is by_itself


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
