"""Steps repeated from a CUDA graph train as steps that the host starts kernel by kernel."""

import subprocess
import sys

import pytest
import torch
from no_host_read import no_waiting_for_the_gpu
from safetensors.torch import load_file

from mhla_diffusion.training import run
from mhla_diffusion.training.loop import Training
from mhla_diffusion.training.recipe import load_recipe

GPU = ["run.device=cuda", "run.compile=true", "run.steps=9", "checkpoint.every=0", "optimizer.warmup=2"]


def weights(result):
    files = sorted(result.pipeline.glob("*/*.safetensors"))
    assert files
    return {f"{path.parent.name}.{name}": x for path in files for name, x in load_file(path).items()}


def test_a_graph_without_a_gpu_is_refused(recipe_file):
    with pytest.raises(
        ValueError, match="run.cuda_graph = true is for one process on a CUDA device, this is 1 on cpu"
    ):
        run(recipe_file(), ["run.cuda_graph=true", "run.device=cpu"])


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [[], ["run.gradient_accumulation=2"], ["run.mixed_precision=bf16"]])
def test_a_graph_gives_the_same_weights(recipe_file, settings):
    plain = run(recipe_file("plain"), [*GPU, *settings])
    graph = run(recipe_file("graph"), [*GPU, *settings, "run.cuda_graph=true"])
    assert abs(graph.loss - plain.loss) < 1e-2 * plain.loss
    found, expected = weights(graph), weights(plain)
    assert found.keys() == expected.keys()
    start = weights(run(recipe_file("start"), [*GPU, *settings, "run.max_minutes=1e-6"]))

    def distance(a, b):
        return sum(float((a[name].double() - b[name].double()).square().sum()) for name in expected) ** 0.5

    # Where a gradient is nothing but rounding, as that of a softmax's key bias, AdamW makes whole steps of it.
    assert distance(found, expected) < 0.1 * distance(expected, start)


@pytest.mark.gpu
def test_a_repeated_step_does_not_wait_and_serves_every_shape_it_has_seen(recipe_file):
    settings = [*GPU, "run.cuda_graph=true", "run.steps=1000", "run.mixed_precision=bf16"]
    job = Training(load_recipe(recipe_file(), settings), None)
    job._reset_window()
    job.bad_step = torch.full((), -1.0, dtype=torch.float64, device=job.device)
    for step in range(5):
        job._step(step)
    with no_waiting_for_the_gpu():
        for step in range(5, 12):
            job._step(step)
    assert job.bad_step.item() == -1 and torch.isfinite(job.loss_sum)
    (recording,) = job.gradients.recordings.values()
    assert sum(each is not None for each in recording.gradients) == len(job.parameters)
    batch = job.feed.rows(job.feed.draw(12), slice(0, 2))  # fewer rows than a step has
    losses = []
    for _ in range(5):
        losses.append(float(job.gradients([batch])))
        job.optimizer.zero_grad(set_to_none=True)
    assert len(job.gradients.recordings) == 2
    assert max(losses) - min(losses) < 1e-2 * losses[0]  # the same weights on the same batch


ABORTED = """
import sys
import torch
from mhla_diffusion.training.loop import Training
from mhla_diffusion.training.recipe import load_recipe

job = Training(load_recipe(sys.argv[1], sys.argv[2:]), None)
compute = job.gradients.compute
job.gradients.compute = lambda batches: compute(batches) + 0 * compute(batches).item()
batch = [job.feed.rows(job.feed.draw(0), slice(0, 2))]
for _ in range(3):
    job.gradients(batch)
here = torch.cuda.current_stream()
try:
    job.gradients(batch)
except ValueError as error:
    print(error)
assert torch.cuda.current_stream() == here and job.gradients.recordings == {}
torch.manual_seed(3)
first = torch.randn(5, device="cuda")
torch.manual_seed(3)
print(torch.equal(first, torch.randn(5, device="cuda")))
"""


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_is_refused(recipe_file):
    """In a process of its own: what an aborted recording might leave behind would be the next test's."""
    settings = [*GPU, "run.cuda_graph=true", "run.compile=false"]
    command = [sys.executable, "-c", ABORTED, str(recipe_file()), *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    refusal, drawn = done.stdout.splitlines()[-2:]
    assert refusal.startswith("recipe: run.cuda_graph = true, and this step cannot be recorded")
    assert drawn == "True"
