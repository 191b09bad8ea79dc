"""Diffusers' DiT folders are adapted to MHLA: every choice of weights, new classes, and what their classes lack."""

import json

import pytest
import torch
from PIL import Image
from tiny_dit import stock_transformer

import mhla_diffusion
from mhla_diffusion import MHLADiTPipeline, convert
from mhla_diffusion.models.adapters import load_adapter
from mhla_diffusion.training import run
from mhla_diffusion.training.checkpoint import find_checkpoint, read_checkpoint
from mhla_diffusion.training.components import build_components
from mhla_diffusion.training.loop import Training
from mhla_diffusion.training.recipe import load_recipe


@pytest.mark.parametrize("train", ["mixing", "attention", "all", "lora+mixing"])
def test_a_stock_dit_is_converted_and_adapted(adapt, stock, train, capsys, tmp_path):  # case T5
    data = tmp_path / "data"
    for name in ("umbrella", "white shark", "7"):  # two by name, one by number
        (data / name).mkdir(parents=True)
        Image.new("RGB", (16, 16), (200, 30, 30)).save(data / name / "0.png")
    settings = [
        f"model.base={stock}", f'model.train="{train}"', "model.convert.block_grid=[2, 2]", "model.convert.layers=[1]",
        "run.batch_size=3", "model.lora.rank=2",
    ]  # fmt: skip
    result = run(adapt(data=data), settings)
    listed = capsys.readouterr().out
    pipe = mhla_diffusion.load_pipeline(result.pipeline)
    assert type(pipe) is MHLADiTPipeline and pipe.transformer.config.mhla_layers == [1]
    assert pipe.labels["umbrella"] == 2 and pipe.num_classes == 10
    before, after = stock_like(stock), pipe.transformer.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    trained = json.loads((result.out / "run.json").read_text())["trained"]
    assert f'model.train = "{train}" trains {len(trained)} tensors' in listed
    mixing = "transformer.transformer_blocks.1.attn1.mixing.weight"
    assert mixing in trained and "transformer_blocks.*.attn1.mixing (1)" in listed
    if train == "mixing":
        assert trained == [mixing] and not changed
    elif train == "attention":
        assert all(".attn1." in name for name in trained) and len(trained) == 2 * 8 + 1
        assert changed and all(".attn1." in name for name in changed)
    elif train == "all":
        model = convert(stock_transformer(), block_grid=(2, 2), layers=[1])
        model.transformer_blocks[1].norm1.emb = model.transformer_blocks[0].norm1.emb  # they share one
        assert trained == [f"transformer.{name}" for name, _ in model.named_parameters()]
    else:
        assert sum("lora_" in name for name in trained) == 2 * 4 * 2 and len(trained) == 17
        assert changed and all(name.endswith((".weight",)) and ".attn1." in name for name in changed)
    if train in ("mixing", "lora+mixing"):
        again = convert(mhla_diffusion.load_pipeline(stock).transformer, block_grid=(2, 2), layers=[1])
        load_adapter(again, result.out / "adapter")  # pairs and mixing, in one call
        again.eval()
        inputs = {"timestep": torch.tensor([500.0]), "class_labels": torch.tensor([2])}
        x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            one, other = again(x, **inputs).sample, pipe.transformer.eval()(x, **inputs).sample
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def stock_like(folder):
    return mhla_diffusion.load_pipeline(folder).transformer.state_dict()


def test_a_softmax_dit_of_this_trainer_is_adapted_by_a_second_run(class_recipe, adapt, tmp_path):
    softmax_only = ["model.transformer.mhla_layers=[]", "model.transformer.mhla_gate=false"]
    original = run(class_recipe("original"), softmax_only)
    softmax = mhla_diffusion.load_pipeline(original.pipeline).transformer
    assert not any(".mixing." in name for name, _ in softmax.named_parameters())
    settings = [
        f"model.base={original.pipeline}", "data.size=32", "model.convert.block_grid=[2, 2]", "run.first_step=6",
        "run.steps=9",
    ]  # fmt: skip
    adapted = run(adapt(), settings)
    assert adapted.step == 9
    # Its steps see what the original sees when it goes on, so the two curves can be compared step by step.
    longer = run(class_recipe("original"), [*softmax_only, "run.steps=9"], resume="auto")
    assert longer.step == 9
    feeds = [
        Training(load_recipe(path, overrides), None).feed
        for path, overrides in ((class_recipe("a"), softmax_only), (adapt("b"), settings))
    ]
    left, right = (feed.rows(feed.draw(7), slice(0, 4)) for feed in feeds)
    assert all(torch.equal(a, b) for a, b in zip(left[:4], right[:4], strict=True))
    pipe = mhla_diffusion.load_pipeline(adapted.pipeline)
    assert pipe.transformer.config.mhla_block_grid == [2, 2] and pipe.labels == {
        "blue_whale": 0,
        "goldfish": 1,
        "umbrella": 2,
    }
    with pytest.raises(
        ValueError, match="already; take that section out, and change its blocks with `mhla convert"
    ):
        build_components(
            load_recipe(adapt(), [f"model.base={adapted.pipeline}", "model.convert.block_grid=[1, 2]"])
        )


def test_averages_warm_up_from_the_first_step_of_an_adaptation(adapt, stock):
    settings = [f"model.base={stock}", "model.new_classes=true", "run.first_step=600", "run.steps=601"]
    before = Training(load_recipe(adapt(), settings), None).ema.average
    out = run(adapt(), settings).out
    tensors, _ = read_checkpoint(find_checkpoint(out / "checkpoints", "auto"))
    decay = 1 / 10  # not 601 / 610: nothing of the weights before conversion is to stay
    for name, weight in tensors["weights"].items():
        torch.testing.assert_close(tensors["ema"][name], decay * before[name] + (1 - decay) * weight)


def test_new_classes_get_new_embeddings_and_the_null_class_stays(adapt, stock):
    recipe = load_recipe(adapt(), [f"model.base={stock}", "model.new_classes=true"])
    parts = build_components(recipe)
    table = parts.transformer.transformer_blocks[0].norm1.emb.class_embedder.embedding_table.weight
    old = stock_like(stock)["transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight"]
    assert table.shape[0] == 4 and torch.equal(table[3], old[10])
    assert parts.class_numbers == {"blue_whale": 0, "goldfish": 1, "umbrella": 2}
    assert (
        parts.transformer.transformer_blocks[1].norm1.emb is parts.transformer.transformer_blocks[0].norm1.emb
    )
    with pytest.raises(ValueError, match='model.train = "mixing" would leave the label embeddings'):
        build_components(
            load_recipe(adapt(), [f"model.base={stock}", "model.new_classes=true", "model.train=mixing"])
        )
    result = run(adapt(), [f"model.base={stock}", "model.new_classes=true", "run.steps=2"])
    pipe = mhla_diffusion.load_pipeline(result.pipeline)
    assert pipe.num_classes == 3 and pipe.labels["umbrella"] == 2


def test_classes_that_a_trained_dit_lacks(adapt, stock):
    with pytest.raises(
        ValueError, match="class 'blue_whale' .* neither a name nor a number .* model.new_classes = true"
    ):
        build_components(load_recipe(adapt(), [f"model.base={stock}"]))
    with pytest.raises(ValueError, match='"order" with 3 classes, but the model has 10'):
        build_components(load_recipe(adapt(), [f"model.base={stock}", 'data.classes="order"']))
    with pytest.raises(
        ValueError, match='loss.kind = "flow" trains flow_prediction, but the scheduler .*DDIM'
    ):
        build_components(load_recipe(adapt(), [f"model.base={stock}", 'loss.kind="flow"']))
