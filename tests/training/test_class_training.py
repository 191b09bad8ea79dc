"""DiT: training from nothing, adaptation of a softmax model, label names, exact resume, export."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import DiTPipeline
from no_host_read import NoHostRead
from PIL import Image
from safetensors.torch import load_file
from tiny_dit import LABELS, stock_pipeline, stock_transformer

import mhla_diffusion
from mhla_diffusion import MHLADiTPipeline, MHLADiTTransformer2DModel, convert
from mhla_diffusion.models.adapters import load_adapter
from mhla_diffusion.training import run
from mhla_diffusion.training.classes import class_names, class_numbers, emoji_labels
from mhla_diffusion.training.components import build_components
from mhla_diffusion.training.loop import Training
from mhla_diffusion.training.recipe import load_recipe

SAMPLE = Path(__file__).resolve().parents[2] / "assets" / "emoji_sample.tar"
RECIPE = """
[run]
name = "toy"
seed = 3
steps = 6
batch_size = 4
log_every = 2
device = "cpu"
tracker = "none"
out = "{out}"

[model]
base = "{base}"
transformer_class = "MHLADiTTransformer2DModel"

[model.transformer]
num_attention_heads = 2
attention_head_dim = 8
num_layers = 2
sample_size = 8
patch_size = 2
out_channels = 8
mhla_block_grid = [2, 2]
mhla_gate = true

[data]
path = "{pictures}"
size = 32
cache = "{cache}"

[optimizer]
lr = 0.002
mixing_lr = 0.5
warmup = 2

[checkpoint]
every = 3
"""


@pytest.fixture(scope="session")
def class_folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    for i, name in enumerate(["blue_whale", "umbrella", "goldfish"]):
        (folder / name).mkdir()
        for j in range(3):
            Image.new("RGB", (32, 32), (80 * i, 60 * j, 90)).save(folder / name / f"{j}.png")
    return folder


@pytest.fixture
def class_recipe(tmp_path, base, class_folders):
    def write(name="toy", data=None, text=RECIPE):
        path = tmp_path / f"{name}.toml"
        path.write_text(
            text.format(
                out=tmp_path / name, base=base, pictures=data or class_folders, cache=tmp_path / "cache"
            )
        )
        return path

    return write


@pytest.fixture
def adapt(class_recipe):
    """A recipe without a fresh transformer, for a base that has one."""
    start = RECIPE.index("[model.transformer]")
    text = RECIPE[:start] + RECIPE[RECIPE.index("[data]") :]
    text = text.replace('transformer_class = "MHLADiTTransformer2DModel"\n', "").replace(
        "size = 32", "size = 16"
    )
    return lambda name="adapted", data=None: class_recipe(name, data, text)


@pytest.fixture
def stock(tmp_path):
    """A stock DiT pipeline folder with three of its ten classes named."""
    pipe = stock_pipeline()
    published_start = pipe.transformer.transformer_blocks[0].norm1.emb.state_dict()
    for layer in pipe.transformer.transformer_blocks:  # one embedder, as released weights have
        layer.norm1.emb.load_state_dict(published_start)
    folder = tmp_path / "stock"
    pipe.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(
        json.dumps({**index, "id2label": {str(k): v for k, v in LABELS.items()}})
    )
    assert type(mhla_diffusion.load_pipeline(folder)) is DiTPipeline
    return folder


def state_of(out, step=6):
    folder = out / "checkpoints" / f"step-{step:08d}"
    return {name: load_file(folder / f"{name}.safetensors") for name in ("weights", "ema", "optimizer")}


def assert_bit_equal(left, right):
    for kind in left:
        assert left[kind].keys() == right[kind].keys()
        assert all(torch.equal(left[kind][name], right[kind][name]) for name in left[kind])


def test_a_new_dit_is_trained_and_exported_with_label_names(class_recipe):
    result = run(class_recipe(), ["sample.every=6", "sample.steps=2", 'sample.prompts=["umbrella", "0"]'])
    assert result.finished and torch.isfinite(torch.tensor(result.loss))
    assert (result.out / "samples" / "step-00000006.png").is_file()
    pipe = mhla_diffusion.load_pipeline(result.pipeline)
    assert type(pipe) is MHLADiTPipeline and type(pipe.transformer) is MHLADiTTransformer2DModel
    assert pipe.labels == {"blue_whale": 0, "goldfish": 1, "umbrella": 2} and pipe.num_classes == 3
    pipe.set_progress_bar_config(disable=True)
    picture = pipe(["goldfish", 0], num_inference_steps=2, generator=torch.Generator().manual_seed(0)).images
    assert [p.size for p in picture] == [(32, 32)] * 2
    # Every layer got the shared embedder's average, and other weights moved off their zero start.
    ema = state_of(result.out)["ema"]
    table = "norm1.emb.class_embedder.embedding_table.weight"
    for layer in pipe.transformer.transformer_blocks:
        assert torch.equal(layer.get_parameter(table), ema[f"transformer.transformer_blocks.0.{table}"])
    assert pipe.transformer.proj_out_2.weight.any()
    facts = json.loads((result.out / "run.json").read_text())
    assert facts["trained"] == list(ema) or set(facts["trained"]) == set(ema)


def test_stop_and_resume_is_bit_equal(class_recipe):  # case T1
    whole = run(class_recipe("whole"))
    for _ in range(6):
        timed = run(class_recipe("timed"), ["run.max_minutes=1e-6"], resume="auto")
    assert timed.finished
    assert_bit_equal(state_of(whole.out), state_of(timed.out))


def test_a_continue_folder_goes_on_with_weights_and_averages(class_recipe):
    first = run(class_recipe("first"), ["checkpoint.export_continue=true"])
    going_on = [
        f"run.init_from={first.out}/continue",
        "run.steps=7",
        "optimizer.lr=1e-30",
        "optimizer.mixing_lr=0.0",
    ]
    second = run(class_recipe("second"), [*going_on, "ema.decay=0.5", "ema.warmup=0.0"])
    assert second.step == 7
    before, after = state_of(first.out), state_of(second.out, 7)
    for name, value in before["weights"].items():
        torch.testing.assert_close(after["weights"][name], value, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            after["ema"][name], (before["ema"][name] + value) / 2, rtol=1e-5, atol=1e-6
        )


def test_flow_matching_of_a_dit_draws_with_a_flow_scheduler(class_recipe):
    result = run(class_recipe(), ['loss.kind="flow"', "model.transformer.out_channels=4", "run.steps=2"])
    pipe = mhla_diffusion.load_pipeline(result.pipeline)
    assert pipe.scheduler.config.prediction_type == "flow_prediction"
    pipe.set_progress_bar_config(disable=True)
    assert pipe("umbrella", num_inference_steps=2).images[0].size == (32, 32)


def test_labels_drop_to_the_null_class_and_steps_are_uniform(class_recipe):
    job = Training(load_recipe(class_recipe(), ["data.caption_dropout=0.3", "run.batch_size=9"]), None)
    labels, times = [], []
    for step in range(60):
        draw = job.feed.draw(step)
        _, noise, time, label, mask = job.feed.rows(draw, slice(0, 9))
        assert mask is None and time.dtype == torch.int64 and noise.shape == (9, 4, 8, 8)
        assert torch.equal(job.feed.draw(step).time, draw.time)
        labels.append(label)
        times.append(time)
    labels, times = torch.cat(labels), torch.cat(times)
    assert 0.2 < (labels == 3).float().mean() < 0.4 and set(labels.tolist()) == {0, 1, 2, 3}
    assert times.min() >= 0 and times.max() < 1000 and abs(times.float().mean() - 500) < 50
    assert job.parts.transformer.label_dropout == 0.0


def test_mirrored_pictures_double_the_set(class_recipe):
    job = Training(load_recipe(class_recipe("a"), ["data.flip=true"]), None)
    plain = Training(load_recipe(class_recipe("b")), None)
    assert job.feed.order.bucket_sizes == [18] and plain.feed.order.bucket_sizes == [9]
    assert (
        torch.equal(job.feed.latents[0][:9], plain.feed.latents[0]) and job.fingerprint != plain.fingerprint
    )
    assert torch.equal(job.feed.choice[0][9:], plain.feed.choice[0])


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.train_text_encoder=true"], "a DiT has no text encoder; take out"),
        (
            ["model.transformer.num_embeds_ada_norm=7"],
            "= 7, but the data has 3 classes; write 3, or leave it out",
        ),
        (["model.transformer.num_layer=7"], "did you mean 'num_layers'"),
        (["model.new_classes=true"], "has the data's classes anyway; take out model.new_classes"),
        (["model.defaults.default_step=3"], "did you mean 'default_steps'"),
        (['loss.kind="flow"'], 'out_channels = 8; write 4, or loss.kind = "diffusion"'),
        (["data.kind=emoji", f"data.path={SAMPLE}"], "a composed scene has no class; write 0"),
        (["data.path=nowhere"], "data.path = 'nowhere' does not exist; give a folder of images"),
        (["data.kind=emoji", "data.path=nowhere"], "give the emoji tar"),
        (
            ["sample.every=2", 'sample.prompts=["umbrela"]'],
            "'umbrela' is no class of this model; did you mean 'umbrella'?",
        ),
        (["sample.every=2", 'sample.prompts=["4"]'], "'4' is no class of this model; a number goes up to 2"),
        (["loss.variational_weight=-1"], "loss.variational_weight = -1.0; allowed: 0 or more"),
    ],
)
def test_faults_are_one_line(class_recipe, overrides, message):
    with pytest.raises(ValueError) as caught:
        Training(load_recipe(class_recipe(), overrides), None)
    assert message in str(caught.value) and "\n" not in str(caught.value)


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


def test_numbers_by_name_by_digits_and_by_order():
    names = {"0": "goldfish, Carassius auratus", "1": "white shark"}
    assert class_numbers(["Carassius auratus", "white shark", "2"], 3, names, "names") == {
        "Carassius auratus": 0, "white shark": 1, "2": 2,
    }  # fmt: skip
    assert class_numbers(["n01", "n02"], 2, names, "order") == {"n01": 0, "n02": 1}
    with pytest.raises(ValueError, match="did you mean 'goldfish'"):
        class_numbers(["goldfisch"], 3, names, "names")
    with pytest.raises(ValueError, match="class '3' of the data is neither"):
        class_numbers(["3"], 3, names, "names")


def test_classes_of_the_emoji_set_and_of_a_listing(class_recipe, tmp_path, class_folders):
    emoji = ["data.kind=emoji", f"data.path={SAMPLE}", "data.compositions=0", "data.backgrounds=1"]
    recipe = load_recipe(class_recipe(), emoji)
    names = class_names(recipe.data)
    assert len(names) == 8 and "food-fruit" in names
    recipe.data.label = "group"
    assert class_names(recipe.data) == ["animals-nature", "food-drink", "objects", "travel-places"]
    job = Training(load_recipe(class_recipe(), [*emoji, "model.transformer.sample_size=8"]), None)
    train = emoji_labels(SAMPLE, "subgroup", "train")
    labels = job.feed.values[job.feed.choice[0][:, 0]].tolist()
    assert labels == [
        job.parts.class_numbers[name] for name in train for _ in range(2)
    ]  # two backgrounds each

    listed = tmp_path / "listed"
    shutil.copytree(class_folders / "umbrella", listed)
    lines = [json.dumps({"file": f"{i}.png", "label": label}) for i, label in enumerate(["b", "a", "b"])]
    (listed / "captions.jsonl").write_text("\n".join(lines))
    assert class_names(load_recipe(class_recipe(data=listed)).data) == ["a", "b"]
    (listed / "captions.jsonl").write_text('{"file": "0.png", "caption": "x"}')
    with pytest.raises(ValueError, match='line 1: write {"file": "name.png", "label"'):
        class_names(load_recipe(class_recipe(data=listed)).data)
    (class_folders.parent / "comma" / "a, b").mkdir(parents=True)
    shutil.copy(class_folders / "umbrella" / "0.png", class_folders.parent / "comma" / "a, b")
    with pytest.raises(ValueError, match="class 'a, b' .* without commas"):
        class_names(load_recipe(class_recipe(data=class_folders.parent / "comma")).data)


def test_sana_keeps_flow_matching(recipe_file):
    with pytest.raises(ValueError, match='loss.kind = "diffusion" trains a DiT; SANA and Wan learn flow matching'):
        build_components(load_recipe(recipe_file(), ['loss.kind="diffusion"']))
    with pytest.raises(ValueError, match="new_classes is for DiT"):
        build_components(load_recipe(recipe_file(), ["model.new_classes=true"]))


def started(path, overrides=()):
    job = Training(load_recipe(path, overrides), None)
    job._reset_window()
    job.bad_step = torch.full((), -1.0, dtype=torch.float64, device=job.device)
    return job


def test_a_step_does_not_wait_for_the_device(class_recipe):
    job = started(class_recipe(), ["run.mixed_precision=bf16"])
    job._step(0)
    with NoHostRead():
        job._step(1)
        job._step(2)


def test_twenty_steps_in_bf16_are_finite(class_recipe):  # case T2
    result = run(class_recipe(), ["run.steps=20", "run.mixed_precision=bf16"])
    lines = (result.out / "metrics.jsonl").read_text().splitlines()
    assert all(torch.isfinite(torch.tensor(json.loads(line)["loss"])) for line in lines)
    assert all(torch.isfinite(v).all() for v in state_of(result.out, 20)["weights"].values())


def test_checkpointed_training_equals_plain(class_recipe):  # case T3
    plain = run(class_recipe("plain"), ["model.train=mixing"])
    saved = run(class_recipe("saved"), ["model.train=mixing", "run.gradient_checkpointing=true"])
    left, right = state_of(plain.out)["weights"], state_of(saved.out)["weights"]
    assert left.keys() == right.keys() and len(left) == 2
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
def test_a_compiled_step_on_the_gpu_does_not_wait(class_recipe):
    job = started(class_recipe(), ["run.device=cuda", "run.mixed_precision=bf16", "run.compile=true"])
    for step in range(4):
        job._step(step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(4, 10):
            job._step(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert job.bad_step.item() == -1 and torch.isfinite(job.loss_sum)


@pytest.mark.gpu
def test_training_on_the_gpu_draws_and_resumes(class_recipe):
    settings = [
        "run.device=cuda", "run.mixed_precision=bf16", "run.compile=true", "sample.every=3", "sample.steps=2",
        'sample.prompts=["umbrella"]',
    ]  # fmt: skip
    assert not run(class_recipe(), [*settings, "run.max_minutes=1e-6"]).finished
    result = run(class_recipe(), settings, resume="auto")
    assert result.finished and (result.out / "samples" / "step-00000006.png").is_file()
