"""Wan over several processes: the cases, and the program that each process runs.

    python parallel_wan.py RANK RANKS FOLDER cpu|cuda

writes `rank-R.pt` into the folder: for each case the output and, if it trains, the loss's gradients of this process.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import tiny_wan
import tiny_wan_pipeline
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FirstBlockCacheConfig, MagCacheConfig
from model_checks import stirred

from mhla_diffusion.models.wan import MHLAWanTransformer3DModel
from mhla_diffusion.pipelines.wan import MHLAWanPipeline

EVERYTHING = {**tiny_wan.EVERYTHING, "mhla_norm_projected": False}


class Case(NamedTuple):
    """A tiny model, latents, and a `ContextParallelConfig` for a number of processes."""

    options: dict
    config: dict
    size: tuple[int, int, int] = tiny_wan.LATENTS
    token_timesteps: bool = False
    backward: bool = False
    backend: str = "auto"
    compiled: bool = False


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
    "compiled": Case(EVERYTHING, {"kind": "ring", "anything": True}, size=RAGGED, compiled=True),
}


UNEVEN = Case({}, RING, size=(5, 10, 6))  # 75 tokens, in a configuration that wants equal shares
# Three processes: what is slow under Triton's interpreter or to compile has been seen with two.
FOR_THREE = ("divided", "ragged", "one frame", "hybrid", "ragged hybrid")


def cases_of(ranks: int) -> dict[str, Case]:
    return {name: case for name, case in CASES.items() if ranks == 2 or name in FOR_THREE}


def model_of(case: Case) -> torch.nn.Module:
    model = stirred(tiny_wan.model(**case.options))
    model.set_mhla_backend(case.backend)
    return model


def inputs_of(case: Case) -> dict:
    inputs = tiny_wan.transformer_inputs(size=case.size)
    if case.token_timesteps:
        frames, rows, columns = case.size
        tokens = frames * (rows // 2) * (columns // 2)
        inputs["timestep"] = torch.arange(2.0 * tokens).view(2, tokens)
    return inputs


def result_of(model: torch.nn.Module, case: Case, device: str = "cpu") -> dict:
    """Output, and the gradients of a loss that weighs every element differently."""
    model.to(device)
    inputs = {name: x.to(device) for name, x in inputs_of(case).items()}
    if not case.backward:
        with torch.no_grad():
            return {"sample": model(**inputs).sample.cpu()}
    sample = model(**inputs).sample
    weights = torch.randn(sample.shape, generator=torch.Generator().manual_seed(3)).to(device)
    (sample * weights).sum().backward()
    gradients = {name: x.grad.cpu() for name, x in model.named_parameters() if x.grad is not None}
    return {"sample": sample.detach().cpu(), **gradients}


def config_of(case: Case, ranks: int) -> ContextParallelConfig:
    kind = case.config["kind"]
    options = {f"{kind}_degree": ranks, f"{kind}_anything": case.config.get("anything", False)}
    return ContextParallelConfig(**options)


def video_of(pipe) -> torch.Tensor:
    """A clip of a whole pipeline, with guidance."""
    arguments = {
        "height": 32,
        "width": 48,
        "num_frames": 5,
        "num_inference_steps": 2,
        "max_sequence_length": 8,
    }
    draw = torch.Generator().manual_seed(4)
    frames = pipe(
        "a red apple", "blue", generator=draw, guidance_scale=3.0, output_type="pt", **arguments
    ).frames
    return frames.cpu()


def pipeline() -> MHLAWanPipeline:
    transformer = stirred(tiny_wan.model(**EVERYTHING))
    pipe = MHLAWanPipeline(**tiny_wan_pipeline.components(transformer))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def cache_results(model: torch.nn.Module) -> list[str]:
    """What is said of each cache on a model that is spread already."""
    said = []
    for cache in (FirstBlockCacheConfig(), MagCacheConfig(mag_ratios=[1.0] * 4, num_inference_steps=4)):
        try:
            model.enable_cache(cache)
        except ValueError as error:
            said.append(str(error))
    return said


def steps_of(model: torch.nn.Module) -> torch.Tensor:
    """Two steps of a model with a cache, which takes what most layers add in the second one from the first."""
    with torch.no_grad(), model.cache_context("steps"):
        inputs = [tiny_wan.transformer_inputs(seed=step) for step in (0, 1)]
        return torch.stack([model(**each).sample for each in inputs])


def cached() -> torch.nn.Module:
    model = model_of(CASES["even"])
    ratios = {"mag_ratios": [1.0] * 4, "retention_ratio": 0.1, "num_inference_steps": 4}
    model.enable_cache(MagCacheConfig(threshold=1.0, **ratios))
    return model


def loaded(folder: Path, ranks: int, device: str) -> torch.nn.Module:
    """A model that is spread when it is loaded."""
    case = CASES["even"]
    model_of(case).save_pretrained(folder)
    return MHLAWanTransformer3DModel.from_pretrained(folder, parallel_config=config_of(case, ranks)).to(
        device
    )


def main(rank: int, ranks: int, folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    # Named with its device: Diffusers looks for "cpu" there before it sends the sizes of uneven shares.
    backend = "cpu:gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    results = {}
    for name, case in cases_of(ranks).items():
        model = model_of(case).to(device)
        model.enable_parallelism(config=config_of(case, ranks))
        if case.compiled:
            model.compile_repeated_blocks(fullgraph=True, dynamic=False, backend="aot_eager")
        results[name] = result_of(model, case, device)
    if ranks == 2:
        model = model_of(UNEVEN).to(device)
        model.enable_parallelism(config=config_of(UNEVEN, ranks))
        try:
            result_of(model, UNEVEN, device)
        except ValueError as error:
            results["uneven"] = str(error)
        results["caches"] = cache_results(model)
        results["loaded"] = result_of(loaded(folder / f"rank-{rank}", ranks, device), CASES["even"], device)
        if device == "cpu":
            model = cached()
            model.enable_parallelism(config=config_of(CASES["even"], ranks))
            results["cached"] = steps_of(model)
        pipe = pipeline().to(device)
        pipe.transformer.enable_parallelism(config=config_of(CASES["even"], ranks))
        results["video"] = video_of(pipe)
    torch.save(results, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
