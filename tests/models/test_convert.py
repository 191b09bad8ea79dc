"""convert and restore: the same tensors under another class, and nothing else touched."""

import numpy as np
import pytest
import torch
from accelerate import cpu_offload_with_hook
from diffusers import SanaPipeline, SanaTransformer2DModel
from diffusers.hooks import apply_group_offloading
from model_checks import relative
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from tiny_sana import stock_pipeline, stock_transformer, transformer_inputs

from mhla_diffusion.attention import MHLASanaAttention
from mhla_diffusion.models.convert import convert, restore
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def run(model: torch.nn.Module, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs or transformer_inputs())).sample


def storages(model: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"interpolation_scale": 1, "patch_size": 2},
        {"qk_norm": "rms_norm_across_heads", "guidance_embeds": True},
    ],
)
def test_converted_shares_every_tensor_and_restored_is_the_original_bit_for_bit(changes):
    stock = stock_transformer(**changes)
    inputs = transformer_inputs()
    if changes.get("guidance_embeds"):
        inputs["guidance"] = torch.tensor([0.45, 0.45])
    expected = run(stock, **inputs)
    converted = convert(stock, block_grid=(2, 3), gate=True, local_conv=3, norm_out=True)
    assert isinstance(converted, MHLASanaTransformer2DModel)
    assert storages(stock).items() <= storages(converted).items()
    assert torch.equal(run(stock, **inputs), expected)

    restored = restore(converted)
    assert type(restored) is SanaTransformer2DModel
    assert storages(restored) == storages(stock)
    assert torch.equal(run(restored, **inputs), expected)
    public = {name: value for name, value in stock.config.items() if not name.startswith("_")}
    assert {name: value for name, value in restored.config.items() if not name.startswith("_")} == public


@pytest.mark.parametrize("options", [{}, {"gate": True, "local_conv": 3}, {"layers": [1]}])
def test_one_block_equals_stock_rows_without_any_active_feature_included(options):
    stock = stock_transformer()
    with torch.no_grad():  # no feature of the first head is ever active, few of the others
        for block in stock.transformer_blocks:
            block.attn1.to_q.weight[:8] = 0
            block.attn1.to_k.weight[8:] -= 0.2
    assert relative(run(convert(stock, block_grid=(1, 1), **options)), run(stock)) < 1e-5


def test_layers_not_converted_keep_the_stock_attention():
    converted = convert(stock_transformer(num_layers=3), layers=range(1, 3))
    kinds = [isinstance(block.attn1, MHLASanaAttention) for block in converted.transformer_blocks]
    assert kinds == [False, True, True]
    for nothing in ([], "none"):
        assert torch.equal(run(convert(stock_transformer(), layers=nothing)), run(stock_transformer()))


def test_the_two_models_share_memory_but_not_their_settings():
    stock = stock_transformer()
    stock.train()
    stock.transformer_blocks[0].requires_grad_(False)
    converted = convert(stock)
    assert converted.training
    frozen = {name for name, p in converted.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, p in stock.named_parameters() if not p.requires_grad}
    converted.requires_grad_(False).eval()
    assert stock.training and stock.proj_out.weight.requires_grad
    converted.double()
    assert stock.dtype == torch.float32
    again = convert(stock)
    with torch.no_grad():
        again.proj_out.bias += 1.0
    assert torch.equal(again.proj_out.bias, stock.proj_out.bias)


def test_a_half_precision_model_converts_with_a_float32_mixing():
    converted = convert(stock_transformer().to(torch.bfloat16), gate=True, local_conv=3)
    attention = converted.transformer_blocks[0].attn1
    assert attention.mixing.weight.dtype == torch.float32
    assert attention.to_gate.weight.dtype == attention.local_conv.weight.dtype == torch.bfloat16
    assert run(converted, **transformer_inputs(dtype=torch.bfloat16)).isfinite().all()


def test_only_the_given_instance_changes():
    pipe, other = stock_pipeline(), stock_transformer(seed=3)
    parts = {
        name: [type(module) for module in getattr(pipe, name).modules()] for name in ("vae", "text_encoder")
    }
    original, expected = pipe.transformer, run(other)
    kinds = [type(module) for module in original.modules()]
    pipe.transformer = convert(pipe.transformer)
    assert pipe.config["transformer"] == ("mhla_diffusion", "MHLASanaTransformer2DModel")
    for name, before in parts.items():
        assert [type(module) for module in getattr(pipe, name).modules()] == before
    assert [type(module) for module in original.modules()] == kinds
    assert torch.equal(run(other), expected)
    assert [type(module) for module in stock_transformer().modules()] == kinds
    pipe.transformer = restore(pipe.transformer)
    assert torch.equal(run(pipe.transformer), run(original))


def test_a_lora_made_on_the_stock_model_attaches_fully(tmp_path):
    stock = stock_transformer()
    stock.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=TARGETS))
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    made = get_peft_model_state_dict(stock)
    SanaPipeline.save_lora_weights(tmp_path, transformer_lora_layers=made)
    expected = run(stock)

    converted = convert(stock_transformer(), block_grid=(1, 1))
    without = run(converted)
    pipe = stock_pipeline(converted)
    pipe.load_lora_weights(tmp_path)
    attached = {name: p for name, p in converted.named_parameters() if "lora_" in name}
    assert len(made) == len(attached) == 2 * 16
    assert all(p.any() for p in attached.values())
    out = run(converted)
    assert relative(out, expected) < 1e-5 and relative(out, without) > 1e-3
    pipe.unload_lora_weights()
    assert torch.equal(run(converted), without)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 8}, "no option 'block_size'.*blocks per axis"),
        ({"block_grid": 16}, "two positive integers"),
        ({"block_grid": (2, 2, 2)}, "two positive integers"),
        ({"layers": [0, 2]}, "from 0 to 1"),
        ({"layers": "half"}, "'all', 'none' or a list"),
        ({"layers": 1.5}, "from 0 to 1"),
        ({"mixing_init": "linaer"}, "choose one of linear"),
        ({"local_conv": 4}, "odd kernel size"),
        ({"local_conv": True}, "odd kernel size"),
        ({"block_grid": (True, 2)}, "two positive integers"),
        ({"block_grid": "44"}, "two positive integers"),
        ({"other_layers": "x"}, "^other_layers='x': choose one of stock, softmax"),
        ({"normalizer": "x"}, "^normalizer='x': choose"),
        ({"mixing_normalization": "x"}, "^mixing_normalization='x': choose"),
        ({"gate": "yes"}, "^gate='yes': give True or False"),
        ({"norm_out": 1}, "^norm_out=1: give True or False"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        convert(stock_transformer(), **options)
    assert "\n" not in str(caught.value)


def test_integers_of_any_kind_are_taken_and_saved_as_plain_ones(tmp_path):
    options = {"block_grid": np.array([2, 3]), "layers": np.arange(2), "local_conv": np.int64(3)}
    converted = convert(stock_transformer(), **options)
    plain = convert(stock_transformer(), (2, 3), layers=[0, 1], local_conv=3)
    assert torch.equal(run(converted), run(plain))
    for grid in ((np.int64(2), 3), torch.tensor([2, 3])):
        assert convert(stock_transformer(), grid).config.mhla_block_grid == [2, 3]
    converted.save_pretrained(tmp_path)
    assert MHLASanaTransformer2DModel.load_config(tmp_path)["mhla_local_conv"] == 3
    direct = MHLASanaTransformer2DModel(
        **(dict(plain.config) | {"mhla_block_grid": (np.int32(2), np.uint8(3))})
    )
    assert direct.config.mhla_block_grid == [2, 3] and direct.transformer_blocks[0].attn1.block_grid == (2, 3)


def offloaded(model: SanaTransformer2DModel, how: str) -> SanaTransformer2DModel:
    cpu = torch.device("cpu")
    if how == "model":
        cpu_offload_with_hook(model, execution_device=cpu)
    else:
        apply_group_offloading(model, cpu, cpu, offload_type=how, num_blocks_per_group=1)
    return model


def stored_in_fp8(model: SanaTransformer2DModel) -> SanaTransformer2DModel:
    model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    return model


def with_adapter() -> SanaTransformer2DModel:
    model = stock_transformer()
    model.add_adapter(LoraConfig(r=2, target_modules=TARGETS))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.nn.Linear(2, 2),
            "takes one of SanaTransformer2DModel, .*, got a Linear",
        ),
        (lambda: stock_pipeline().vae, "got a AutoencoderDC"),
        (stock_pipeline, r"pipe\.transformer = convert\(pipe\.transformer\)"),
        (lambda: torch.compile(stock_transformer()), "convert first, then torch.compile"),
        (lambda: convert(stock_transformer()), "converted already"),
        (with_adapter, "carries adapters"),
        (lambda: stock_transformer().to("meta"), "offloaded"),
        (lambda: offloaded(stock_transformer(), "block_level"), "convert it before offload"),
        (lambda: offloaded(stock_transformer(), "leaf_level"), "convert it before offload"),
        (lambda: offloaded(stock_transformer(), "model"), "convert it before offload"),
        (lambda: stored_in_fp8(stock_transformer()), "enable_layerwise_casting.: convert it first"),
    ],
)
def test_a_model_that_cannot_be_converted_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        convert(make())
    assert "\n" not in str(caught.value)


def test_checkpointing_is_carried_over_and_back():
    stock = stock_transformer()
    assert not convert(stock).is_gradient_checkpointing
    stock.enable_gradient_checkpointing()
    converted = convert(stock)
    assert converted.is_gradient_checkpointing and restore(converted).is_gradient_checkpointing
    converted.train()(**transformer_inputs()).sample.sum().backward()
    assert converted.transformer_blocks[0].attn1.mixing.weight.grad.any()


def test_restore_takes_only_what_convert_made():
    with pytest.raises(ValueError, match="takes one of MHLASanaTransformer2DModel"):
        restore(stock_transformer())
    with pytest.raises(ValueError, match=r"pipe.transformer = restore.pipe.transformer."):
        restore(stock_pipeline(convert(stock_transformer())))
    with pytest.raises(ValueError, match="restore first, then torch.compile"):
        restore(torch.compile(convert(stock_transformer())))
