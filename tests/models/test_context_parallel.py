"""Wan over several processes equals Wan in one: outputs, and gradients summed over the processes."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import parallel_wan
import pytest
import tiny_sana_video
import tiny_wan
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FirstBlockCacheConfig
from diffusers.models._modeling_parallel import TensorParallelConfig
from model_checks import relative
from parallel_wan import CASES

SUPPORT = Path(parallel_wan.__file__).parent
SHRUNK = pytest.mark.filterwarnings("ignore:the token grid holds only")


def found_by(folder: Path, ranks: int, device: str) -> list[dict]:
    """What each process found in every case."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    running = [
        subprocess.Popen(
            [sys.executable, SUPPORT / "parallel_wan.py", str(rank), str(ranks), folder, device],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    said = [process.communicate(timeout=280)[0] for process in running]
    assert all(process.returncode == 0 for process in running), "\n".join(text[-3000:] for text in said)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """`found_by` of a number of processes, each run once."""

    @functools.cache
    def found(ranks: int) -> list[dict]:
        return found_by(tmp_path_factory.mktemp("ranks"), ranks, "cpu")

    return found


@functools.cache
def alone(name: str) -> dict:
    case = CASES[name]._replace(backend="auto")
    return parallel_wan.result_of(parallel_wan.model_of(case), case)


def compare(name: str, shared: list[dict], tolerance: float) -> None:
    expected = alone(name)
    for found in shared:
        assert relative(found[name]["sample"], expected["sample"]) < tolerance
    for key, gradient in expected.items():
        if key != "sample":
            total = sum(found[name][key] for found in shared if key in found[name])
            assert relative(total, gradient) < 10 * tolerance, key


@SHRUNK
@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks in (2, 3) for name in parallel_wan.cases_of(ranks)]
)
def test_processes_compute_what_one_does(shared, ranks, name):
    compare(name, shared(ranks), 1e-5)


def test_a_model_may_be_spread_when_it_is_loaded(shared):
    for found in shared(2):
        assert relative(found["loaded"]["sample"], alone("even")["sample"]) < 1e-5


def test_tokens_that_do_not_divide_are_refused_with_what_to_give(shared):
    for found in shared(2):
        assert found["uneven"].startswith(
            "75 tokens do not divide among 2 processes: give ContextParallelConfig("
        )


def test_a_cache_by_steps_goes_around_the_layers_before_they_are_spread(shared):
    expected = parallel_wan.steps_of(parallel_wan.cached())
    without = parallel_wan.steps_of(parallel_wan.model_of(CASES["even"]))
    assert torch.equal(without[0], expected[0]) and relative(without[1], expected[1]) > 1e-4
    for found in shared(2):
        assert relative(found["cached"], expected) < 1e-5
        first_block, mag = found["caches"]
        assert "decide differently wait for each other for ever: use MagCacheConfig" in first_block
        assert mag.startswith("MagCacheConfig would see") and "before enable_parallelism()" in mag


def test_every_process_gets_the_pipelines_whole_video(shared):
    expected = parallel_wan.video_of(parallel_wan.pipeline())
    for found in shared(2):
        assert found["video"].shape == expected.shape == (1, 5, 3, 32, 48)
        assert relative(found["video"], expected) < 1e-4


@pytest.mark.gpu(2)
@SHRUNK
def test_two_gpus_compute_what_one_process_does(tmp_path):
    shared = found_by(tmp_path, 2, "cuda")
    for name in CASES:
        compare(name, shared, 1e-4)


def with_first_block_cache() -> torch.nn.Module:
    model = tiny_wan.model()
    model.enable_cache(FirstBlockCacheConfig())
    return model


@pytest.fixture
def lone_process(tmp_path):
    """A process group of one: enough for what is refused before anything is sent."""
    dist.init_process_group("cpu:gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "config", "wrong"),
    [
        (
            lambda: tiny_wan.model(mhla_normalizer="official"),
            ContextParallelConfig(ring_degree=2),
            "mhla_normalizer='official' cannot be spread",
        ),
        (
            lambda: tiny_wan.model(mhla_layers="1/2"),
            ContextParallelConfig(ulysses_degree=3),
            "3 processes cannot share the 2 heads of the softmax layers",
        ),
        (
            lambda: tiny_wan.model(mhla_layers="1/2"),
            ContextParallelConfig(ulysses_degree=3, ulysses_anything=True),
            "give ring_degree=3 instead",
        ),
        (
            lambda: tiny_wan.model(mhla_layers="1/2"),
            ContextParallelConfig(ring_degree=2),
            r"takes no part in a ring: call set_attention_backend\('_native_cudnn'\) before this",
        ),
        (
            lambda: tiny_wan.model(mhla_layers=[0], mhla_other_layers="softmax"),
            ContextParallelConfig(ring_degree=2),
            r"the softmax layers \(1, ...\) takes no part in a ring",
        ),
        (lambda: tiny_wan.model(), TensorParallelConfig(tp_degree=2), "is not split by heads"),
        (with_first_block_cache, ContextParallelConfig(ring_degree=2), "First-Block Cache decides"),
        (
            tiny_sana_video.model,
            ContextParallelConfig(ring_degree=2),
            "its feed-forward convolves over the token grid",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused_and_left_as_it_was(lone_process, make, config, wrong):
    model = make()
    with pytest.raises(ValueError, match=wrong):
        model.enable_parallelism(config=config)
    assert model._parallel_config is None
