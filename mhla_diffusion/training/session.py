"""Builds a run from its recipe: processes, data, model, optimizer, and the state that a checkpoint holds."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from tqdm import tqdm

from mhla_diffusion.folders import check_writable
from mhla_diffusion.mixing import learnable_mixings

from .checkpoint import find_checkpoint, list_checkpoints, load_optimizer_tensors, read_checkpoint
from .components import Components, build_components, loss_kind, read_weights
from .config import Recipe
from .data import open_source
from .diffusion import DiffusionLoss
from .distillation import check_distillable
from .ema import EMA
from .feed import Feed
from .latents import caption_table, label_table, load_or_encode
from .losses import Denoiser, FlowLoss
from .parameters import LORA, build_optimizer, trainable
from .recipe import differing_keys


def start_accelerator(recipe: Recipe) -> Accelerator:
    run = recipe.run
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ValueError('recipe: run.device = "cuda", but there is no CUDA device; write "auto" or "cpu"')
    AcceleratorState._reset_state()  # or a second run in this process could not choose its precision
    accelerator = Accelerator(
        mixed_precision=run.mixed_precision,
        cpu=run.device == "cpu" or not torch.cuda.is_available(),
        log_with="tensorboard" if tracks(run.tracker) else None,
        project_dir=run.out,
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        ],
    )
    if run.cuda_graph and (accelerator.device.type != "cuda" or accelerator.num_processes > 1):
        raise ValueError(
            f"recipe: run.cuda_graph = true is for one process on a CUDA device, this is {accelerator.num_processes} "
            f"on {accelerator.device.type}; write false"
        )
    parts = accelerator.num_processes * run.gradient_accumulation
    if run.batch_size % parts:
        raise ValueError(
            f"recipe: run.batch_size = {run.batch_size} does not divide over {accelerator.num_processes} "
            f"processes x {run.gradient_accumulation} micro-batches; write a multiple of {parts}"
        )
    return accelerator


def tracks(tracker: str) -> bool:
    """Whether to write TensorBoard files; ValueError when they are asked for and it is not installed."""
    if tracker == "none":
        return False
    installed = importlib.util.find_spec("tensorboard") is not None
    if tracker == "tensorboard" and not installed:
        raise ValueError(
            'recipe: run.tracker = "tensorboard", which is not installed; pip install tensorboard, or write "auto"'
        )
    return installed


def progress_bar(name: str, steps: int, done: int, shown: bool) -> tqdm:
    return tqdm(
        total=steps,
        initial=done,
        unit="step",
        disable=not shown,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 15,
        desc=name,
    )


def compile_model(model: torch.nn.Module, scope: str) -> None:
    """Compiles in place, so that parameter names stay: the whole model, or each of its repeated layers.

    A text encoder is always compiled whole: outside compiled code, transformers reads the padding mask on the host at
    each call, and every step would wait for the device.
    """
    layers = getattr(model, "transformer_blocks", None) or getattr(model, "blocks", None)  # Wan's name
    for part in layers if scope == "layers" and layers else [model]:
        part.compile()


def loss_module(recipe: Recipe, parts: Components) -> Denoiser:
    """The loss that the recipe trains by, around the transformer and, where it trains, the text encoder."""
    if loss_kind(recipe, parts.class_numbers is not None) == "diffusion":
        return DiffusionLoss(parts.transformer, parts.scheduler.betas, recipe.loss.variational_weight)
    return FlowLoss(parts.transformer, parts.text_encoder if recipe.model.train_text_encoder else None)


class Session:
    """Everything a run needs, built from its recipe and put at the step to start from."""

    def __init__(self, recipe: Recipe, resume: str | Path | None):
        self.recipe, run = recipe, recipe.run
        self.out = Path(run.out)
        self.checkpoints = self.out / "checkpoints"
        self.distillation = self.out / "distillation"  # checkpoints of the steps of [distill]
        found = find_checkpoint(self.checkpoints, resume)
        if found is None and str(resume) != "auto":
            for folder, of in ((self.checkpoints, ""), (self.distillation, " of its distillation")):
                for newest in list_checkpoints(folder)[-1:]:
                    raise ValueError(
                        f"{self.out} already holds a run up to {newest.name}{of}; continue it with --resume auto, "
                        "or choose another run.out"
                    )
        saved = self._saved(found)
        self.resumed = saved is not None
        if saved and saved[1].get("distillation"):
            raise ValueError(
                f"{found} is a checkpoint of the distillation before the first step; --resume auto goes on from it"
            )
        # A checkpoint of the run itself has the distilled weights in it.
        begun = recipe.distill.steps and not saved and str(resume) == "auto"
        self.distilled = self._saved(find_checkpoint(self.distillation, resume)) if begun else None
        self.accelerator = start_accelerator(recipe)
        self.device = self.accelerator.device
        self.main = self.accelerator.is_main_process
        check_writable(self.checkpoints, "run.out")
        self.parts = self._components()
        if recipe.distill.steps:
            check_distillable(self.parts.transformer, recipe)
        self._build_data()
        self._build_model()
        self.first_step = self._first_step()
        self.start = self.first_step
        if saved:
            self._restore(*saved)
        elif self.distilled:
            self._check_data(self.distilled[1])
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    def _saved(self, found: Path | None) -> tuple[dict, dict] | None:
        """Tensors and state of a checkpoint; ValueError when it is of another recipe."""
        if found is None:
            return None
        tensors, state = read_checkpoint(found)
        keys = differing_keys(self.recipe, state["recipe"])
        if keys:
            raise ValueError(
                f"{found} belongs to another recipe, which differs in {', '.join(keys)}; undo that, or "
                "start anew with another run.out"
            )
        return tensors, state

    def _components(self) -> Components:
        return build_components(self.recipe)

    def diffusion_steps(self) -> int | None:
        """Steps of the diffusion that is trained; None with flow matching."""
        by_class = self.parts.class_numbers is not None
        diffusion = loss_kind(self.recipe, by_class) == "diffusion"
        return self.parts.scheduler.config.num_train_timesteps if diffusion else None

    def _build_data(self) -> None:
        recipe, parts = self.recipe, self.parts
        with self.accelerator.main_process_first():  # the others then find the cache filled
            by_class = parts.class_numbers is not None
            source = open_source(
                recipe.data, parts.latent_factor, recipe.run.seed, by_class, parts.frame_factor, self.device
            )
            encoded = load_or_encode(source, parts, recipe.data, self.device)
        self.fingerprint = source.fingerprint
        if by_class:
            table = label_table(encoded, parts.class_numbers, parts.transformer.config.num_embeds_ada_norm)
        else:
            length = recipe.data.max_sequence_length or parts.max_sequence_length
            table = caption_table(
                encoded, parts, recipe.model.train_text_encoder, length, self.device, recipe.data.cache
            )
        self.feed = Feed(encoded, table, recipe, self.device, self.diffusion_steps())

    def _build_model(self) -> None:
        recipe, parts = self.recipe, self.parts
        trainable(parts.transformer, recipe.model.train)
        self.mixings = learnable_mixings(parts.transformer)
        if parts.text_encoder is not None:
            parts.text_encoder.requires_grad_(recipe.model.train_text_encoder)
        self.module = loss_module(recipe, parts)
        self.module.to(self.device).train()
        if recipe.run.gradient_checkpointing:
            parts.transformer.enable_gradient_checkpointing()
        if recipe.run.compile:
            for model in self.module.children():
                compile_model(model, recipe.run.compile_scope)
        self.parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.optimizer = build_optimizer(self.parameters, recipe.optimizer)
        self.ema = EMA(self.parameters, recipe.ema)
        self._take_ema()
        self.model = self.accelerator.prepare(self.module)

    def _take_ema(self) -> None:
        """Averages of the run that `init_from` continues, where it has them."""
        folder = Path(self.recipe.run.init_from or ".") / "ema"
        if not self.recipe.run.init_from or not folder.is_dir() or self.recipe.model.train in LORA:
            return
        for part in (path for path in sorted(folder.iterdir()) if path.is_dir()):
            for name, value in read_weights(part).items():
                if f"{part.name}.{name}" in self.ema.average:
                    self.ema.average[f"{part.name}.{name}"].copy_(value)

    def _first_step(self) -> int:
        if self.recipe.run.first_step >= 0:
            return self.recipe.run.first_step
        note = Path(self.recipe.run.init_from or ".") / "continue.json"
        return json.loads(note.read_text())["step"] if self.recipe.run.init_from and note.is_file() else 0

    def _check_data(self, state: dict) -> None:
        if state["data"] != self.fingerprint:
            raise ValueError(
                f"the checkpoint at step {state['step']} was made with other pictures or captions than "
                f"{self.recipe.data.path} holds now; restore them, or start anew with another run.out"
            )

    def _restore(self, tensors: dict, state: dict) -> None:
        self._check_data(state)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors["weights"][name])
                self.ema.average[name].copy_(tensors["ema"][name])
        load_optimizer_tensors(self.optimizer, self.parameters, tensors["optimizer"])
        self.start, self.first_step = state["step"], state["first_step"]
