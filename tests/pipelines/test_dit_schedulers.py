"""MHLADiTPipeline with each scheduler, and the variances that DiT predicts."""

import pytest
import torch
from diffusers import (
    DDPMParallelScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    EulerAncestralDiscreteScheduler,
    PNDMScheduler,
)
from model_checks import close
from tiny_dit import generator
from tiny_dit_pipeline import draw, pipeline

from mhla_diffusion.pipelines.dit import DIT_SCHEDULERS, MHLADiTPipeline, dit_scheduler


@pytest.fixture(scope="module")
def pipe() -> MHLADiTPipeline:
    return pipeline()


@pytest.mark.parametrize("scheduler", [*DIT_SCHEDULERS, "ancestral"])
def test_item_i_of_a_batch_equals_its_single_run_with_every_scheduler(pipe, scheduler):
    other = EulerAncestralDiscreteScheduler(beta_schedule="linear", beta_end=0.02)
    pipe = pipeline(pipe.transformer, guidance_channels=3)
    pipe.scheduler = other if scheduler == "ancestral" else dit_scheduler(scheduler)
    eta = {"eta": 1.0} if scheduler == "ddim" else {}
    labels = ["goldfish", 7, "umbrella"]
    batch = draw(pipe, labels, generator=[generator(seed) for seed in range(3)], height=24, width=16, **eta)
    assert batch.shape == (3, 3, 24, 16)
    for i, label in enumerate(labels):
        assert close(batch[i], draw(pipe, label, seed=i, height=24, width=16, **eta)[0])
    assert not close(batch[0], batch[1])


def test_ddpm_uses_the_learned_variances_as_the_paper_does():
    """Three steps of the original sampler, spelled out: posterior mean, variance between its two bounds."""
    pipe = pipeline(default_guidance_scale=1.0)
    pipe.scheduler = dit_scheduler("ddpm")
    noise = torch.randn(1, 4, 8, 8, generator=generator(3))
    seen = []
    steps = 250
    pipe.scheduler.set_timesteps(steps)
    times = pipe.scheduler.timesteps.tolist()
    assert times[0] == 999 and times[-1] == 0 and len(times) == 250

    def stop_after_three(pipe, step, timestep, tensors):
        seen.append(tensors["latents"].clone())
        pipe._interrupt = step == 2
        return {}

    draw_noise = generator(8)
    draw(pipe, 4, latents=noise, generator=generator(8), num_inference_steps=steps,
         output_type="latent", callback_on_step_end=stop_after_three)  # fmt: skip

    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    x = noise.double()
    for step in range(3):
        now, before = alphas[times[step]], alphas[times[step + 1]]
        beta = 1 - now / before
        with torch.no_grad():
            out = pipe.transformer(x.float(), torch.tensor([times[step]]), torch.tensor([4])).sample.double()
        eps, v = out.chunk(2, dim=1)
        start = (x - (1 - now).sqrt() * eps) / now.sqrt()
        mean = before.sqrt() * beta / (1 - now) * start
        mean = mean + (now / before).sqrt() * (1 - before) / (1 - now) * x
        smallest = (beta * (1 - before) / (1 - now)).log()
        share = (v + 1) / 2
        deviation = (0.5 * (share * beta.log() + (1 - share) * smallest)).exp()
        x = mean + deviation * torch.randn(x.shape, generator=draw_noise)
        assert ((seen[step] - x).norm() / x.norm()) < 1e-4
    assert len(seen) == 3


@pytest.mark.parametrize("name", DIT_SCHEDULERS)
def test_named_schedulers_diffuse_as_dit_was_trained(name):
    scheduler = dit_scheduler(name)
    assert torch.allclose(scheduler.betas, torch.linspace(1e-4, 0.02, 1000))
    assert scheduler.config.prediction_type == "epsilon" and not scheduler.config.get("clip_sample")
    changed = dit_scheduler(name, prediction_type="v_prediction")
    assert changed.config.prediction_type == "v_prediction"


def test_a_scheduler_is_swapped_from_the_config_of_another(pipe):
    swapped = pipeline(pipe.transformer)
    swapped.scheduler = DDPMScheduler.from_config(swapped.scheduler.config, variance_type="learned_range")
    assert draw(swapped).isfinite().all()


@pytest.mark.parametrize("kind", [DPMSolverMultistepScheduler, DPMSolverSinglestepScheduler])
def test_a_solver_that_would_cut_channels_off_is_refused_with_what_to_type(pipe, kind):
    swapped = pipeline(pipe.transformer)
    swapped.scheduler = kind.from_config(dit_scheduler("ddpm").config)
    with pytest.raises(
        ValueError, match="keeps 3 of the 4 latent channels: use pipe.scheduler = DPM"
    ) as caught:
        draw(swapped)
    assert "\n" not in str(caught.value)
    swapped.scheduler = kind.from_config(swapped.scheduler.config, variance_type=None)
    assert draw(swapped).isfinite().all()


def test_the_parallel_ddpm_reads_the_same_variances(pipe):
    one, two = pipeline(pipe.transformer), pipeline(pipe.transformer)
    one.scheduler = dit_scheduler("ddpm")
    two.scheduler = DDPMParallelScheduler.from_config(one.scheduler.config)
    assert close(draw(one), draw(two))


@pytest.mark.parametrize("steps", [1, 3])
def test_too_few_steps_for_a_scheduler_are_refused_in_one_line(pipe, steps):
    few = pipeline(pipe.transformer)
    few.scheduler = PNDMScheduler.from_config(few.scheduler.config)
    with pytest.raises(
        ValueError, match=f"^num_inference_steps={steps}: PNDMScheduler .*at least 4"
    ) as caught:
        draw(few, num_inference_steps=steps)
    assert "\n" not in str(caught.value)
    assert draw(few, num_inference_steps=4).isfinite().all()
