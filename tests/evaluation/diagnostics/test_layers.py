"""A layer's matrices give the layer's own output: every kind of attention of every family."""

import pytest
import tiny_dit
import tiny_sana
import tiny_sana_video
import tiny_wan
import torch
import torch.nn.functional as F
from model_checks import stirred

from mhla_diffusion.evaluation.diagnostics.layers import attention_layers, layer_attention
from mhla_diffusion.models.dit import MHLADiTTransformer2DModel
from mhla_diffusion.models.sana import MHLASanaTransformer2DModel
from mhla_diffusion.models.wan import MHLAWanTransformer3DModel

SOFTMAX = {"mhla_layers": [], "mhla_other_layers": "softmax"}
PER_HEAD = {"mhla_block_grid": (2, 3), "mhla_per_head_mixing": True}


def sana(**options):
    return MHLASanaTransformer2DModel(**tiny_sana.TRANSFORMER, **options)


def dit(**options):
    return MHLADiTTransformer2DModel(**tiny_dit.TRANSFORMER, **options)


def wan(**options):
    return MHLAWanTransformer3DModel(**tiny_wan.TRANSFORMER, mhla_block_grid=(2, 2, 3), **options)


def dit_inputs():
    return {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)),
        "timestep": torch.tensor([20, 900]),
        "class_labels": torch.tensor([1, 2]),
    }


SANA, WAN = tiny_sana.transformer_inputs, tiny_wan.transformer_inputs
VIDEO = tiny_sana_video.transformer_inputs
CASES = {
    "stock sana": (lambda: tiny_sana.stock_transformer(), SANA, "linear"),
    "sana, linear": (lambda: sana(mhla_block_grid=(1, 1)), SANA, "linear"),
    "sana, mhla": (lambda: sana(mhla_block_grid=(3, 2)), SANA, "mhla"),
    "sana, per head and qk norm": (lambda: sana(**PER_HEAD, qk_norm="rms_norm_across_heads"), SANA, "mhla"),
    "sana, softmax": (lambda: sana(**SOFTMAX), SANA, "softmax"),
    "stock dit": (lambda: tiny_dit.stock_transformer(), dit_inputs, "softmax"),
    "dit, mhla": (lambda: dit(mhla_block_grid=(2, 2), mhla_norm_in=True), dit_inputs, "mhla"),
    "dit, official": (lambda: dit(mhla_block_grid=(2, 2), mhla_normalizer="official"), dit_inputs, "mhla"),
    "dit, softmax": (lambda: dit(**SOFTMAX), dit_inputs, "softmax"),
    "stock wan": (lambda: tiny_wan.stock_transformer(), WAN, "softmax"),
    "wan, mhla": (lambda: wan(mhla_normalizer="paper", mhla_norm_out=False), WAN, "mhla"),
    "wan, none": (lambda: wan(), WAN, "mhla"),
    "wan, softmax": (lambda: wan(**SOFTMAX), WAN, "softmax"),
    "stock sana video": (lambda: tiny_sana_video.stock_transformer(), VIDEO, "linear"),
    "sana video, mhla": (lambda: tiny_sana_video.model(), VIDEO, "mhla"),
    "sana video, no norms": (lambda: tiny_sana_video.model(qk_norm=None), VIDEO, "mhla"),
    "sana video, softmax": (lambda: tiny_sana_video.model(qk_norm=None, **SOFTMAX), VIDEO, "softmax"),
    "wan, stock layers": (lambda: wan(mhla_layers=[]), WAN, "softmax"),
}


@pytest.fixture(params=CASES, name="case")
def _case(request):
    build, inputs, kind = CASES[request.param]
    torch.manual_seed(0)
    return stirred(build()).eval(), inputs(), kind


def test_a_layers_matrices_give_its_output(case):
    model, inputs, kind = case
    layers = attention_layers(model)
    seen = {}

    def keep(name):
        return lambda module, args, kwargs, output: seen.update({name: (args, kwargs, output)})

    handles = [module.register_forward_hook(keep(name), with_kwargs=True) for name, module in layers.items()]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    assert len(seen) == 2
    for name, (args, kwargs, output) in seen.items():
        module = layers[name]
        found = layer_attention(module, slice(None), *args, **kwargs)
        assert (found.kind, found.items, found.heads) == (kind, 2, 2)
        hidden = args[0]
        if getattr(module, "norm_in", None) is not None:
            hidden = module.norm_in(hidden)
        value = module.to_v(hidden).unflatten(-1, (2, -1)).double()
        core = torch.stack(
            [
                torch.stack([found.matrix(b, h).times(value[b, :, h]) for h in range(2)], dim=1)
                for b in range(2)
            ]
        )  # (B, N, H, D)
        if getattr(module, "norm_out", None) is not None:
            core = F.rms_norm(core, core.shape[-1:], module.norm_out().double(), 1e-6)
        with torch.no_grad():
            wanted = module.to_out[1](module.to_out[0](core.float().flatten(2)))
        # With a norm behind it the output depends on the scale of a row through eps alone.
        limit = 1e-2 if getattr(module, "norm_out", None) is not None else 2e-5
        assert float((wanted - output).norm() / output.norm()) < limit, name


def test_one_part_of_the_batch_is_taken():
    model, inputs = sana(mhla_block_grid=(2, 2)).eval(), SANA()
    caught = []
    module = attention_layers(model)["transformer_blocks.0.attn1"]
    handle = module.register_forward_pre_hook(
        lambda module, args, kwargs: caught.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    whole = layer_attention(module, slice(None), *caught[0][0], **caught[0][1])
    part = layer_attention(module, slice(1, 2), *caught[0][0], **caught[0][1])
    ids = torch.arange(4)
    assert part.items == 1
    torch.testing.assert_close(part.matrix(0, 1).rows(ids), whole.matrix(1, 1).rows(ids))


def test_rows_sum_to_one_where_the_layer_divides_by_its_own_mass():
    for build, inputs in ((lambda: sana(mhla_block_grid=(3, 2)), SANA), (tiny_sana.stock_transformer, SANA)):
        model = build().eval()
        caught = []
        module = attention_layers(model)["transformer_blocks.1.attn1"]
        handle = module.register_forward_pre_hook(
            lambda module, args, kwargs, caught=caught: caught.append((args, kwargs)), with_kwargs=True
        )
        with torch.no_grad():
            model(**inputs())
        handle.remove()
        matrix = layer_attention(module, slice(0, 1), *caught[0][0], **caught[0][1]).matrix(0, 0)
        sums = matrix.times(torch.ones(64, 1, dtype=torch.float64))
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-6, atol=1e-6)


def test_models_without_such_layers_are_refused():
    with pytest.raises(ValueError, match="no self-attention called attn1"):
        attention_layers(torch.nn.Linear(2, 2))
