"""Layer-wise distillation after a conversion, on models of each family: what learns, what stays, what is put back."""

import copy

import pytest
import torch
from families import DIT, EACH, SANA, VIDEO, WAN

from mhla_diffusion import convert
from mhla_diffusion.attention import MHLASelfAttention
from mhla_diffusion.mixing import clip_mixings, learnable_mixings
from mhla_diffusion.training.distillation import (
    changed_part,
    check_distillable,
    distilling,
    layer_pairs,
    relative_error,
)
from mhla_diffusion.training.parameters import trainable
from mhla_diffusion.training.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore:the token grid holds only")


def converted(family, **options):
    """A stock model and its conversion, on weights of its own."""
    stock = family.stock_model()
    grid = (2, 2, 3) if family.is_video else (2, 2)
    return stock, convert(copy.deepcopy(stock), block_grid=grid, **options)


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def distil(family, model, pairs, steps, rate=3e-3):
    """Steps of one optimizer; the losses of each."""
    optimizer = torch.optim.AdamW([p for pair in pairs for p in pair.parameters], lr=rate)
    losses = []
    with distilling(model, pairs), torch.no_grad():
        for step in range(steps):
            family.run(model, **family.inputs(batch=4, seed=step))
            losses.append([pair.loss.item() for pair in pairs])
            optimizer.step()
            optimizer.zero_grad()
            clip_mixings(learnable_mixings(model))
    return torch.tensor(losses)


def error(family, model, stock):
    inputs = family.inputs(batch=4, seed=1000)
    with torch.no_grad():
        expected = family.run(stock, **inputs)
        return ((family.run(model, **inputs) - expected).norm() / expected.norm()).item()


@EACH
def test_thirty_steps_bring_the_model_near_the_stock_one(family):
    stock, model = converted(family, gate=True, local_conv=3)
    trainable(model, "attention")
    pairs = layer_pairs(model)
    assert [pair.name for pair in pairs] == [f"{family.layers}.{index}.attn1" for index in range(2)]
    before, teachers = weights(model), [weights(pair.teacher) for pair in pairs]
    first = error(family, model, stock)
    losses = distil(family, model, pairs, 30, rate=5e-3)
    assert (losses[-5:].mean(0) < 0.7 * losses[:2].mean(0)).all()
    assert error(family, model, stock) < 0.8 * first
    assert all(pair.loss.requires_grad is False for pair in pairs)

    for pair, kept in zip(pairs, teachers, strict=True):
        now = pair.teacher.state_dict()
        assert kept.keys() == now.keys() and all(
            torch.equal(value, now[name]) for name, value in kept.items()
        )
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(".attn1." in name for name in changed)
    assert all(p.grad is None for name, p in model.named_parameters() if ".attn1." not in name)


@EACH
def test_inside_the_model_draws_what_the_stock_one_does(family):
    stock, model = converted(family)
    pairs = layer_pairs(model)
    for size in ({}, {"size": family.sizes[0]}) if family is not DIT else ({},):  # the stock DiT is square
        inputs = family.inputs(**size)
        with torch.no_grad():
            expected = family.run(stock, **inputs)
            with distilling(model, pairs):
                torch.testing.assert_close(family.run(model, **inputs), expected, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(family.run(model, **inputs), expected, rtol=1e-3, atol=1e-4)


@EACH
def test_each_layer_s_gradient_is_that_of_its_own_error_alone(family):
    """On the stock model's inputs of that layer, which are recorded here by the stock layers themselves."""
    stock, model = converted(family, gate=True)
    inputs, seen = family.inputs(), []
    hooks = [
        family.layer(stock, index).attn1.register_forward_hook(
            lambda module, args, kwargs, output: seen.append((args[0].clone(), output.clone())),
            with_kwargs=True,
        )
        for index in range(2)
    ]
    positions = []
    pairs = layer_pairs(model)
    with torch.no_grad():
        family.run(stock, **inputs)
        with distilling(model, pairs):
            run = pairs[1].run
            pairs[1].student.forward = lambda *args, **kwargs: (
                positions.append((args, kwargs)),
                run(*args, **kwargs),
            )[1]
            family.run(model, **inputs)
    for hook in hooks:
        hook.remove()
    found = {name: p.grad.clone() for name, p in pairs[1].student.named_parameters()}
    assert found.keys() == dict(pairs[1].student.named_parameters()).keys()
    model.zero_grad()
    (_, *others), kwargs = positions[0]
    output = pairs[1].student(seen[1][0], *others, **kwargs)
    loss = ((output - seen[1][1]).square().mean((1, 2)) / seen[1][1].square().mean((1, 2))).mean()
    loss.backward()
    torch.testing.assert_close(pairs[1].loss, loss.detach(), rtol=1e-4, atol=1e-6)
    for name, parameter in pairs[1].student.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)


def state_around(model):
    """Everything that `distilling` changes for a while."""
    return (
        [vars(module).get("forward") for module in model.modules()],
        [getattr(module, "tabulated", None) for module in model.modules()],
        [module._compiled_call_impl for module in model.modules()],
        torch.is_grad_enabled(),
    )


@EACH
def test_all_is_put_back_after_an_exception(family):
    stock, model = converted(family)
    expected = family.run(model)
    for layer in getattr(model, family.layers):
        layer.compile(backend="eager")
    before, pairs = state_around(model), layer_pairs(model)
    assert any(before[2])
    pairs[1].teacher.forward = None  # fails in the middle of the model
    with pytest.raises(TypeError), distilling(model, pairs), torch.no_grad():
        family.run(model)
    assert state_around(model) == before
    pairs = layer_pairs(model)
    with pytest.raises(KeyboardInterrupt), distilling(model, pairs):
        raise KeyboardInterrupt
    assert state_around(model) == before
    for layer in getattr(model, family.layers):
        layer._compiled_call_impl = None
    assert torch.equal(family.run(model), expected)


def test_compiled_layers_run_as_they_are_while_they_learn():
    def refuse(graph, inputs):
        raise AssertionError("compiled")

    stock, model = converted(SANA)
    pairs = layer_pairs(model)
    for layer in model.transformer_blocks:
        layer.compile(backend=refuse)
    with distilling(model, pairs), torch.no_grad():
        SANA.run(model)
    assert all(pair.loss > 0 for pair in pairs)


@VIDEO
def test_a_hybrid_s_other_layers_stay_what_they_are(family):
    stock, model = converted(family, layers=[1])
    assert model.rope.tabulated
    pairs = layer_pairs(model)
    assert [pair.name for pair in pairs] == [f"{family.layers}.1.attn1"]
    before = weights(family.layer(model, 0))
    losses = distil(family, model, pairs, 20)
    assert losses[-3:].mean() < 0.8 * losses[:2].mean() and model.rope.tabulated
    assert all(
        torch.equal(value, before[name]) for name, value in family.layer(model, 0).state_dict().items()
    )


@EACH
def test_mixing_alone_can_learn(family):
    stock, model = converted(family)
    trainable(model, "mixing")
    before, pairs = weights(model), layer_pairs(model)
    losses = distil(family, model, pairs, 20, rate=0.01)
    assert losses[-3:].mean() < losses[:3].mean()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"{pair.name}.mixing.weight" for pair in pairs}


@EACH
def test_adapters_are_no_part_of_the_teachers(family):
    from peft import LoraConfig

    stock, model = converted(family)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    pairs = layer_pairs(model)
    own = family.layer(stock, 1).attn1.state_dict()
    assert pairs[1].teacher.state_dict().keys() == own.keys()
    assert all(torch.equal(value, own[name]) for name, value in pairs[1].teacher.state_dict().items())
    trainable(model, "lora+mixing")
    assert len(pairs[1].parameters) == 2 * 4 + 1
    losses = distil(family, model, pairs, 10, rate=0.01)
    assert losses[-2:].mean() < losses[0].mean()


def test_the_error_is_relative_for_each_sample_and_parts_average_to_the_whole():
    target = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    output = target + 0.1
    whole = relative_error(output, target)
    scale = torch.tensor([1.0, 10, 100, 1e-3, 1, 1]).view(-1, 1, 1)
    torch.testing.assert_close(relative_error(output * scale, target * scale), whole)
    parts = torch.stack([relative_error(output[i : i + 2], target[i : i + 2]) for i in (0, 2, 4)])
    torch.testing.assert_close(parts.mean(), whole)
    assert relative_error(torch.zeros_like(target), target) == 1
    assert relative_error(target.bfloat16(), target).dtype == torch.float32
    zero = torch.zeros(2, 3, 4)
    assert relative_error(zero, zero) == 0  # and no NaN


def recipe(steps=5):
    made = Recipe()
    made.distill.steps = steps
    return made


@EACH
def test_what_cannot_be_distilled_is_refused_in_one_line(family):
    stock, model = converted(family, gate=True, local_conv=3, norm_out=True)
    check_distillable(model, recipe())
    told = []
    with pytest.raises(ValueError, match="no layer of this .* is MHLA.*add \\[model.convert\\]") as caught:
        check_distillable(stock, recipe())
    told.append(caught.value)
    for part in ("mixing", "to_gate", "local_conv", "norm_out"):
        trained = copy.deepcopy(model)
        attention = family.layer(trained, 1).attn1
        assert changed_part(attention) is None
        with torch.no_grad():
            getattr(attention, part).weight.flatten()[-1] += 0.01
        assert changed_part(attention) == part
        with pytest.raises(ValueError, match=rf"\.1\.attn1\.{part} has been trained already") as caught:
            check_distillable(trained, recipe())
        told.append(caught.value)
    assert all("\n" not in str(each) and "distill.steps = 0" in str(each) for each in told)


def test_attentions_in_a_foreign_model_are_refused():
    attention = next(m for m in converted(DIT)[1].modules() if isinstance(m, MHLASelfAttention))
    with pytest.raises(ValueError, match="not known which stock attention a ModuleList stands for"):
        check_distillable(torch.nn.ModuleList([attention]), recipe())
    stock, model = converted(WAN)
    model.blocks[1].attn1.norm_q = None
    with pytest.raises(
        ValueError, match="blocks.1.attn1 lacks norm_q.weight of the attention of a WanTransformer3D"
    ):
        layer_pairs(model)
