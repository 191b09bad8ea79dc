import json
import shutil
import warnings

import pytest
import torch
from no_host_read import NoHostRead, no_waiting_for_the_gpu
from PIL import Image
from safetensors.torch import load_file

import mhla_diffusion
from mhla_diffusion.mixing import BlockMixing
from mhla_diffusion.training import loop, run, session
from mhla_diffusion.training.ema import EMA
from mhla_diffusion.training.loop import NonFiniteLoss
from mhla_diffusion.training.randomness import DataOrder
from mhla_diffusion.training.recipe import load_recipe


def state_of(out, step):
    folder = out / "checkpoints" / f"step-{step:08d}"
    return {name: load_file(folder / f"{name}.safetensors") for name in ("weights", "ema", "optimizer")}


def assert_bit_equal(left, right):
    for kind in left:
        assert left[kind].keys() == right[kind].keys()
        for name in left[kind]:
            assert torch.equal(left[kind][name], right[kind][name]), (kind, name)


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_three_steps_and_three_more_equal_six(recipe_file, tmp_path, schedule):  # case T1
    common = [f"optimizer.schedule={schedule}", "optimizer.warmup=4"]
    whole = run(recipe_file("whole"), common)
    assert whole.step == 6 and whole.finished

    half = recipe_file("half")
    run(half, common)
    for path in (tmp_path / "half").iterdir():  # as if the machine had stopped after the checkpoint at step 3
        if path.name != "checkpoints":
            shutil.rmtree(path) if path.is_dir() else None
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000006")
    with (tmp_path / "half" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # killed while it wrote
    resumed = run(half, common, resume="auto")
    assert resumed.finished
    assert_bit_equal(state_of(whole.out, 6), state_of(resumed.out, 6))
    assert [m["step"] for m in metrics(resumed.out)] == [2, 3, 4, 6]  # steps 4 to 6 are not listed twice
    assert metrics(resumed.out)[-1]["loss"] == metrics(whole.out)[-1]["loss"]


def test_stops_cleanly_when_time_is_up_and_goes_on(recipe_file):
    whole = run(recipe_file("whole"))
    timed = recipe_file("timed")
    for expected in range(1, 7):  # over at the first look, which is after each step
        result = run(timed, ["run.max_minutes=1e-6"], resume="auto")
        assert result.step == expected and result.finished == (expected == 6)
        assert (result.pipeline / "model_index.json").is_file()
    assert_bit_equal(state_of(whole.out, 6), state_of(result.out, 6))


def test_another_recipe_is_refused_and_a_full_folder_protected(recipe_file):
    path = recipe_file()
    run(path)
    with pytest.raises(
        ValueError, match="already holds a run up to step-00000006; continue it with --resume auto"
    ):
        run(path)
    with pytest.raises(ValueError, match="another recipe, which differs in flow.shift, optimizer.lr;"):
        run(path, ["optimizer.lr=1.0", "flow.shift=2.0"], resume="auto")
    with pytest.raises(ValueError, match="has no manifest.json"):
        run(path, resume=path.parent)


def test_other_pictures_are_refused_on_resume(recipe_file, pictures, tmp_path):
    mine = tmp_path / "mine"
    shutil.copytree(pictures, mine)
    path = recipe_file(data=mine)
    run(path, ["run.steps=3"])
    Image.new("RGB", (32, 32)).save(mine / "0.png")
    with pytest.raises(ValueError, match="made with other pictures or captions"):
        run(path, resume="auto")


def test_unwritable_output_folder(recipe_file, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (f"{tmp_path}/file/x", "/proc/somewhere/new"):  # the second refuses even root
        with pytest.raises(ValueError, match="cannot write into .*give another folder with run.out"):
            run(recipe_file(), [f"run.out={out}"])


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_non_finite_loss_stops_the_run_with_its_step(recipe_file, tmp_path, monkeypatch, log_every):
    """A picture whose latents are NaN: the step that first shows it is named, nothing on disk is overwritten."""
    path = recipe_file()
    changes = ["run.steps=20", "run.batch_size=2", f"run.log_every={log_every}", "checkpoint.every=2"]
    recipe = load_recipe(path, changes)
    order = DataOrder([10], 2, recipe.run.seed, "cpu")
    poisoned = int(order(4)[1][0])  # seen at the fifth step, or before
    first = next(step for step in range(20) if poisoned in order(step)[1].tolist()) + 1
    encode = session.load_or_encode

    def poison(*args):
        encoded = encode(*args)
        encoded.latents[0][poisoned, 0, 0, 0] = float("nan")
        return encoded

    monkeypatch.setattr(session, "load_or_encode", poison)
    with pytest.raises(
        NonFiniteLoss, match=f"not finite at step {first} of 20; .*lower optimizer.lr"
    ) as caught:
        run(path, changes)
    assert "\n" not in str(caught.value)
    out = tmp_path / "toy"
    last = (first - 1) // 2 * 2
    if last:
        assert f"step-{last:08d}, is untouched" in str(caught.value)
        assert all(
            torch.isfinite(v).all() for tensors in state_of(out, last).values() for v in tensors.values()
        )
    assert not (out / "pipeline").exists()
    before = contents(out)
    with pytest.raises(NonFiniteLoss):
        run(path, changes, resume="auto")
    after = contents(out)
    assert {k: v for k, v in after.items() if "checkpoints" in k.parts} == {
        k: v for k, v in before.items() if "checkpoints" in k.parts
    }


def training(path, overrides=()):
    return loop.Training(load_recipe(path, overrides), None)


def test_a_bad_step_never_reaches_the_weights(recipe_file):
    job = training(recipe_file())
    job._reset_window()
    job.bad_step = torch.full((), -1.0, dtype=torch.float64)
    job._step(0)
    kept = {name: p.detach().clone() for name, p in job.parameters.items()}
    average = {name: p.clone() for name, p in job.ema.average.items()}
    job.feed.latents[0].fill_(float("inf"))
    job._step(1)
    job._step(2)
    assert job.bad_step.item() == 2  # the second step, counted from 1
    for name, parameter in job.parameters.items():
        assert torch.equal(parameter, kept[name])
        assert (
            torch.isfinite(job.ema.average[name]).all() and job.ema.average[name].shape == average[name].shape
        )


def test_a_step_does_not_wait_for_the_device(recipe_file):
    job = training(recipe_file(), ["run.mixed_precision=bf16", "run.gradient_accumulation=2"])
    job._reset_window()
    job.bad_step = torch.full((), -1.0, dtype=torch.float64)
    job._step(0)  # builds the optimizer's state
    with NoHostRead():
        job._step(1)
        job._step(2)
    with pytest.raises(AssertionError, match="waits"), NoHostRead():
        job.loss_sum.item()


@pytest.mark.gpu
def test_a_compiled_step_on_the_gpu_does_not_wait(recipe_file):
    """Compiled, bf16, across an epoch's end: CUDA's own debug mode finds no synchronisation."""
    job = training(recipe_file(), ["run.device=cuda", "run.mixed_precision=bf16", "run.compile=true"])
    job._reset_window()
    job.bad_step = torch.full((), -1.0, dtype=torch.float64, device=job.device)
    for step in range(4):
        job._step(step)
    with no_waiting_for_the_gpu():
        for step in range(4, 10):
            job._step(step)
    assert job.bad_step.item() == -1 and torch.isfinite(job.loss_sum)


@pytest.mark.gpu
def test_training_on_the_gpu_draws_and_resumes(recipe_file):
    path = recipe_file()
    settings = [
        "run.device=cuda",
        "run.mixed_precision=bf16",
        "run.compile=true",
        "sample.steps=2",
        "sample.every=3",
    ]
    settings += ['sample.prompts=["a picture of red"]']
    assert not run(path, [*settings, "run.max_minutes=1e-6"]).finished
    result = run(path, settings, resume="auto")
    assert result.finished and torch.isfinite(torch.tensor(result.loss))
    assert (result.out / "samples" / "step-00000006.png").is_file()


def test_twenty_steps_in_bf16_are_finite(recipe_file):  # case T2
    result = run(recipe_file(), ["run.steps=20", "run.mixed_precision=bf16"])
    assert torch.isfinite(torch.tensor([m["loss"] for m in metrics(result.out)])).all()
    assert all(
        v.dtype == torch.float32 and torch.isfinite(v).all()
        for v in state_of(result.out, 20)["weights"].values()
    )
    with pytest.raises(ValueError, match='write "bf16"'):
        run(recipe_file("half"), ["run.mixed_precision=fp16"])


def test_mixing_is_clipped_after_every_step_and_its_bounds_are_watched(recipe_file, monkeypatch, capsys):
    lowest = []
    update = EMA.update

    def watch(self, step):
        lowest.extend(p.min().item() for n, p in self.live.items() if ".mixing." in n)
        lowest.extend(1 - p.max().item() for n, p in self.live.items() if ".mixing." in n)
        return update(self, step)

    monkeypatch.setattr(EMA, "update", watch)
    result = run(
        recipe_file(), ["optimizer.mixing_lr=40.0", "run.steps=4"]
    )  # 10 a step: straight to the bounds
    assert min(lowest) == 0.0 and len(lowest) == 4 * 2 * 2
    assert metrics(result.out)[-1]["mixing_on_bound"] > 0.5
    assert "lower optimizer.mixing_lr" in capsys.readouterr().out
    pipe = mhla_diffusion.load_pipeline(result.pipeline)
    matrices = [m.weight for m in pipe.transformer.modules() if isinstance(m, BlockMixing)]
    assert len(matrices) == 2 and all((m.sum(-1) > 0).all() for m in matrices)  # no row is empty


def test_checkpointed_training_equals_plain(recipe_file):  # case T3
    """Gradient checkpointing with a frozen base: the mixing gets the same gradients."""
    plain = run(recipe_file("plain"), ["model.train=mixing"])
    saved = run(recipe_file("saved"), ["model.train=mixing", "run.gradient_checkpointing=true"])
    left, right = state_of(plain.out, 6)["weights"], state_of(saved.out, 6)["weights"]
    moved = [name for name in left if ".mixing." in name]
    assert len(moved) == 2
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-5, atol=1e-7)


def test_sampling_changes_no_number_of_the_training(recipe_file):
    quiet = run(recipe_file("quiet"))
    drawing = run(
        recipe_file("drawing"),
        ["sample.every=2", 'sample.prompts=["a picture of red", "x", "y"]', "sample.steps=2"],
    )
    assert_bit_equal(state_of(quiet.out, 6), state_of(drawing.out, 6))
    assert sorted(p.name for p in (drawing.out / "samples").iterdir()) == [
        f"step-{i:08d}.png" for i in (2, 4, 6)
    ]
    assert Image.open(drawing.out / "samples" / "step-00000006.png").size == (66, 66)  # 2 x 2 of 32, gap 2


def test_tensorboard_and_run_facts(recipe_file):
    result = run(recipe_file(), ["run.tracker=tensorboard", "run.steps=2"])
    assert list((result.out / "tracker").rglob("events.out.tfevents.*"))
    facts = json.loads((result.out / "run.json").read_text())
    assert facts["pictures"] == 10 and facts["environment"]["torch"] == torch.__version__.split("+")[0]
    assert facts["parameters"].keys() == {"transformer", "text_encoder"}


def test_tensorboard_that_is_not_there(recipe_file, monkeypatch):
    monkeypatch.setattr(session.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match='not installed; pip install tensorboard, or write "auto"'):
        run(recipe_file(), ["run.tracker=tensorboard"])
    assert not session.tracks("auto")


def test_data_kept_on_the_host_gives_the_same_training(recipe_file):
    device, host = run(recipe_file("device")), run(recipe_file("host"), ["data.keep_on=host"])
    assert_bit_equal(state_of(device.out, 6), state_of(host.out, 6))


def test_batch_must_divide(recipe_file):
    with pytest.raises(ValueError, match="does not divide"):
        run(recipe_file(), ["run.batch_size=5", "run.gradient_accumulation=2"])


def test_cuda_asked_for_without_one(recipe_file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no CUDA device"):
        run(recipe_file(), ["run.device=cuda"])


def test_no_warning_in_a_plain_run(recipe_file):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(recipe_file(), ["run.steps=2"])
