"""The training loop: a recipe in; checkpoints, sample grids, metrics and a pipeline folder out.

Nothing in a step waits for the device. The loss, the gradient norm and the first bad step stay there and are read
every `run.log_every` steps, and before anything is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from mhla_diffusion.mixing import clip_mixings, mean_occupancy

from .checkpoint import keep_lines, list_checkpoints, optimizer_tensors, prune, write_checkpoint
from .config import Recipe
from .export import draw_grid, export_adapter, export_continue, export_pipeline
from .graphs import Batches, RecordedGradients
from .losses import NonFiniteLoss, makes_videos
from .parameters import LORA, listed, schedule_factor
from .provenance import environment, process_started
from .randomness import derived_seed
from .recipe import load_recipe
from .session import Session, progress_bar
from .warm_start import WarmStart


@dataclass
class Result:
    """What `run` did. `images_per_second`, clips of a set of videos, leaves out the first interval, which compiles."""

    out: Path
    step: int
    finished: bool
    loss: float
    images_per_second: float

    @property
    def pipeline(self) -> Path:
        """The exported pipeline, with the EMA weights."""
        return self.out / "pipeline"


def run(recipe_path: str | Path, overrides: Iterable[str] = (), resume: str | Path | None = None) -> Result:
    """Trains what a recipe says.

    Args:
        recipe_path: a TOML file; `describe()` in `recipe.py` lists every setting.
        overrides: `section.key=value` texts.
        resume: "auto" (the newest whole checkpoint in the output folder, if there is one), a checkpoint folder, or
            None or "none".

    Raises:
        ValueError: the recipe, the data or the checkpoint does not fit; one line, nothing trained.
        NonFiniteLoss: training broke down; checkpoints and exports on disk are untouched.
    """
    return train(load_recipe(recipe_path, overrides), resume)


def train(recipe: Recipe, resume: str | Path | None = None) -> Result:
    """`run` for a recipe that is already read."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if recipe.run.tf32 else "highest")
    try:
        return Training(recipe, resume).fit()
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.compiler.reset()  # else a few runs in one process reach the limit of compiled variants


class Training(Session):
    """`fit` is the loop; `Session` has built everything it uses."""

    def __init__(self, recipe: Recipe, resume: str | Path | None):
        super().__init__(recipe, resume)
        # Loss and gradients of a step, of its micro-batches.
        self.gradients = self._gradients
        if recipe.run.cuda_graph:
            self.gradients = RecordedGradients(self._gradients, self.parameters.values())

    def fit(self) -> Result:
        run = self.recipe.run
        if self.main:
            self._prepare_folder()
        if self.accelerator.log_with:
            self.accelerator.init_trackers("tracker")
        self.bad_step = torch.full((), -1.0, dtype=torch.float64, device=self.device)
        self.loss, self.speeds = float("nan"), []
        step, out_of_time = self.start, not self._warm_start()
        self._reset_window()
        bar = progress_bar(run.name, run.steps, self.start, self.main)
        while step < run.steps and not out_of_time:
            self._step(step)
            step += 1  # from here on: steps done
            bar.update()
            out_of_time = self._out_of_time(self._due(step))
            last = step == run.steps or out_of_time
            if last or self._due(step):
                self._read(step, bar)
                self._write(step, last)
        if step == self.start:  # no step was left to do, or no time: only the export may be missing
            self._export(step)
        bar.close()
        self.accelerator.end_training()
        if self.main:
            print(f"{step} of {run.steps} steps done; pipeline: {self.out / 'pipeline'}")
        speed = (
            sum(self.speeds[1:]) / len(self.speeds[1:])
            if self.speeds[1:]
            else (self.speeds or [float("nan")])[0]
        )
        return Result(self.out, step, step == run.steps, self.loss, speed)

    def _warm_start(self) -> bool:
        """Distils where the recipe says so and no checkpoint of the steps behind it is there; False: out of time."""
        if not self.recipe.distill.steps or self.resumed:
            return True
        begun, self.distilled = self.distilled, None  # not kept for the rest of the run
        return WarmStart(self, begun).run(self._out_of_time)

    def _step(self, step: int) -> None:
        recipe = self.recipe
        torch.manual_seed(
            derived_seed(recipe.run.seed, "layers", step, self.accelerator.process_index)
        )  # dropout
        draw = self.feed.draw(step)
        micro_batches, world = recipe.run.gradient_accumulation, self.accelerator.num_processes
        size = recipe.run.batch_size // (micro_batches * world)
        begins = [(micro * world + self.accelerator.process_index) * size for micro in range(micro_batches)]
        loss = self.gradients([self.feed.rows(draw, slice(begin, begin + size)) for begin in begins])

        limit = recipe.optimizer.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit, foreach=True)
        factor = schedule_factor(recipe.optimizer, step, self.first_step, recipe.run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        # Fused AdamW leaves weights and moments alone where this is 1, so a bad step never reaches the weights.
        self.optimizer.found_inf = (~torch.isfinite(norm)).float()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        clip_mixings(self.mixings)
        # Averages that no earlier run handed on begin with this run, and so does their warm-up.
        self.ema.update(step if recipe.run.init_from else step - self.first_step)

        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        self.bad_step = torch.where(bad & (self.bad_step < 0), float(step + 1), self.bad_step)
        self.loss_sum += loss
        self.norm_sum += norm
        self.window_steps += 1

    def _gradients(self, batches: Batches) -> torch.Tensor:
        """The mean loss of a step's micro-batches; their gradients are added up in the parameters."""
        loss = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                part = self.model(*batch).mean() / len(batches)
                self.accelerator.backward(part)
            loss += part.detach()
        return loss

    def _due(self, step: int) -> bool:
        """Whether anything happens after this step that needs the loss on the host."""
        recipe = self.recipe
        return any(
            every and step % every == 0
            for every in (
                recipe.run.log_every,
                recipe.checkpoint.every,
                recipe.checkpoint.export_every,
                recipe.sample.every,
            )
        )

    def _out_of_time(self, due: bool) -> bool:
        """Whether `run.max_minutes` are over. Several processes agree on it only where the host reads anyway: `due`."""
        limit = self.recipe.run.max_minutes
        if not limit or (self.accelerator.num_processes > 1 and not due):
            return False
        over = time.time() - process_started() > 60 * limit
        if self.accelerator.num_processes == 1:
            return over
        # Clocks differ between processes: all stop when one of them is over.
        return bool(self.accelerator.reduce(torch.tensor(float(over), device=self.device)).item() > 0)

    # ---- reading and writing ----------------------------------------------------------------------------------------

    def _reset_window(self) -> None:
        self.loss_sum = torch.zeros((), device=self.device)
        self.norm_sum = torch.zeros((), device=self.device)
        self.window_steps, self.window_began = 0, time.perf_counter()

    def _read(self, step: int, bar: tqdm) -> None:
        """The one host synchronisation: stops on a bad step, else logs the window."""
        occupancy = mean_occupancy(self.mixings)
        occupancy = self.loss_sum.new_tensor(float("nan")) if occupancy is None else occupancy
        values = torch.stack([self.loss_sum, self.norm_sum, occupancy, self.bad_step]).double()
        rows = self.accelerator.gather(values[None]).tolist()  # one row a process
        bad = [int(row[3]) for row in rows if row[3] >= 0]
        if bad:
            raise NonFiniteLoss(self._breakdown(min(bad)))
        seconds = time.perf_counter() - self.window_began
        self.loss = sum(row[0] for row in rows) / len(rows) / self.window_steps
        speed = self.window_steps * self.recipe.run.batch_size / seconds
        self.speeds.append(speed)
        share = rows[0][2]
        entry = {
            "step": step,
            "loss": self.loss,
            "grad_norm": rows[0][1] / self.window_steps,
            "lr": max(g["lr"] for g in self.optimizer.param_groups if g["kind"] == "weights")
            if any(g["kind"] == "weights" for g in self.optimizer.param_groups)
            else 0.0,
            "images_per_second": speed,
            "mixing_on_bound": None if share != share else share,
            "minutes": (time.time() - process_started()) / 60,
        }
        if self.main:
            unit = "clips" if makes_videos(self.parts.transformer) else "images"
            bar.set_postfix_str(f"loss {self.loss:.4f}, {speed:,.0f} {unit}/s")
            with (self.out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")
            if share > 0.5 and not getattr(self, "warned", False):
                self.warned = True
                bar.write(
                    f"step {step}: {share:.0%} of the mixing coefficients sit on 0 or 1, so the matrices have lost "
                    "their locality; lower optimizer.mixing_lr"
                )
        self.accelerator.log({k: v for k, v in entry.items() if v is not None and k != "step"}, step=step)
        self._reset_window()

    def _breakdown(self, step: int) -> str:
        kept = list_checkpoints(self.checkpoints)
        advice = "lower optimizer.lr"
        if self.recipe.run.mixed_precision != "no":
            advice += ' or write run.mixed_precision = "no"'
        where = (
            f"the last checkpoint, {kept[-1]}, is untouched" if kept else "no checkpoint had been written yet"
        )
        return f"the loss or its gradient is not finite at step {step} of {self.recipe.run.steps}; {where}; {advice}"

    def _write(self, step: int, last: bool) -> None:
        recipe = self.recipe

        def due(every: int) -> bool:
            return every > 0 and step % every == 0

        if self.main:
            if last or due(recipe.checkpoint.every):
                self._checkpoint(step)
            if due(recipe.sample.every) or (last and recipe.sample.every):
                draw_grid(
                    self.out / "samples" / f"step-{step:08d}", self.parts, self.ema, recipe, self.device
                )
        if last or due(recipe.checkpoint.export_every):
            self._export(step)
        self.accelerator.wait_for_everyone()
        self.window_began = time.perf_counter()  # writing is not training

    def _checkpoint(self, step: int) -> None:
        names = {id(p): name for name, p in self.parameters.items()}
        tensors = {
            "weights": self.parameters,
            "ema": self.ema.average,
            "optimizer": optimizer_tensors(self.optimizer, names),
        }
        state = {
            "recipe": dataclasses.asdict(self.recipe),
            "data": self.fingerprint,
            "first_step": self.first_step,
        }
        write_checkpoint(self.checkpoints, step, tensors, state)
        prune(self.checkpoints, self.recipe.checkpoint.keep)

    def _export(self, step: int) -> None:
        if not self.main:
            return
        export_pipeline(self.out / "pipeline", self.parts, self.ema, self.recipe)
        if self.recipe.model.train in (*LORA, "mixing"):
            export_adapter(self.out / "adapter", self.parts, self.ema)
        if self.recipe.checkpoint.export_continue:
            export_continue(self.out / "continue", self.parts, self.ema, self.recipe, step)

    def _prepare_folder(self) -> None:
        """Removes what a killed run left half written, and metrics of steps that will be done again."""
        for stale in self.checkpoints.glob(".writing-*"):
            shutil.rmtree(stale)
        keep_lines(self.out / "metrics.jsonl", self.start)
        counts = {
            name: sum(p.numel() for p in model.parameters()) for name, model in self.module.named_children()
        }
        trained = sum(p.numel() for p in self.parameters.values())
        print(
            f'{self.recipe.run.name}: model.train = "{self.recipe.model.train}" trains {len(self.parameters)} tensors, '
            f"{trained:,} of {sum(counts.values()):,} numbers (names in run.json): {listed(self.parameters)}"
        )
        facts = {
            "recipe": dataclasses.asdict(self.recipe),
            "environment": environment(self.device),
            "processes": self.accelerator.num_processes,
            "parameters": counts,
            "trained_parameters": trained,
            "trained": list(self.parameters),
            "data": self.fingerprint,
            "pictures": sum(self.feed.order.bucket_sizes),
        }
        (self.out / "run.json").write_text(json.dumps(facts, indent=1))
