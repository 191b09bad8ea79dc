"""MHLADiTTransformer2DModel: stock where MHLA is off, and what stock lacks where it is on."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checks import relative, same_weights, stirred
from tiny_dit import CLASSES, EVERYTHING, model, run, stock_transformer, transformer_inputs

from mhla_diffusion.models.convert import convert, restore
from mhla_diffusion.models.dit import MHLADiTTransformer2DModel


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"out_channels": None, "patch_size": 4, "attention_bias": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_mhla_it_is_the_stock_model_bit_for_bit(changes, dtype):
    stock, ours = stock_transformer(**changes).to(dtype), model(mhla_layers=[], **changes).to(dtype)
    assert same_weights(stock, ours)
    for size in ((8, 8), (12, 12)):  # the trained size, and one whose positions are stretched
        inputs = transformer_inputs(size=size, dtype=dtype)
        assert torch.equal(run(stock, **inputs), run(ours, **inputs))


@torch.no_grad()
def test_one_layer_computes_what_its_formula_says():
    """A whole model of one layer, spelled out: positions, modulation, MHLA with all its options, unpatchify."""
    ours = stirred(model(num_layers=1, **EVERYTHING)).double()
    inputs = transformer_inputs(size=(8, 12), dtype=torch.float64)
    layer, attention = ours.transformer_blocks[0], ours.transformer_blocks[0].attn1
    rows, columns, width = 4, 6, 16

    def waves(position: torch.Tensor) -> torch.Tensor:
        angle = position[:, None] / 10000 ** (torch.arange(width // 4).double() / (width / 4))
        return torch.cat((angle.sin(), angle.cos()), dim=1)

    y = waves(torch.arange(rows).double() * 4 / rows)[:, None].expand(rows, columns, -1)
    x = waves(torch.arange(columns).double() * 4 / columns)[None].expand(rows, columns, -1)
    positions = torch.cat((x, y), dim=-1).reshape(rows * columns, width)
    tokens = ours.pos_embed.proj(inputs["hidden_states"]).flatten(2).transpose(1, 2) + positions

    # The stock embedder has angles in float32: of timestep 900 that is coarser than all that is compared here.
    frequencies = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 127)
    angle = (inputs["timestep"][:, None].float() * frequencies).double()
    first, second = layer.norm1.emb.timestep_embedder.linear_1, layer.norm1.emb.timestep_embedder.linear_2
    time = second(F.silu(first(torch.cat((angle.cos(), angle.sin()), dim=1))))
    conditioning = time + layer.norm1.emb.class_embedder.embedding_table.weight[inputs["class_labels"]]
    parts = layer.norm1.linear(F.silu(conditioning))[:, None].chunk(6, dim=-1)

    h = attention.norm_in(F.layer_norm(tokens, (width,), eps=1e-6) * (1 + parts[1]) + parts[0])
    q, k, v = (f(h).unflatten(-1, (2, 8)) for f in (attention.to_q, attention.to_k, attention.to_v))
    q, k = q.relu() + 1e-6, k.relu() + 1e-6
    block = torch.tensor([2 * (r // 2) + c // 3 for r in range(rows) for c in range(columns)])
    weights = attention.mixing()[:, block][:, :, block].double()  # (H, N, N): of query token and key token
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * weights
    core = torch.einsum("bhnm,bmhd->bnhd", scores / scores.sum(-1, keepdim=True), v)
    core = core * torch.rsqrt(core.square().mean(-1, keepdim=True) + 1e-6) * attention.norm_out.weight
    core = core * F.silu(attention.to_gate(h) + 1.2784645).unflatten(-1, (2, 8))
    picture = v.flatten(2).transpose(1, 2).unflatten(-1, (rows, columns))
    local = attention.local_conv(picture).flatten(2).transpose(1, 2)
    tokens = tokens + parts[2] * attention.to_out[0](core.flatten(2) + local)
    h = F.layer_norm(tokens, (width,), eps=1e-5) * (1 + parts[4]) + parts[3]
    tokens = tokens + parts[5] * layer.ff(h)

    shift, scale = ours.proj_out_1(F.silu(conditioning))[:, None].chunk(2, dim=-1)
    out = ours.proj_out_2(F.layer_norm(tokens, (width,), eps=1e-6) * (1 + scale) + shift)
    expected = torch.empty(2, 8, 8, 12, dtype=torch.float64)
    for token in range(rows * columns):
        r, c = divmod(token, columns)
        patch = out[:, token].unflatten(-1, (2, 2, 8)).permute(0, 3, 1, 2)
        expected[:, :, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2] = patch
    assert relative(run(ours, **inputs), expected) < 1e-7


@torch.no_grad()
@settings(max_examples=15)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    blocks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    everything=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:the token grid holds only")
def test_any_grid_equals_the_reference_and_an_item_its_single_run(rows, columns, blocks, everything):
    ours = stirred(model(mhla_block_grid=blocks, **(EVERYTHING if everything else {})))
    inputs = transformer_inputs(batch=3, size=(2 * rows, 2 * columns))
    out = run(ours, **inputs)
    assert out.shape == (3, 8, 2 * rows, 2 * columns) and out.isfinite().all()
    alone = run(ours, **{name: value[1:2] for name, value in inputs.items()})
    assert relative(out[1:2], alone) < 1e-5
    ours.set_mhla_backend("reference")
    assert relative(out, run(ours, **inputs)) < 1e-5


@torch.no_grad()
def test_shared_embedders_compute_the_same_with_less(tmp_path):
    ours = stirred(model())
    with pytest.raises(ValueError, match="layer 1 embeds in another way"):
        ours.share_embedders()
    first = ours.transformer_blocks[0].norm1.emb
    ours.transformer_blocks[1].norm1.emb.load_state_dict(first.state_dict())
    expected, parameters = run(ours), sum(p.numel() for p in ours.parameters())
    calls = []
    first.register_forward_hook(lambda *_: calls.append(1))
    ours.share_embedders()
    assert torch.equal(run(ours), expected) and len(calls) == 1
    assert parameters - sum(p.numel() for p in ours.parameters()) == sum(
        p.numel() for p in first.parameters()
    )
    ours.save_pretrained(tmp_path)
    again = MHLADiTTransformer2DModel.from_pretrained(tmp_path)
    assert again.state_dict().keys() == ours.state_dict().keys()
    assert relative(run(again), expected) < 1e-6
    again.share_embedders()
    stock = restore(again)
    stock.save_pretrained(tmp_path / "stock")


def test_labels_are_dropped_in_training_for_all_layers_alike():
    ours = model(mhla_layers=[]).train()
    inputs = transformer_inputs(batch=64)
    inputs["class_labels"] = torch.zeros(64, dtype=torch.long)
    seen = []
    for layer in ours.transformer_blocks:
        layer.norm1.emb.class_embedder.register_forward_pre_hook(lambda _, labels: seen.append(labels[0]))
    run(ours, **inputs)
    assert 0 < (seen[0] == CLASSES).sum() < 20 and ((seen[0] == 0) | (seen[0] == CLASSES)).all()
    assert all(torch.equal(labels, seen[0]) for labels in seen)
    seen.clear()
    ours.label_dropout = 0
    run(ours, **inputs)
    ours.eval().label_dropout = 0.5
    run(ours, **inputs)
    assert all(not labels.any() for labels in seen)


@torch.no_grad()
def test_time_frequencies_of_the_original_code_are_an_option(tmp_path):
    ours = model(mhla_time_shift=0)
    ours.save_pretrained(tmp_path)
    again = MHLADiTTransformer2DModel.from_pretrained(tmp_path)
    proj = again.transformer_blocks[1].norm1.emb.time_proj
    time = torch.tensor([500])
    angle = time * torch.exp(-math.log(10000) * torch.arange(128) / 128)
    assert relative(proj(time), torch.cat((angle.cos(), angle.sin()))[None]) < 1e-4
    assert relative(run(ours), run(model())) > 1e-4
    with pytest.raises(ValueError, match="shift of 1 only"):
        restore(ours)


@pytest.mark.parametrize("head_dim", [72, 12])
def test_head_dims_of_xl_and_odd_ones_work(head_dim):
    ours = stirred(model(attention_head_dim=head_dim))
    with torch.no_grad():
        out = run(ours)
        ours.set_mhla_backend("reference")
        assert relative(out, run(ours)) < 1e-5


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"hidden_states": torch.zeros(2, 4, 8, 7)}, "8x7 do not divide into patches of 2x2"),
        ({"timestep": None}, "needs timestep and class_labels"),
        ({"class_labels": None}, "needs timestep and class_labels"),
        ({"cross_attention_kwargs": {"mask": 1}}, "no layer has a stock attention"),
    ],
)
def test_inputs_that_cannot_work_are_refused_in_one_line(inputs, message):
    with pytest.raises(ValueError, match=message) as caught:
        model()(**(transformer_inputs() | inputs))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mhla_block_grid": [2, 2, 2]}, "two positive integers"),
        ({"mhla_time_shift": 2}, "choose one of 0, 1"),
        ({"sample_size": 9}, "does not divide into patches of patch_size=2: give a multiple, such as 8"),
    ],
)
def test_a_value_outside_the_allowed_ones_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        model(**options)
    assert "\n" not in str(caught.value)


def test_another_block_grid_than_the_saved_one_names_the_command(tmp_path):
    model().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"have the shape \[4, 4\], .*want \[9, 9\]: `mhla convert"
    ) as caught:
        MHLADiTTransformer2DModel.from_pretrained(tmp_path, mhla_block_grid=(3, 3))
    assert "\n" not in str(caught.value)


def test_an_unknown_option_in_a_config_is_refused(tmp_path):
    ours = model()
    ours.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no option 'mhla_block_size': choose among mhla_block_grid, "):
        MHLADiTTransformer2DModel.from_config({**ours.config, "mhla_block_size": 8})
    with pytest.raises(ValueError, match="no option 'mhla_gates'"):
        MHLADiTTransformer2DModel.from_pretrained(tmp_path, mhla_gates=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 8}, "no option 'block_size'.*blocks per axis"),
        ({"block_grid": (2, 2, 2)}, "two positive integers"),
        ({"layers": [0, 2]}, "from 0 to 1"),
    ],
)
def test_a_wrong_conversion_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        convert(stock_transformer(), **options)
    assert "\n" not in str(caught.value)
