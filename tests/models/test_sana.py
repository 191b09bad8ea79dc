"""MHLASanaTransformer2DModel: stock where MHLA is off, a good Diffusers model where it is on."""

import inspect

import pytest
import torch
from diffusers import FirstBlockCacheConfig, SanaTransformer2DModel
from diffusers.models.attention_processor import AttnProcessor2_0
from peft import LoraConfig
from tiny_sana import TRANSFORMER, stock_transformer, transformer_inputs

from mhla_diffusion.attention import MHLASanaAttention, SoftmaxSanaAttention
from mhla_diffusion.mixing import initial_mixing
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel

EVERYTHING = {"mhla_gate": True, "mhla_local_conv": 3, "mhla_norm_out": True, "mhla_per_head_mixing": True}


def model(seed: int = 0, **options) -> MHLASanaTransformer2DModel:
    torch.manual_seed(seed)
    return MHLASanaTransformer2DModel(**(TRANSFORMER | options)).eval()


def stirred(target: torch.nn.Module, seed: int = 5) -> torch.nn.Module:
    """The same module with every weight moved off its start, so that no part is neutral."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter += 0.05 * torch.rand(parameter.shape, generator=draw)
    return target


def run(target: torch.nn.Module, **inputs) -> torch.Tensor:
    return target(**(inputs or transformer_inputs())).sample


def public(config) -> dict:
    return {name: value for name, value in config.items() if not name.startswith("_")}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_every_stock_argument_has_the_stock_default():
    stock = inspect.signature(SanaTransformer2DModel.__init__).parameters
    ours = inspect.signature(MHLASanaTransformer2DModel.__init__).parameters
    assert {name: ours[name].default for name in stock} == {name: p.default for name, p in stock.items()}
    assert {name for name in ours if name not in stock} == {n for n in ours if n.startswith("mhla_")}


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"patch_size": 2, "qk_norm": "rms_norm_across_heads"}])
def test_without_mhla_it_is_the_stock_model_bit_for_bit(changes):
    stock, ours = stock_transformer(**changes), model(mhla_layers=[], **changes)
    assert stock.state_dict().keys() == ours.state_dict().keys()
    assert all(torch.equal(ours.state_dict()[key], value) for key, value in stock.state_dict().items())
    assert torch.equal(run(stock), run(ours))


def test_the_same_seed_gives_the_same_shared_weights_whatever_the_attention():
    stock = stock_transformer().state_dict()
    for options in (EVERYTHING, {"mhla_layers": [0]}, {"mhla_layers": [], "mhla_other_layers": "softmax"}):
        ours = model(**options).state_dict()
        assert all(torch.equal(ours[key], value) for key, value in stock.items())
    after = torch.rand(1)
    stock_transformer()
    assert torch.equal(after, torch.rand(1))


def test_layers_get_the_attention_they_were_given():
    hybrid = model(num_layers=3, mhla_layers=[2, 0], mhla_gate=True)
    kinds = [type(block.attn1).__name__ for block in hybrid.transformer_blocks]
    assert kinds == ["MHLASanaAttention", "Attention", "MHLASanaAttention"]
    assert hybrid.config.mhla_layers == [0, 2]
    softmax = model(mhla_layers=[0], mhla_other_layers="softmax", mhla_gate=True, mhla_local_conv=3)
    assert type(softmax.transformer_blocks[1].attn1) is SoftmaxSanaAttention
    new = {key for key in softmax.state_dict() if key.startswith("transformer_blocks.1.attn1.")}
    assert {key.split(".")[3] for key in new} >= {"to_gate", "local_conv"}
    assert not any("mixing" in key for key in new)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, EVERYTHING, {"mhla_layers": [0], "mhla_other_layers": "softmax"}])
def test_save_and_load_are_bit_equal(tmp_path, options):
    ours = stirred(model(**options))
    ours.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = MHLASanaTransformer2DModel.from_pretrained(tmp_path)
    assert public(again.config) == public(ours.config)
    assert again.state_dict().keys() == ours.state_dict().keys()
    assert all(torch.equal(again.state_dict()[key], value) for key, value in ours.state_dict().items())
    # Into fresh memory: the address of a tensor mapped from a file decides the order of a product's sums.
    fresh = model(**options)
    fresh.load_state_dict(again.state_dict())
    assert torch.equal(run(fresh), run(ours))


@torch.no_grad()
def test_any_picture_size_works_with_one_set_of_weights():
    ours = stirred(model(mhla_local_conv=3))
    for grid in ((8, 8), (7, 5), (4, 9), (16, 4)):
        inputs = transformer_inputs(batch=3, grid=grid)
        out = run(ours, **inputs)
        assert out.shape == (3, 4, *grid) and out.isfinite().all()
        alone = run(ours, **{name: value[1:2] for name, value in inputs.items()})
        assert relative(out[1:2], alone) < 1e-5
    with pytest.warns(UserWarning, match="interpolated"):
        assert run(ours, **transformer_inputs(grid=(2, 8))).isfinite().all()


def test_loading_a_stock_checkpoint_starts_every_new_weight_as_documented(tmp_path):
    stock = stock_transformer()
    stock.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        ours, info = MHLASanaTransformer2DModel.from_pretrained(
            tmp_path, torch_dtype=dtype, output_loading_info=True, mhla_gate=True, mhla_local_conv=3
        )
        assert len(info["missing_keys"]) == 2 * 5
        for block in ours.transformer_blocks:
            mixing = block.attn1.mixing.weight
            assert mixing.dtype == torch.float32
            assert torch.equal(mixing, initial_mixing((4, 4)))
            for module in (block.attn1.to_gate, block.attn1.local_conv):
                assert all(p.dtype == dtype and not p.any() for p in module.parameters())
        assert not any(parameter.is_meta for parameter in ours.parameters())
        assert run(ours, **transformer_inputs(dtype=dtype)).isfinite().all()


def test_a_checkpoint_without_the_shared_weights_is_refused(tmp_path):
    stock_transformer(num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks .* of the model's weights") as caught:
        MHLASanaTransformer2DModel.from_pretrained(tmp_path, num_layers=2)
    assert "\n" not in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize("given", [{"num_layers": 1}, {"mhla_gate": False}, {"mhla_layers": []}])
def test_weights_without_a_place_are_refused_not_dropped(tmp_path, given):
    model(**EVERYTHING).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no place for") as caught:
        MHLASanaTransformer2DModel.from_pretrained(tmp_path, **given)
    assert "\n" not in str(caught.value)


def test_the_mixing_stays_in_float32_in_a_half_precision_model(tmp_path):
    ours = model()
    expected = run(ours)
    ours.save_pretrained(tmp_path)
    half = MHLASanaTransformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert {block.attn1.mixing.weight.dtype for block in half.transformer_blocks} == {torch.float32}
    assert relative(run(half, **transformer_inputs(dtype=torch.bfloat16)).float(), expected) < 2e-2


def test_a_matrix_shared_by_two_layers_can_be_saved(tmp_path):
    ours = stirred(model())
    ours.transformer_blocks[1].attn1.mixing = ours.transformer_blocks[0].attn1.mixing
    ours.save_pretrained(tmp_path)
    shared = ours.transformer_blocks[0].attn1.mixing
    assert ours.transformer_blocks[1].attn1.mixing is shared  # saving unshares the file, not the model
    again = MHLASanaTransformer2DModel.from_pretrained(tmp_path)
    assert torch.equal(again.transformer_blocks[1].attn1.mixing.weight, shared.weight)
    with torch.no_grad():
        assert relative(run(again), run(ours)) < 1e-6


def gradients(target: torch.nn.Module) -> dict[str, torch.Tensor]:
    target.zero_grad()
    run(target).square().sum().backward()
    return {name: p.grad.clone() for name, p in target.named_parameters() if p.grad is not None}


def test_checkpointing_gives_the_same_gradients_also_with_a_frozen_base():
    ours = stirred(model(**EVERYTHING)).train()
    plain = gradients(ours)
    assert plain.keys() == {name for name, _ in ours.named_parameters()}
    ours.enable_gradient_checkpointing()
    checkpointed = gradients(ours)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(checkpointed[name], value) for name, value in plain.items())

    ours.requires_grad_(False)
    for block in ours.transformer_blocks:
        block.attn1.mixing.requires_grad_(True)
    frozen = gradients(ours)
    assert set(frozen) == {f"transformer_blocks.{i}.attn1.mixing.weight" for i in range(2)}
    assert all(relative(value, plain[name]) < 1e-6 for name, value in frozen.items())


def test_compiled_in_one_graph_it_gives_the_same_output_and_gradients():
    ours = stirred(model(mhla_layers=[0], mhla_other_layers="softmax", mhla_gate=True, mhla_local_conv=3))
    out, plain = run(ours), gradients(ours)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert relative(run(compiled), out) < 1e-6
    for grid in ((7, 5), (12, 6)):  # another size, then a graph for any size
        inputs = transformer_inputs(grid=grid)
        assert relative(run(compiled, **inputs), run(ours, **inputs)) < 1e-6
    compiled_gradients = gradients(compiled)
    for name, value in plain.items():
        assert relative(compiled_gradients[f"_orig_mod.{name}"], value) < 1e-5, name


def test_regional_compilation_finds_the_layers():
    ours = stirred(model())
    with torch.no_grad():
        out = run(ours)
        ours.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        assert relative(run(ours), out) < 1e-6


def test_a_lora_can_be_trained_on_every_attention():
    ours = model()
    ours.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    trained = {name: p for name, p in ours.named_parameters() if "lora_" in name}
    assert len(trained) == 2 * 2 * 4 * 2  # layers, attentions, projections, A and B
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_B" in name:  # zero at first, which would keep A's gradient zero
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    run(ours).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained.values())


@torch.no_grad()
def test_the_first_block_cache_works():
    ours = model(num_layers=3)
    ours.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    cached = model(num_layers=3)
    with ours.cache_context("cond"):
        assert relative(run(ours), run(cached)) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("kind", [{"offload_type": "leaf_level"}, {"num_blocks_per_group": 1}])
def test_group_offload_finds_every_weight_where_it_is_used(kind):
    ours = stirred(model(**EVERYTHING))
    expected = run(ours)
    cpu = torch.device("cpu")
    ours.enable_group_offload(onload_device=cpu, offload_device=cpu, **kind)
    assert torch.equal(run(ours), expected)


@torch.no_grad()
def test_layerwise_casting_leaves_the_mixing_alone():
    ours = model()
    ours.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert ours.transformer_blocks[0].attn1.to_q.weight.dtype == torch.float8_e4m3fn
    assert ours.transformer_blocks[0].attn1.mixing.weight.dtype == torch.float32
    assert run(ours).isfinite().all()


def test_setting_one_processor_for_all_is_refused():
    ours = model()
    before = {name: type(processor) for name, processor in ours.attn_processors.items()}
    with pytest.raises(ValueError, match="restore"):
        ours.set_attn_processor(AttnProcessor2_0())
    assert {name: type(processor) for name, processor in ours.attn_processors.items()} == before


def test_a_backend_can_be_chosen():
    ours = stirred(model())
    with torch.no_grad():
        expected = run(ours)
        ours.set_mhla_backend("reference")
        assert all(block.attn1.backend == "reference" for block in ours.transformer_blocks)
        assert relative(run(ours), expected) < 1e-5


def test_a_token_mask_is_refused():
    inputs = transformer_inputs()
    with pytest.raises(ValueError, match="attention_mask"):
        model()(**inputs, attention_mask=torch.ones(2, 64))


def test_latents_that_do_not_divide_into_patches_are_refused():
    with pytest.raises(ValueError, match="7x8 do not divide into patches of 2x2"):
        run(model(patch_size=2), **transformer_inputs(grid=(7, 8)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mhla_block_grid": [4]}, "two positive integers"),
        ({"mhla_block_grid": 8}, "two positive integers"),
        ({"mhla_block_grid": [0, 4]}, "two positive integers"),
        ({"mhla_block_grid": [65, 64]}, "4160 blocks have .* at most 4096 in all"),
        ({"mhla_layers": [2]}, "from 0 to 1"),
        ({"mhla_layers": [-1]}, "from 0 to 1"),
        ({"mhla_layers": [0, 0]}, "different layer indices"),
        ({"mhla_layers": "half"}, "give .all. or a list"),
        ({"mhla_normalizer": "Paper"}, "choose one of paper, none, official"),
        ({"mhla_mixing_init": "lineal"}, "choose one of linear"),
        ({"mhla_mixing_normalization": "rows"}, "choose one of row"),
        ({"mhla_other_layers": "linear"}, "choose one of stock, softmax"),
        ({"mhla_local_conv": 4}, "odd kernel size"),
    ],
)
def test_a_value_outside_the_allowed_ones_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        model(**options)
    assert "\n" not in str(caught.value)


def test_the_stock_class_reports_what_it_cannot_use(tmp_path, caplog):
    """Diffusers gives no way to make this an error; `load_pipeline` is what catches it for a pipeline."""
    model().save_pretrained(tmp_path)
    from diffusers.utils import logging

    logging.enable_propagation()
    try:
        _, info = SanaTransformer2DModel.from_pretrained(tmp_path, output_loading_info=True)
    finally:
        logging.disable_propagation()
    assert any("mixing" in key for key in info["unexpected_keys"])
    assert "mhla_block_grid" in caplog.text and "were not used" in caplog.text


def test_isinstance_of_the_parts():
    ours = model()
    assert isinstance(ours, SanaTransformer2DModel)
    assert all(isinstance(block.attn1, MHLASanaAttention) for block in ours.transformer_blocks)
