"""DiT: training from nothing, label names, exact resume, export, and faults in one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from no_host_read import NoHostRead, no_waiting_for_the_gpu
from safetensors.torch import load_file

import mhla_diffusion
from mhla_diffusion import MHLADiTPipeline, MHLADiTTransformer2DModel
from mhla_diffusion.training import run
from mhla_diffusion.training.classes import class_names, class_numbers, emoji_labels
from mhla_diffusion.training.components import build_components
from mhla_diffusion.training.loop import Training
from mhla_diffusion.training.recipe import load_recipe

SAMPLE = Path(__file__).resolve().parents[2] / "assets" / "emoji_sample.tar"


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
    with pytest.raises(
        ValueError, match='loss.kind = "diffusion" trains a DiT; SANA and Wan learn flow matching'
    ):
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
    with no_waiting_for_the_gpu():
        for step in range(4, 10):
            job._step(step)
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
