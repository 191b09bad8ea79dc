"""The steps of [distill], before a run's first one: each MHLA layer learns what the attention it replaced gave.

They see the batches of the run's first steps, noised as ever. As in `loop.py`, nothing in a step waits for the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable

import torch
from tqdm import tqdm

from mhla_diffusion.mixing import clip_mixings

from .checkpoint import (
    keep_lines,
    load_optimizer_tensors,
    optimizer_tensors,
    prune,
    write_checkpoint,
)
from .distillation import OFF, distilling, layer_pairs
from .losses import NonFiniteLoss
from .parameters import build_optimizer, schedule_factor
from .provenance import process_started
from .randomness import derived_seed
from .session import Session, progress_bar


class WarmStart:
    """Distils the model of a session in place; `run` is the loop.

    Args:
        job: built, and at the weights that the model was converted with: they are the teachers'.
        begun: tensors and state of a checkpoint of an earlier, interrupted distillation of the same recipe.

    What is trained is `model.train`'s choice, as far as it lies inside the MHLA attentions. Writes
    `distillation.jsonl`, and checkpoints into `distillation/`, of which the last, without the optimizer, stays.

    Raises ValueError when `model.train` chooses nothing there.
    """

    def __init__(self, job: Session, begun: tuple[dict, dict] | None):
        self.job, self.steps = job, job.recipe.distill.steps
        self.pairs = layer_pairs(job.parts.transformer)
        inside = {id(parameter) for pair in self.pairs for parameter in pair.parameters}
        self.parameters = {name: p for name, p in job.parameters.items() if id(p) in inside}
        if not self.parameters:
            raise ValueError(
                f'recipe: distill.steps = {self.steps}, but model.train = "{job.recipe.model.train}" trains nothing '
                f"inside the MHLA attentions; choose another set, {OFF}"
            )
        optimizer, rate = job.recipe.optimizer, job.recipe.distill.lr
        self.schedule = dataclasses.replace(
            optimizer,
            lr=optimizer.lr if rate is None else rate,
            schedule="cosine",
            lr_min=0.0,
            warmup=min(optimizer.warmup, self.steps // 10),
        )
        self.optimizer = build_optimizer(self.parameters, self.schedule)
        self.start = 0
        if begun is not None:
            self._restore(*begun)
        self.micro_batches = job.recipe.run.gradient_accumulation
        for pair in self.pairs:
            pair.share = 1 / self.micro_batches
        self.bad_step = torch.full((len(self.pairs),), -1.0, dtype=torch.float64, device=job.device)
        self._reset_window()

    def run(self, out_of_time: Callable[[bool], bool]) -> bool:
        """Runs what is left of the steps; the averages start from what came of them. False: out of time.

        Args:
            out_of_time: asked after each step whether to stop, and told whether the host reads there anyway.

        Raises NonFiniteLoss with the name of the layer.
        """
        job, step, over = self.job, self.start, False
        if job.main:
            keep_lines(job.out / "distillation.jsonl", self.start)
        if step < self.steps:
            bar = progress_bar(f"{job.recipe.run.name}, distillation", self.steps, step, job.main)
            with contextlib.closing(bar), distilling(job.module, self.pairs):
                while step < self.steps and not over:
                    self._step(step)
                    step += 1  # from here on: steps done
                    bar.update()
                    due = self._due(step)
                    over = out_of_time(due)
                    last = step == self.steps or over
                    if last or due:
                        self._read(step, bar)
                    every = job.recipe.checkpoint.every
                    if job.main and (last or (every and step % every == 0)):
                        self._checkpoint(step)
                    job.accelerator.wait_for_everyone()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                job.ema.average[name].copy_(parameter)
        if job.main:
            print(
                f"{step} of {self.steps} steps of distillation done, {len(self.pairs)} layers; losses in "
                f"{job.out / 'distillation.jsonl'}"
            )
        return not over

    def _step(self, step: int) -> None:
        job, run = self.job, self.job.recipe.run
        rank, world = job.accelerator.process_index, job.accelerator.num_processes
        torch.manual_seed(derived_seed(run.seed, "distillation", step, rank))  # dropout
        draw = job.feed.draw(job.first_step + step)
        size = run.batch_size // (self.micro_batches * world)
        losses = torch.zeros(len(self.pairs), device=job.device)
        for micro in range(self.micro_batches):
            begin = (micro * world + rank) * size
            # DDP averages the gradients of a backward through the whole model, which there is none of.
            with torch.no_grad(), job.accelerator.no_sync(job.model):
                job.model(*job.feed.rows(draw, slice(begin, begin + size)))
            losses += torch.stack([pair.loss for pair in self.pairs]) / self.micro_batches
        if world > 1:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad = job.accelerator.reduce(parameter.grad, reduction="mean")

        limit = self.schedule.max_grad_norm or math.inf
        norms = torch.stack(  # of each layer by itself: they share nothing
            [torch.nn.utils.clip_grad_norm_(pair.parameters, limit, foreach=True) for pair in self.pairs]
        )
        factor = schedule_factor(self.schedule, step, 0, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        bad = ~(torch.isfinite(losses) & torch.isfinite(norms))
        self.optimizer.found_inf = (
            (~torch.isfinite(norms)).any().float()
        )  # as in loop.py: such a step is left out
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        clip_mixings(job.mixings)
        self.bad_step = torch.where(bad & (self.bad_step < 0), float(step + 1), self.bad_step)
        self.loss_sum += losses
        self.window_steps += 1

    def _due(self, step: int) -> bool:
        recipe = self.job.recipe
        return any(every and step % every == 0 for every in (recipe.run.log_every, recipe.checkpoint.every))

    # ---- reading and writing ----------------------------------------------------------------------------------------

    def _reset_window(self) -> None:
        self.loss_sum = torch.zeros(len(self.pairs), device=self.job.device)
        self.window_steps, self.window_began = 0, time.perf_counter()

    def _read(self, step: int, bar: tqdm) -> None:
        """The one host synchronisation: stops on a bad step, else logs the window."""
        job = self.job
        rows = job.accelerator.gather(torch.stack([self.loss_sum.double(), self.bad_step])[None])
        sums, bad = rows.mean(0)[0].tolist(), rows[:, 1].tolist()
        found = [(at, number) for row in bad for number, at in enumerate(row) if at >= 0]
        if found:
            at, number = min(found)
            raise NonFiniteLoss(
                f"the loss of {self.pairs[number].name} or its gradient is not finite at step {int(at)} of "
                f"{self.steps} of the distillation; lower distill.lr or optimizer.mixing_lr"
            )
        layers = {pair.name: total / self.window_steps for pair, total in zip(self.pairs, sums, strict=True)}
        entry = {
            "step": step,
            "loss": sum(layers.values()) / len(layers),
            "layers": layers,
            "lr": max((g["lr"] for g in self.optimizer.param_groups if g["kind"] == "weights"), default=0.0),
            "images_per_second": self.window_steps
            * job.recipe.run.batch_size
            / (time.perf_counter() - self.window_began),
            "minutes": (time.time() - process_started()) / 60,
        }
        if job.main:
            bar.set_postfix_str(f"relative error {entry['loss']:.4f}")
            with (job.out / "distillation.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")
        job.accelerator.log({"distillation": entry["loss"]}, step=step)
        self._reset_window()

    def _checkpoint(self, step: int) -> None:
        job = self.job
        tensors = {"weights": self.parameters}
        if step < self.steps:
            names = {id(parameter): name for name, parameter in self.parameters.items()}
            tensors["optimizer"] = optimizer_tensors(self.optimizer, names)
        state = {"recipe": dataclasses.asdict(job.recipe), "data": job.fingerprint, "distillation": True}
        write_checkpoint(job.distillation, step, tensors, state)
        prune(job.distillation, job.recipe.checkpoint.keep if step < self.steps else 1)

    def _restore(self, tensors: dict, state: dict) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors["weights"][name])
        load_optimizer_tensors(self.optimizer, self.parameters, tensors.get("optimizer", {}))
        self.start = state["step"]
