"""DiT's schedulers by name, and how Diffusers' schedulers treat the variances that DiT predicts."""

from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    DDPMParallelScheduler,
    DDPMScheduler,
    DPMSolverMultistepInverseScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    SASolverScheduler,
    SchedulerMixin,
)

from .checks import check_choice

# The diffusion that DiT was trained with (arXiv 2212.09748, Sec. 4).
DIT_DIFFUSION = {
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "prediction_type": "epsilon",
}
DIT_SCHEDULERS: dict[str, tuple[type[SchedulerMixin], dict[str, Any]]] = {
    "ddim": (DDIMScheduler, {"clip_sample": False}),
    # As the paper samples, in 250 of the 1000 steps, spread from the first to the last, with learned variances.
    "ddpm": (
        DDPMScheduler,
        {"clip_sample": False, "variance_type": "learned_range", "timestep_spacing": "linspace"},
    ),
    "dpm-solver": (DPMSolverMultistepScheduler, {}),
}

# Those that read variances from the model's output, and those that with learned variances keep three channels of it.
READS_VARIANCES = (DDPMScheduler, DDPMParallelScheduler)
KEEPS_THREE_CHANNELS = (
    DPMSolverMultistepScheduler,
    DPMSolverMultistepInverseScheduler,
    DPMSolverSinglestepScheduler,
    SASolverScheduler,
)


def dit_scheduler(name: str = "ddim", **changes) -> SchedulerMixin:
    """A scheduler for DiT by name: "ddim", "ddpm" (the paper's, meant for 250 steps) or "dpm-solver" (20 steps).

    `changes` replace settings, such as `prediction_type="v_prediction"`. Raises ValueError on another name.
    """
    check_choice("name", name, tuple(DIT_SCHEDULERS))
    kind, settings = DIT_SCHEDULERS[name]
    return kind(**(DIT_DIFFUSION | settings | changes))


def set_timesteps(scheduler: SchedulerMixin, steps: int, device: torch.device) -> None:
    """`scheduler.set_timesteps`; raises a one-line ValueError where it fails on a number that is too small for it."""
    try:
        scheduler.set_timesteps(steps, device=device)
    except (IndexError, ValueError) as error:  # PNDM with fewer than 4 steps: of shapes that do not fit
        reason = " ".join(str(error).split())
        raise ValueError(
            f"num_inference_steps={steps}: {type(scheduler).__name__} makes no such schedule ({reason}): give another "
            "number (PNDM wants at least 4), or another scheduler"
        ) from error
