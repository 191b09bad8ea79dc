"""The self-attention modules: what they compute, where they start, what they refuse."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, SanaLinearAttnProcessor2_0
from model_checks import relative
from peft import LoraConfig, inject_adapter_in_model

from mhla_diffusion.attention import (
    GATE_SHIFT,
    MHLAAttnProcessor,
    MHLASanaAttention,
    SoftmaxSanaAttention,
)
from mhla_diffusion.mixing import interpolate_mixing
from mhla_diffusion.ops import mhla_attention

CHANNELS, HEADS, DIM = 12, 2, 6


def mhla(block_grid=(2, 2), seed=0, **options) -> MHLASanaAttention:
    torch.manual_seed(seed)
    return MHLASanaAttention(CHANNELS, HEADS, DIM, block_grid=block_grid, **options)


def tokens(*grid, batch=2, seed=1) -> torch.Tensor:
    return torch.randn(batch, grid[0] * grid[1], CHANNELS, generator=torch.Generator().manual_seed(seed))


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, DIM))


@torch.no_grad()
def test_it_computes_the_operator_between_its_projections():
    attention, x = mhla(gate=True, local_conv=3, norm_out=True), tokens(5, 7)
    for module in (attention.to_gate, attention.local_conv):
        for parameter in module.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(3))
    attention.norm_out.weight.uniform_(0.5, 1.5)
    q, k, v = (heads(layer(x)).double() for layer in (attention.to_q, attention.to_k, attention.to_v))
    image = attention.to_v(x).transpose(1, 2).reshape(2, CHANNELS, 5, 7)
    local = F.conv2d(
        image, attention.local_conv.weight, attention.local_conv.bias, padding=1, groups=CHANNELS
    )
    expected = mhla_attention(
        q,
        k,
        v,
        attention.mixing.weight.double(),
        grid=(5, 7),
        block_grid=(2, 2),
        norm_weight=attention.norm_out.weight.double(),
        gate=heads(F.silu(attention.to_gate(x) + GATE_SHIFT)).double(),
        local=heads(local.flatten(2).transpose(1, 2)).double(),
        backend="reference",
    )
    expected = attention.to_out[0](expected.flatten(2).float())
    assert relative(attention(x, grid=(5, 7)), expected) < 1e-5


@torch.no_grad()
def test_gate_and_local_convolution_start_neutral_and_weight_decay_keeps_them_so():
    plain, full, x = mhla(), mhla(gate=True, local_conv=3), tokens(4, 6)
    assert relative(full(x, grid=(4, 6)), plain(x, grid=(4, 6))) < 1e-6
    for parameter in full.to_gate.parameters():
        parameter.mul_(0.9)  # a step of weight decay alone
    assert relative(full(x, grid=(4, 6)), plain(x, grid=(4, 6))) < 1e-6


@torch.no_grad()
def test_a_local_convolution_that_is_told_to_wrap_around_does():
    """Programs for pictures without seams set `padding_mode` in every convolution they find."""
    convolution, image = mhla(local_conv=3).local_conv, torch.randn(2, CHANNELS, 4, 5)
    convolution.weight.normal_()
    convolution.padding_mode = "circular"
    expected = F.conv2d(
        F.pad(image, (1, 1, 1, 1), "circular"), convolution.weight, convolution.bias, groups=CHANNELS
    )
    assert torch.equal(convolution(image), expected)


@pytest.mark.parametrize("rank", [CHANNELS, 2 * CHANNELS])
@torch.no_grad()
def test_an_adapter_fits_around_a_local_convolution(rank):
    """PEFT builds its two factors of the class that it finds, here of ours: without bias, not one channel a group."""
    model, image = mhla(local_conv=3), torch.randn(2, CHANNELS, 4, 5)
    stock = torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
    model.local_conv.load_state_dict(stock.state_dict())
    settings = LoraConfig(r=rank, target_modules=["local_conv"])
    with pytest.warns(UserWarning, match="groups > 1"):
        inject_adapter_in_model(settings, model)
    assert relative(model.local_conv(image), stock(image)) < 1e-6
    model.local_conv.lora_B["default"].weight.normal_()
    assert relative(model.local_conv(image), stock(image)) > 1e-3


def test_every_new_weight_gets_a_gradient():
    attention = mhla(gate=True, local_conv=3, norm_out=True)
    attention(tokens(5, 4), grid=(5, 4)).square().sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@torch.no_grad()
@pytest.mark.parametrize("normalized", [None, "rms_norm_across_heads"])
def test_one_block_with_stock_numerics_equals_the_stock_attention(normalized):
    torch.manual_seed(0)
    stock = Attention(
        CHANNELS,
        heads=HEADS,
        dim_head=DIM,
        kv_heads=HEADS,
        qk_norm=normalized,
        processor=SanaLinearAttnProcessor2_0(),
    )
    # A query row and all keys of a head without any active feature: stock's denominator is then 1e-15.
    stock.to_q.weight.copy_(stock.to_q.weight.abs())
    x = tokens(3, 5)
    x[0, 3] = -x[0, 3].abs()
    ours = mhla((1, 1), qk_norm=normalized, feature_eps=0.0, denominator_eps=1e-15).adopt(stock)
    out, expected = ours(x, grid=(3, 5)), stock(x)
    assert relative(out, expected) < 1e-5
    assert relative(out[0, 3], expected[0, 3]) < 1e-5


@torch.no_grad()
def test_the_softmax_partner_is_softmax_attention_with_the_same_gate_and_convolution():
    torch.manual_seed(0)
    attention = SoftmaxSanaAttention(CHANNELS, HEADS, DIM, gate=True, local_conv=3)
    attention.to_gate.weight.normal_()
    attention.local_conv.weight.normal_()
    x = tokens(4, 5)
    q, k, v = (heads(layer(x)).transpose(1, 2) for layer in (attention.to_q, attention.to_k, attention.to_v))
    core = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    gate = F.silu(attention.to_gate(x) + GATE_SHIFT)
    local = attention.local_conv(attention.to_v(x).transpose(1, 2).reshape(2, CHANNELS, 4, 5))
    expected = attention.to_out[0](core * gate + local.flatten(2).transpose(1, 2))
    assert relative(attention(x, grid=(4, 5)), expected) < 1e-5


@torch.no_grad()
def test_an_axis_with_fewer_tokens_than_blocks_uses_the_interpolated_matrix_and_says_so_once():
    attention, x = mhla((4, 2)), tokens(2, 6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = attention(x, grid=(2, 6))
        attention(x, grid=(2, 6))
    assert len(caught) == 1 and "interpolated" in str(caught[0].message)
    smaller = mhla((2, 2))
    smaller.mixing.weight.copy_(interpolate_mixing(attention.mixing.weight, (4, 2), (2, 2)))
    assert relative(out, smaller(x, grid=(2, 6))) < 1e-6


@torch.no_grad()
def test_half_precision_is_finite_and_close():
    attention, x = mhla(gate=True, local_conv=3), tokens(4, 4)
    expected = attention(x, grid=(4, 4))
    for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float16, 3e-3)):
        out = mhla(gate=True, local_conv=3).to(dtype)(x.to(dtype), grid=(4, 4))
        assert out.dtype == dtype
        assert relative(out.float(), expected) < tolerance


def test_a_foreign_processor_is_refused_and_nothing_changes():
    attention = mhla()
    for foreign in (AttnProcessor2_0(), SanaLinearAttnProcessor2_0(), object()):
        with pytest.raises(ValueError, match="MHLAAttnProcessor only") as caught:
            attention.set_processor(foreign)
        assert "\n" not in str(caught.value)
    assert type(attention.processor) is MHLAAttnProcessor
    attention.set_processor(MHLAAttnProcessor())


@pytest.mark.parametrize(
    "arguments",
    [{"attention_mask": torch.ones(2, 16)}, {"encoder_hidden_states": torch.ones(2, 3, CHANNELS)}],
)
def test_masks_and_other_tokens_are_refused(arguments):
    with pytest.raises(ValueError, match="takes neither"):
        mhla()(tokens(4, 4), grid=(4, 4), **arguments)


@pytest.mark.parametrize("kernel", [2, 0, -3, 3.0, True])
def test_a_kernel_that_has_no_middle_is_refused(kernel):
    with pytest.raises(ValueError, match="odd kernel size"):
        mhla(local_conv=kernel)


def test_per_head_matrices_and_a_frozen_one():
    attention = mhla(per_head_mixing=True, mixing_learnable=False)
    assert attention.mixing.weight.shape == (HEADS, 4, 4)
    attention(tokens(4, 4), grid=(4, 4)).sum().backward()
    assert attention.mixing.weight.grad is None
