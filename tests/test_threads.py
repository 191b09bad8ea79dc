"""Threads that load, convert and draw at the same time get what each would get alone."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_sana import components, generator, stock_transformer

from mhla_diffusion import convert, load_pipeline, restore
from mhla_diffusion.pipelines.sana import MHLASanaPipeline

CALL = {"height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 8, "output_type": "pt"}


def at_once(*works: Callable) -> list:
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline")
    MHLASanaPipeline(**components(convert(stock_transformer()))).save_pretrained(path)
    return path


def quiet(pipe: MHLASanaPipeline) -> MHLASanaPipeline:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: MHLASanaPipeline, seed: int) -> torch.Tensor:
    return pipe("a red apple", generator=generator(seed), use_resolution_binning=False, **CALL).images


def test_pipelines_load_and_models_convert_at_the_same_time(folder):
    """Loading patches all of PyTorch for its time: without care weights stay on the meta device, for good."""
    alone = quiet(load_pipeline(folder))
    stocks = [stock_transformer() for _ in range(4)]
    ready = [lambda stock=stock: restore(convert(stock, (2, 2))) for stock in stocks]
    ready += [lambda: load_pipeline(folder), lambda: MHLASanaPipeline.from_pretrained(folder)]
    ready += [lambda: type(alone.transformer).from_pretrained(folder / "transformer")]
    *restored, one, two, model = at_once(*ready)
    for made in (*restored, one.text_encoder, two.vae, model, torch.nn.Linear(2, 2)):
        assert not any(parameter.is_meta for parameter in made.parameters())
    expected = draw(alone, 0)
    assert torch.equal(draw(quiet(one), 0), expected) and torch.equal(draw(quiet(two), 0), expected)


def test_pipelines_draw_at_the_same_time_also_with_one_transformer(folder):
    """Each thread has its own pipeline and scheduler, whose state is one drawing's; the networks may be shared."""
    first = quiet(load_pipeline(folder))
    expected = [draw(first, seed) for seed in range(3)]
    shared = []
    for _ in range(3):
        own = {"scheduler": type(first.scheduler).from_config(first.scheduler.config)}
        shared.append(quiet(MHLASanaPipeline(**(first.components | own))))
    drawn = at_once(*[lambda seed=seed: draw(shared[seed], seed) for seed in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))
