"""Attention of a pipeline while it draws: every layer and head at chosen steps, on the drawings' own inputs."""

from __future__ import annotations

import dataclasses
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import torch
from diffusers import DiTPipeline
from torch import Tensor, nn

from ...pipelines.painter import Painter
from ...pipelines.requests import Request
from .entropy import row_entropy
from .layers import attention_layers, layer_attention
from .matrices import AttentionMatrix, MixedMatrix
from .mixing_figures import mixing_figures, mixings_of, on_grid
from .spectrum import spectrum

# DeiT-T, MHLA (arXiv 2601.07832), as published: one figure per kind of attention, without the threshold of the rank.
PAPER = {
    "linear": {"rank": 58.4, "entropy": 5.12},
    "softmax": {"rank": 254.8, "entropy": 4.13},
    "mhla": {"rank": 233.4, "entropy": 4.06},
}
ONE_BLOCK = "one_block"  # kind of rows of linear attention with MHLA's queries and keys
FIGURES = ("rank", "effective_rank", "participation_ratio", "stable_rank", "entropy", "relative_entropy")


@dataclass(frozen=True)
class Options:
    """How the figures are computed; see `spectrum` and `row_entropy`.

    one_block: also the figures of MHLA's queries and keys in a single block, to see what the blocks do.
    """

    threshold: float | None = None
    thresholds: tuple[float, ...] = (1e-3, 1e-2)
    exact_limit: int = 4096
    probes: int = 16
    lanczos_steps: int = 64
    entropy_rows: int = 4096
    seed: int = 0
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    one_block: bool = False


class SeenEnough(Exception):
    """The steps to look at are done: nothing more needs to be drawn."""


@dataclass
class Watched:
    """What was seen: `rows` of figures, one for each (model, layer, head, step, item); one map for each layer."""

    rows: list[dict] = field(default_factory=list)
    maps: list[tuple[str, Tensor]] = field(default_factory=list)
    steps_seen: int = 0
    token_grid: tuple[int, ...] = ()


def token_grid(model: nn.Module, latents: Tensor) -> tuple[int, ...]:
    """Tokens per axis of latents `(B, C, [frames,] rows, columns)`."""
    patch = model.config.patch_size
    sizes = latents.shape[2:]
    patch = (patch,) * len(sizes) if isinstance(patch, int) else patch
    return tuple(size // step for size, step in zip(sizes, patch, strict=True))


def figures_of(matrix: AttentionMatrix, rows: str, options: Options) -> dict:
    """The row of one matrix; `rows`: what its rows are divided by."""
    found = spectrum(
        matrix,
        threshold=options.threshold,
        thresholds=options.thresholds,
        exact_limit=options.exact_limit,
        probes=options.probes,
        steps=options.lanczos_steps,
        seed=options.seed,
    )
    entropy = row_entropy(matrix, max_rows=options.entropy_rows, seed=options.seed)
    row = dataclasses.asdict(found)
    row["ranks"] = {f"{value:g}": count for value, count in found.ranks.items()}
    row |= {
        "kind": matrix.kind,
        "tokens": matrix.tokens,
        "rank_bound": matrix.rank_bound,
        "rows_divided_by": rows,
        "entropy": entropy.mean,
        "relative_entropy": entropy.relative,
        "entropy_details": dataclasses.asdict(entropy),
    }
    if isinstance(matrix, MixedMatrix):
        row["head_dim"] = matrix.width
        row["mixing_rank_bound"] = matrix.mixing_rank_bound()
    return row


@contextmanager
def watching(
    models: dict[str, nn.Module],
    steps: Sequence[int],
    items: Callable[[int], slice],
    options: Options,
    progress: Callable[[int], object] = lambda count: None,
):
    """While it is open, the models' calls at these denoising steps are looked at; yields a `Watched`.

    A step is a timestep that differs from the one before; its first call counts, which with guidance in two calls (Wan)
    is that with the prompt. `items` says which part of a batch of that size has the prompt. The call after the last of
    the steps raises SeenEnough. Hooks are taken away at the end, whatever happens.
    """
    seen = Watched()
    state = {"time": None, "step": -1, "wanted": False, "items": slice(None)}

    def begin(model, args, kwargs):
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        now, latents = float(given["timestep"].max()), given["hidden_states"]
        if now != state["time"]:
            if state["step"] >= max(steps):
                raise SeenEnough
            state.update(time=now, step=state["step"] + 1)
            seen.steps_seen = state["step"] + 1
            state["wanted"] = state["step"] in steps
        else:
            state["wanted"] = False
        state["items"] = items(len(latents))
        seen.token_grid = token_grid(model, latents)

    def look(name: str, index: int, model_name: str):
        def hook(module, args, kwargs):
            if not state["wanted"] or (options.layers is not None and index not in options.layers):
                return
            layer = layer_attention(module, state["items"], *args, **kwargs)
            heads = range(layer.heads) if options.heads is None else options.heads
            where = {"model": model_name, "layer": index, "module": name, "step": state["step"]}
            mean_row = 0.0
            for item in range(layer.items):
                for head in heads:
                    here = {**where, "head": head, "item": item}
                    matrix = layer.matrix(item, head)
                    seen.rows.append({**here, **figures_of(matrix, layer.rows, options)})
                    if options.one_block and layer.one_block:
                        row = figures_of(layer.one_block(item, head), layer.rows, options)
                        seen.rows.append({**here, **row, "kind": ONE_BLOCK})
                    progress(1)
            for head in heads:
                matrix = layer.matrix(0, head)
                mean_row = mean_row + centre_row(matrix, seen.token_grid)
            caption = f"{model_name} layer {index}, step {state['step']}: {layer.kind}"
            values = on_grid(mean_row.abs() / mean_row.abs().max(), seen.token_grid)
            seen.maps.append((caption, values.cpu()))

        return hook

    with ExitStack() as stack:
        for model_name, model in models.items():
            stack.callback(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
            for index, (name, module) in enumerate(attention_layers(model).items()):
                hook = look(name, index, model_name)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield seen


def centre_row(matrix, grid: Sequence[int]) -> Tensor:
    """`(N,)`: the row of the token in the middle of the grid."""
    place = 0
    for size in grid:
        place = place * size + size // 2
    return matrix.rows(torch.tensor([place], device=matrix.device))[0]


def check_options(options: Options, painter: Painter) -> None:
    """Raises ValueError for layers or heads that a transformer lacks."""
    for model in transformers_of(painter.pipe).values():
        layers = attention_layers(model)
        heads = next(iter(layers.values())).heads
        for what, chosen, count in (("layer", options.layers, len(layers)), ("head", options.heads, heads)):
            wrong = [value for value in chosen or () if not 0 <= value < count]
            if wrong:
                raise ValueError(f"there is no {what} {wrong[0]}: give 0 to {count - 1}")


def transformers_of(pipe) -> dict[str, nn.Module]:
    """The denoising networks of a pipeline, one or (Wan 2.2) two experts."""
    found = {name: getattr(pipe, name, None) for name in ("transformer", "transformer_2")}
    return {name: model for name, model in found.items() if model is not None}


def study(
    painter: Painter,
    requests: Sequence[Request],
    *,
    at: Sequence[int] | None = None,
    options: Options | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> dict:
    """Draw the requests in one batch and look at the attention at steps `at` (0 = first; default: the middle one).

    What comes after these steps is not drawn.

    Returns:
        "rows", the figures of every (layer, head, step, item); "layers" and "kinds", their means with deviations;
        "mixing", the figures of each mixing matrix; "maps", pictures to be drawn; and what it was computed with.

    Raises ValueError for steps, layers or heads that are not there.
    """
    options = options or Options()
    check_options(options, painter)
    steps = painter.values(requests[0])["steps"]
    at = [steps // 2] if at is None else sorted(set(at))
    wrong = [step for step in at if not 0 <= step < steps]
    if wrong or not at:
        raise ValueError(f"--at {wrong[0] if wrong else at}: {steps} steps are drawn, give 0 to {steps - 1}")
    models = transformers_of(painter.pipe)
    count, guided_first = len(requests), isinstance(painter.pipe, DiTPipeline)

    def with_prompt(batch: int) -> slice:
        """DiT's batches begin with the classes asked for; SANA's end with the prompts, Wan's hold nothing else."""
        return slice(0, count) if guided_first else slice(batch - count, batch)

    started = time.perf_counter()
    with watching(models, at, with_prompt, options, progress) as seen, torch.no_grad(), suppress(SeenEnough):
        painter.draw(requests)
    if not seen.rows:
        raise ValueError(f"no attention was seen in {seen.steps_seen} steps: give other steps with --at")
    matrices = [
        {"model": name, "module": module, "matrix": index, **row}
        for name, model in models.items()
        for module, mixing in mixings_of(model).items()
        for index, row in enumerate(mixing_figures(mixing))
    ]
    return {
        "rows": seen.rows,
        "layers": summary(seen.rows, ("model", "layer", "kind")),
        "kinds": summary(seen.rows, ("kind",)),
        "mixing": matrices,
        "maps": seen.maps,
        "token_grid": list(seen.token_grid),
        "steps": steps,
        "at": list(at),
        "options": dataclasses.asdict(options),
        "seconds": round(time.perf_counter() - started, 2),
    }


def summary(rows: Sequence[dict], keys: Sequence[str]) -> list[dict]:
    """Mean and deviation of each figure over the rows that agree in `keys`, in order of appearance."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    found = []
    for values, group in groups.items():
        entry = dict(zip(keys, values, strict=True)) | {"matrices": len(group)}
        for name in ("tokens", "rank_bound", "mixing_rank_bound", "threshold", "head_dim"):
            held = sorted({row[name] for row in group if name in row})
            entry[name] = held[0] if len(held) == 1 else held or None
        for name in FIGURES:
            numbers = [row[name] for row in group]
            entry[name] = {
                "mean": statistics.fmean(numbers),
                "std": statistics.stdev(numbers) if len(numbers) > 1 else 0.0,
            }
        entry["ranks"] = {
            value: statistics.fmean(row["ranks"][value] for row in group) for value in group[0]["ranks"]
        }
        entry["negative_mass"] = statistics.fmean(row["entropy_details"]["negative"] for row in group)
        entry["estimated"] = any(row["errors"] for row in group)
        found.append(entry)
    return found
