"""Wan over several processes: the cases, and the program that each process runs.

    python parallel_wan.py RANK RANKS FOLDER

writes `rank-R.pt` into the folder: for each case the output and, if it trains, the loss's gradients of this process.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import tiny_wan
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

EVERYTHING = {**tiny_wan.EVERYTHING, "mhla_norm_projected": False}


class Case(NamedTuple):
    """A tiny model, latents, and a `ContextParallelConfig` for a number of processes."""

    options: dict
    config: dict
    size: tuple[int, int, int] = tiny_wan.LATENTS
    token_timesteps: bool = False
    backward: bool = False
    backend: str = "auto"


RING, ULYSSES = {"kind": "ring"}, {"kind": "ulysses"}
RAGGED = (5, 14, 10)  # a token grid of 5 x 7 x 5 = 175: neither 2 nor 3 divides it
CASES = {
    "even": Case({}, RING, backward=True),
    "divided": Case({"mhla_normalizer": "paper"}, ULYSSES, backward=True),
    "kernels": Case({"mhla_normalizer": "paper"}, RING, backward=True, backend="triton"),
    "ragged": Case(EVERYTHING, {"kind": "ring", "anything": True}, size=RAGGED, backward=True),
    "ragged kernels": Case(EVERYTHING, {"kind": "ulysses", "anything": True}, size=RAGGED, backend="triton"),
    "one frame": Case(EVERYTHING, RING, size=(1, 8, 12), backward=True),
    "hybrid": Case(
        {"mhla_layers": "1/2", "num_layers": 2, "num_attention_heads": 6, "attention_head_dim": 12},
        ULYSSES,
        backward=True,
    ),
    "ragged hybrid": Case(
        {"mhla_layers": "1/2", "num_attention_heads": 5}, {"kind": "ulysses", "anything": True}, size=RAGGED
    ),
    "softmax twin": Case(
        {**EVERYTHING, "mhla_layers": [0], "mhla_other_layers": "softmax", "num_attention_heads": 6}, ULYSSES
    ),
    "timesteps of tokens": Case({}, RING, token_timesteps=True),
}


def model_of(case: Case) -> torch.nn.Module:
    model = tiny_wan.stirred(tiny_wan.model(**case.options))
    model.set_mhla_backend(case.backend)
    return model


def inputs_of(case: Case) -> dict:
    inputs = tiny_wan.transformer_inputs(size=case.size)
    if case.token_timesteps:
        frames, rows, columns = case.size
        tokens = frames * (rows // 2) * (columns // 2)
        inputs["timestep"] = torch.arange(2.0 * tokens).view(2, tokens)
    return inputs


def result_of(model: torch.nn.Module, case: Case) -> dict:
    """Output, and the gradients of a loss that weighs every element differently."""
    inputs = inputs_of(case)
    if not case.backward:
        with torch.no_grad():
            return {"sample": model(**inputs).sample}
    sample = model(**inputs).sample
    weights = torch.randn(sample.shape, generator=torch.Generator().manual_seed(3))
    (sample * weights).sum().backward()
    return {
        "sample": sample.detach(),
        **{name: x.grad for name, x in model.named_parameters() if x.grad is not None},
    }


def config_of(case: Case, ranks: int) -> ContextParallelConfig:
    kind = case.config["kind"]
    options = {f"{kind}_degree": ranks, f"{kind}_anything": case.config.get("anything", False)}
    return ContextParallelConfig(**options)


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    # Named with its device: Diffusers looks for "cpu" there before it sends the sizes of uneven shares.
    dist.init_process_group("cpu:gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    results = {}
    for name, case in CASES.items():
        model = model_of(case)
        model.enable_parallelism(config=config_of(case, ranks))
        results[name] = result_of(model, case)
    torch.save(results, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
