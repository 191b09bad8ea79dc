"""The metric classes: any batches, any order, several processes, one pass through the network."""

import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torchmetrics import MetricCollection

from mhla_diffusion.evaluation.faults import InsufficientSamples
from mhla_diffusion.evaluation.metrics.accumulators import (
    ClipDiscrepancy,
    FrechetDistance,
    InceptionScore,
    KernelDistance,
    PrecisionRecall,
)
from mhla_diffusion.evaluation.metrics.frechet import frechet_distance
from mhla_diffusion.evaluation.metrics.moments import moments_of
from mhla_diffusion.evaluation.networks.extractors import random_network


def pictures(count: int, seed: int, low: int = 0, high: int = 256) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (count, 3, 20, 24), generator=draw, dtype=torch.uint8)


@pytest.fixture(scope="module")
def extractor():
    return random_network(16, device="cpu")


def everything(extractor) -> MetricCollection:
    return MetricCollection(
        {
            "fd": FrechetDistance(extractor),
            "kid": KernelDistance(extractor, subsets=5, subset_size=20),
            "pr": PrecisionRecall(extractor),
            "cmmd": ClipDiscrepancy(extractor),
            "is": InceptionScore(extractor, tap="pool", splits=2),
        }
    )


def gathered(extractor, real, fake, batch: int, order=None) -> dict:
    metrics = everything(extractor)
    sides = [(part, True) for part in real.split(batch)] + [(part, False) for part in fake.split(batch)]
    for part, side in sides if order is None else [sides[i] for i in order]:
        metrics.update(part, real=side)
    return metrics.compute()


def test_one_pass_serves_all_metrics_and_the_batch_size_changes_nothing(extractor):
    """Cases: FID depended on the batch size."""
    real, fake = pictures(41, 1), pictures(37, 2, 40)
    before = extractor.passes
    whole = gathered(extractor, real, fake, 41)
    assert extractor.passes == before + 2
    for batch in (1, 7):
        found = gathered(extractor, real, fake, batch)
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-9, msg=name)
    mixed = gathered(extractor, real, fake, 20, order=[4, 2, 0, 3, 1][:5])
    torch.testing.assert_close(mixed["fd"], whole["fd"], rtol=1e-5, atol=1e-9)


def test_a_changed_picture_is_not_taken_for_the_last_one(extractor):
    x = pictures(3, 1)
    first = extractor(x)["pool"]
    assert extractor(x)["pool"] is first
    x.fill_(7)
    assert not torch.equal(extractor(x)["pool"], first)
    with torch.inference_mode():
        inside = pictures(3, 1)
        before = extractor.passes
        assert torch.equal(extractor(inside)["pool"], extractor(inside)["pool"])
        assert extractor.passes == before + 2


def test_the_metric_is_the_function_in_float64(extractor):
    real, fake = pictures(50, 3), pictures(50, 4, 100)
    metric = FrechetDistance(extractor)
    metric.update(real, real=True)
    metric.update(fake, real=False)
    expected = frechet_distance(*(moments_of(extractor(side)["pool"]) for side in (real, fake)))
    assert metric.compute().dtype == torch.float64
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-12, atol=0)


def test_torchmetrics_own_metric_agrees_in_float64(extractor):
    from torchmetrics.image.fid import FrechetInceptionDistance

    class RandomWeights(torch.nn.Module):
        num_features = 16

        def forward(self, x):
            return extractor(x)["pool"].double()  # its result has the features' dtype

    real, fake = pictures(60, 5), pictures(70, 6, 30)
    theirs = FrechetInceptionDistance(feature=RandomWeights(), input_img_size=(3, 20, 24))
    theirs.set_dtype(torch.float64)
    ours = FrechetDistance(extractor)
    for side, is_real in ((real, True), (fake, False)):
        for part in side.split(16):
            theirs.update(part, real=is_real)
            ours.update(part, real=is_real)
    torch.testing.assert_close(ours.compute(), theirs.compute().double(), rtol=1e-10, atol=0)


def test_a_set_with_itself_and_floats_with_integers(extractor):
    """Cases: slightly negative distances; floats taken for bytes and the reverse."""
    x, reference = pictures(64, 7), pictures(64, 8, 60)

    def distance(a, b):
        metric = FrechetDistance(extractor)
        metric.update(b, real=True)
        metric.update(a, real=False)
        return metric.compute().item()

    assert 0 <= distance(x, x) < 1e-9
    assert distance(x.float() / 255, reference) == pytest.approx(distance(x, reference), rel=1e-12)
    with pytest.raises(ValueError, match="reach from 0 to 255"):
        distance(x.float(), reference)
    with pytest.raises(InsufficientSamples, match="at least 2 images per side"):
        distance(x[:1], reference[:1])


def test_reset_can_keep_the_reference_and_statistics_can_be_it(extractor):
    real, fake = pictures(30, 9), pictures(30, 10, 90)
    metric = FrechetDistance(extractor, reset_real_features=False)
    metric.update(real, real=True)
    metric.update(fake, real=False)
    value = metric.compute()
    metric.reset()
    metric.update(fake, real=False)
    torch.testing.assert_close(metric.compute(), value, rtol=0, atol=0)
    other = FrechetDistance(extractor)
    other.set_reference(moments_of(extractor(real)["pool"]))
    other.update(fake, real=False)
    torch.testing.assert_close(other.compute(), value, rtol=1e-10, atol=0)
    without_count = moments_of(extractor(real)["pool"])._replace(count=None)
    other.set_reference(without_count)
    torch.testing.assert_close(other.compute(), frechet_distance(without_count, other.moments(real=False)))
    with pytest.raises(ValueError, match="the reference is statistics"):
        other.update(real, real=True)
    other.reset()
    other.update(real, real=True)
    kept = PrecisionRecall(extractor, reset_real_features=False)
    kept.update(real, real=True)
    kept.reset()
    assert len(kept.sides()[0]) == 30
    metric.reset_real_features = True
    metric.reset()
    assert metric.real_moments[0, 0] == 0


def test_forward_merge_and_pickling_keep_the_state_and_not_the_network(extractor):
    real, fake = pictures(30, 11), pictures(30, 12, 90)
    whole, a, b = (FrechetDistance(width=16) for _ in range(3))
    features = {True: extractor(real)["pool"], False: extractor(fake)["pool"]}
    for side, value in features.items():
        whole.update(value, real=side)
        a.update(value[:11], real=side)
        b.update(value[11:], real=side)
    a.merge_state(b)
    torch.testing.assert_close(a.compute(), whole.compute(), rtol=1e-12, atol=0)
    torch.testing.assert_close(pickle.loads(pickle.dumps(whole)).compute(), whole.compute())
    assert FrechetDistance(extractor).state_dict() == {}
    assert FrechetDistance(extractor).clone().extractor is extractor


def test_what_does_not_fit_is_refused(extractor):
    with pytest.raises(ValueError, match="no features 'spatial': it gives pool"):
        FrechetDistance(extractor, tap="spatial")
    with pytest.raises(ValueError, match="give an extractor, or the number"):
        KernelDistance()
    with pytest.raises(ValueError, match="9 features where 16"):
        FrechetDistance(width=16).update(torch.zeros(3, 9), real=True)
    with pytest.raises(ValueError, match="not finite"):
        FrechetDistance(width=2).update(torch.full((3, 2), torch.nan), real=True)
    with pytest.raises(ValueError, match="16 are compared"):
        FrechetDistance(extractor).set_reference(moments_of(torch.randn(5, 3)))
    with pytest.raises(ValueError, match="Unexpected keyword"):
        FrechetDistance(extractor, widht=3)
    with (
        pytest.warns(UserWarning, match="before the ``update``"),
        pytest.raises(ValueError, match="0 samples"),
    ):
        InceptionScore(width=10).compute()


TWO_PROCESSES = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {folder!r})
from test_accumulators import everything, gathered, pictures
from mhla_diffusion.evaluation.metrics.accumulators import ClipScore, FrechetDistance
from mhla_diffusion.evaluation.metrics.moments import moments_of
from mhla_diffusion.evaluation.metrics.clip_score import cosines, estimate
from mhla_diffusion.evaluation.networks.extractors import random_network
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{meeting}", rank=rank, world_size=2)
extractor = random_network(16, device="cpu")
real, fake = pictures(41, 1), pictures(37, 2, 40)
metrics = everything(extractor)
for side, is_real in ((real, True), (fake, False)):
    part = side[rank::2]
    # one process has no reference at all, which must not matter
    part = side if is_real and rank == 0 else part[:0] if is_real else part
    if len(part):
        for chunk in part.split(6):
            metrics.update(chunk, real=is_real)
found = metrics.compute()
against = FrechetDistance(extractor)  # statistics that each process has count once
against.set_reference(moments_of(extractor(real)["pool"]))
against.update(fake[rank::2], real=False)
against = against.compute()
draw = torch.Generator().manual_seed(5)
images, texts = torch.randn(9, 4, generator=draw), torch.randn(9, 4, generator=draw)
captions = ClipScore()
if rank == 0:
    captions.update(images[:5], texts[:5])
captions.update(images[5 + rank :: 2], texts[5 + rank :: 2])
clip = captions.compute()
idle = everything(extractor)  # one process has no picture at all: fewer of them than processes
silent = ClipScore()
if rank == 0:
    silent.update(images, texts)
    for side, is_real in ((real, True), (fake, False)):
        idle.update(side, real=is_real)
idle, silent = idle.compute(), silent.compute()
dist.destroy_process_group()
if rank == 0:
    whole = gathered(extractor, real, torch.cat([fake[0::2], fake[1::2]]), 50)
    for name in whole:
        torch.testing.assert_close(found[name], whole[name], rtol=1e-9, atol=1e-12, msg=name)
    torch.testing.assert_close(against, whole["fd"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(clip.score, estimate(cosines(images, texts)).score, rtol=1e-12, atol=0)
    assert clip.count == silent.count == 9
    alone = gathered(extractor, real, fake, 50)
    for name in alone:
        torch.testing.assert_close(idle[name], alone[name], rtol=1e-9, atol=1e-12, msg=name)
    print("equal")
"""


def test_two_processes_find_what_one_does(tmp_path):
    code = textwrap.dedent(
        TWO_PROCESSES.format(folder=str(Path(__file__).parent), meeting=tmp_path / "meeting")
    )
    commands = [[sys.executable, "-c", code, str(rank)] for rank in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for command in commands]
    outputs = [process.communicate(timeout=200) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert outputs[0][0].strip() == "equal"
