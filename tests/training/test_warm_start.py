"""The steps of [distill] in a run: resume, logs, precision, and what is refused."""

import json
import shutil

import pytest
import tiny_sana
import torch
from no_host_read import NoHostRead, no_waiting_for_the_gpu
from PIL import Image
from safetensors.torch import load_file

import mhla_diffusion
from mhla_diffusion.training import run
from mhla_diffusion.training.distillation import distilling
from mhla_diffusion.training.loop import NonFiniteLoss, Training
from mhla_diffusion.training.recipe import load_recipe
from mhla_diffusion.training.warm_start import WarmStart

DISTIL = ["distill.steps=6", "distill.lr=0.003", "run.steps=3", "checkpoint.every=2"]


@pytest.fixture
def recipe(adapt, tmp_path):
    """`recipe("name")`: the stock DiT, converted, on a few pictures of its classes."""
    for number, name in enumerate(("umbrella", "white shark", "7")):
        for shade in range(3):
            path = tmp_path / "data" / name / f"{shade}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (90 * number, 80 * shade, 30)).save(path)
    return lambda name="toy": adapt(name, tmp_path / "data")


@pytest.fixture
def settings(stock):
    return [f"model.base={stock}", "model.convert.block_grid=[2, 2]", *DISTIL]


def lines(out, name="distillation.jsonl"):
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def tensors(out, folder="checkpoints", step=3):
    files = sorted((out / folder / f"step-{step:08d}").glob("*.safetensors"))
    return {f"{file.stem}/{name}": value for file in files for name, value in load_file(file).items()}


def assert_bit_equal(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(value, right[name]) for name, value in left.items())


def without(entries, *names):
    return [{key: value for key, value in entry.items() if key not in names} for entry in entries]


def test_a_run_with_a_warm_start(recipe, settings, capsys):
    result = run(recipe(), [*settings, "run.log_every=1", "distill.steps=30"])
    assert result.finished and result.step == 3
    entries = lines(result.out)
    assert [entry["step"] for entry in entries] == list(range(1, 31))
    assert entries[-1]["loss"] < 0.7 * entries[0]["loss"]
    names = [f"transformer_blocks.{index}.attn1" for index in range(2)]
    for entry in entries:
        assert list(entry["layers"]) == names
        assert entry["loss"] == pytest.approx(sum(entry["layers"].values()) / 2)
    assert (
        max(entry["lr"] for entry in entries) == pytest.approx(0.003, rel=0.02) and entries[-1]["lr"] < 1e-4
    )
    # Of the run's own steps, metrics.jsonl tells as ever.
    assert [entry["step"] for entry in lines(result.out, "metrics.jsonl")] == [1, 2, 3]
    assert [path.name for path in (result.out / "distillation").iterdir()] == ["step-00000030"]
    assert "30 of 30 steps of distillation done, 2 layers" in capsys.readouterr().out
    assert not list(result.out.glob("distillation/*/optimizer.safetensors"))


def test_none_is_done_by_default(recipe, settings):
    result = run(recipe(), [each for each in settings if "distill" not in each])
    assert not (result.out / "distillation").exists() and not (result.out / "distillation.jsonl").exists()


def test_an_interrupted_one_goes_on_and_a_finished_one_is_not_repeated(recipe, settings, tmp_path):
    whole = run(recipe("whole"), settings)
    timed = recipe("timed")
    for expected in range(1, 7):  # stopped after each of its steps
        result = run(timed, [*settings, "run.max_minutes=1e-6"], resume="auto")
        assert not result.finished and result.step == 0
        assert sorted((result.out / "distillation").iterdir())[-1].name == f"step-0000000{expected}"
        assert mhla_diffusion.load_pipeline(result.pipeline).transformer is not None
    with pytest.raises(
        ValueError, match="up to step-00000006 of its distillation; continue it with --resume auto"
    ):
        run(timed, settings)
    result = run(timed, settings, resume="auto")
    assert result.finished
    assert_bit_equal(tensors(whole.out), tensors(result.out))
    assert_bit_equal(tensors(whole.out, "distillation", 6), tensors(result.out, "distillation", 6))
    unlike = ("images_per_second", "minutes", "lr", "layers")
    assert without(lines(whole.out, "metrics.jsonl"), *unlike) == without(
        lines(result.out, "metrics.jsonl"), *unlike
    )

    # Killed after it was done, or with lines of steps that no checkpoint has: each is listed once.
    shutil.rmtree(result.out / "checkpoints")
    told = (result.out / "distillation.jsonl").read_text()
    with (result.out / "distillation.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    again = run(timed, settings, resume="auto")
    assert (again.out / "distillation.jsonl").read_text() == told
    assert_bit_equal(tensors(whole.out), tensors(again.out))
    # A checkpoint of the run itself needs none of it.
    shutil.rmtree(result.out / "distillation")
    shutil.rmtree(result.out / "checkpoints" / "step-00000003")
    assert_bit_equal(tensors(whole.out), tensors(run(timed, settings, resume="auto").out))
    assert not (result.out / "distillation").exists()


def test_what_a_checkpoint_of_it_does_not_fit(recipe, settings):
    timed = recipe("timed")
    out = run(timed, [*settings, "run.max_minutes=1e-6"]).out
    with pytest.raises(ValueError, match="another recipe, which differs in distill.lr; undo that"):
        run(timed, [*settings, "distill.lr=0.1"], resume="auto")
    with pytest.raises(
        ValueError, match="checkpoint of the distillation before the first step; --resume auto"
    ):
        run(timed, settings, resume=out / "distillation" / "step-00000001")


def job_of(path, overrides):
    return Training(load_recipe(path, overrides), None)


@pytest.mark.parametrize("train", ["mixing", "attention", "all", "lora+mixing"])
def test_what_trains_is_what_model_train_chooses_inside_the_mhla_attentions(recipe, settings, train):
    job = job_of(
        recipe(), [*settings, f'model.train="{train}"', "model.convert.layers=[1]", "model.convert.gate=true"]
    )
    before = {name: value.clone() for name, value in job.module.state_dict().items()}
    start = WarmStart(job, None)
    assert start.run(lambda due: False)
    changed = {
        name for name, value in job.module.state_dict().items() if not torch.equal(value, before[name])
    }
    inside = "transformer.transformer_blocks.1.attn1."
    assert changed == set(start.parameters) and all(name.startswith(inside) for name in changed)
    kinds = {"mixing": 1, "attention": 8 + 2 + 1, "all": 8 + 2 + 1, "lora+mixing": 2 * 4 + 1}
    assert len(changed) == kinds[train]
    # Averages begin with what was learned; nothing else of the run has begun.
    assert all(torch.equal(job.ema.average[name], job.parameters[name]) for name in job.parameters)
    assert not job.optimizer.state and all(p.grad is None for p in job.module.parameters())


def test_the_exported_model_is_nearer_to_the_stock_one(recipe, settings, stock):
    inputs = {
        "hidden_states": torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(5)),
        "timestep": torch.tensor([20, 300, 600, 900]),
        "class_labels": torch.tensor([1, 2, 7, 10]),
    }
    drawn = []
    for folder in (
        stock,
        run(recipe("plain"), [*settings, "distill.steps=0", "run.steps=1", "optimizer.lr=1e-12"]).pipeline,
        run(recipe("warm"), [*settings, "distill.steps=30", "run.steps=1", "optimizer.lr=1e-12"]).pipeline,
    ):
        with torch.no_grad():
            drawn.append(mhla_diffusion.load_pipeline(folder).transformer.eval()(**inputs).sample)
    original, plain, warm = drawn
    assert (warm - original).norm() < 0.8 * (plain - original).norm()


def test_micro_batches_give_what_a_whole_batch_gives(recipe, settings):
    """As do bf16 and checkpointing of activations, which has nothing to do here, but for the rounding."""
    found = {}
    for name, options in (
        ("whole", []),
        ("accumulated", ["run.gradient_accumulation=2"]),
        ("checkpointed", ["run.gradient_checkpointing=true"]),
        ("bf16", ["run.mixed_precision=bf16"]),
    ):
        # Adam divides by the gradient's size: rounding of a near-zero gradient becomes a whole step, but for this eps.
        job = job_of(recipe(name), [*settings, "optimizer.eps=0.01", *options])
        start = WarmStart(job, None)
        start.run(lambda due: False)
        found[name] = {key: value.detach().clone() for key, value in start.parameters.items()}
        assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in start.parameters.values())
    for key, value in found["whole"].items():
        torch.testing.assert_close(found["accumulated"][key], value, rtol=1e-4, atol=1e-6)
        assert torch.equal(found["checkpointed"][key], value)
        assert (found["bf16"][key] - value).norm() < 0.05 * value.norm() + 1e-3


def test_a_step_does_not_wait_for_the_device(recipe, settings):
    job = job_of(recipe(), [*settings, "run.mixed_precision=bf16", "run.gradient_accumulation=2"])
    start = WarmStart(job, None)
    with distilling(job.module, start.pairs):
        start._step(0)  # builds the optimizer's state
        with NoHostRead():
            start._step(1)
            start._step(2)


@pytest.mark.gpu
def test_a_step_on_the_gpu_does_not_wait(recipe, settings):
    job = job_of(recipe(), [*settings, "run.device=cuda", "run.mixed_precision=bf16", "run.compile=true"])
    start = WarmStart(job, None)
    with distilling(job.module, start.pairs):
        for step in range(3):
            start._step(step)
        with no_waiting_for_the_gpu():
            for step in range(3, 8):
                start._step(step)
    assert (start.bad_step < 0).all() and torch.isfinite(start.loss_sum).all()


@pytest.mark.gpu
def test_a_warm_start_on_the_gpu_and_compiled_steps_behind_it(recipe, settings):
    options = ["run.device=cuda", "run.mixed_precision=bf16", "run.compile=true", "distill.steps=40"]
    result = run(recipe(), [*settings, *options, "run.log_every=5"])
    entries = lines(result.out)
    assert result.finished and entries[-1]["loss"] < 0.7 * entries[0]["loss"]


def test_a_layer_that_breaks_down_is_named(recipe, settings):
    job = job_of(recipe(), [*settings, "run.log_every=3", "run.steps=3"])
    start = WarmStart(job, None)
    start._step_without_fault = start._step

    def step(number):
        if number == 1:
            with torch.no_grad():
                start.pairs[1].student.to_v.weight[0, 0] = float("nan")
        start._step_without_fault(number)

    start._step = step
    with pytest.raises(NonFiniteLoss) as caught:
        start.run(lambda due: False)
    told = str(caught.value)
    assert (
        "\n" not in told and "transformer_blocks.1.attn1 or its gradient is not finite at step 2 of 6" in told
    )
    assert not list(job.distillation.glob("*"))[1:], "a checkpoint after the fault"
    assert "forward" not in vars(start.pairs[0].student)
    assert all(torch.isfinite(p).all() for p in start.pairs[0].parameters)


def test_latents_that_are_not_finite(recipe, settings):
    job = job_of(recipe(), settings)
    for bucket in job.feed.latents:
        bucket.fill_(float("nan"))
    kept = {name: p.detach().clone() for name, p in job.parameters.items()}
    with pytest.raises(
        NonFiniteLoss, match="transformer_blocks.0.attn1 .* step 1 of 6 of the distillation; lower"
    ):
        WarmStart(job, None).run(lambda due: False)
    assert all(torch.equal(p, kept[name]) for name, p in job.parameters.items())


def test_recipes_without_anything_to_distil_are_refused(recipe, settings, class_recipe, stock, tmp_path):
    plain = [each for each in settings if "model.convert" not in each]
    fitted = run(recipe("fitted"), [*settings, "distill.steps=0", "run.steps=1"]).pipeline
    told = []
    for path, options, message in (
        (
            class_recipe("fresh"),
            DISTIL,
            r"\[model.transformer\] builds a fresh transformer, whose attention has",
        ),
        (recipe("stock"), plain, "no layer of this MHLADiTTransformer2DModel is MHLA"),
        (
            recipe("again"),
            [*plain, f"model.base={fitted}"],
            "transformer_blocks.0.attn1.mixing has been trained",
        ),
        (recipe("less"), [*settings, "distill.steps=-1"], "distill.steps = -1; allowed: 0"),
        (recipe("rate"), [*settings, "distill.lr=0"], "distill.lr = 0.0; allowed: above 0"),
        (recipe("name"), [*settings, "distill.step=3"], "did you mean 'steps'"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            run(path, options)
        told.append(str(caught.value))
    assert not any("\n" in each for each in told)


def test_a_base_that_was_converted_before_can_be_distilled(recipe, settings, stock, tmp_path):
    folder = tmp_path / "converted"
    shutil.copytree(stock, folder)
    model = mhla_diffusion.convert(mhla_diffusion.load_pipeline(stock).transformer, block_grid=(2, 2))
    model.save_pretrained(folder / "transformer")
    options = [each for each in settings if "model.convert" not in each]
    result = run(recipe("converted"), [*options, f"model.base={folder}"])
    assert_bit_equal(tensors(result.out), tensors(run(recipe("direct"), settings).out))


def test_a_converted_sana_learns_with_its_captions(recipe_file, base, tmp_path):
    """Through a text encoder that trains as well, which the warm start leaves alone."""
    folder = tmp_path / "sana"
    shutil.copytree(base, folder)
    tiny_sana.stock_transformer().save_pretrained(folder / "transformer")
    path = recipe_file()
    text = path.read_text().replace(str(base), str(folder))
    start, end = text.index("[model.transformer]"), text.index("[model.text_encoder]")
    path.write_text(text[:start] + "[model.convert]\nblock_grid = [2, 2]\ngate = true\n\n" + text[end:])
    options = ["distill.steps=40", "distill.lr=0.01", "run.log_every=5"]
    job = job_of(path, options)
    kept = {name: p.clone() for name, p in job.module.text_encoder.state_dict().items()}
    start = WarmStart(job, None)
    assert start.run(lambda due: False)
    entries = lines(job.out)
    assert entries[-1]["loss"] < 0.7 * entries[0]["loss"]
    assert all(torch.equal(p, kept[name]) for name, p in job.module.text_encoder.state_dict().items())
