"""One reading for several networks: each picture is decoded once, and every result is the one that it has alone."""

import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mhla_diffusion.evaluation import decoding, passes
from mhla_diffusion.evaluation.gathering import gather
from mhla_diffusion.evaluation.image_protocols import PROTOCOLS
from mhla_diffusion.evaluation.image_scores import score, scoring
from mhla_diffusion.evaluation.kept import Kept
from mhla_diffusion.evaluation.networks.extractors import efficientnet, random_network
from mhla_diffusion.evaluation.passes import Look, Reader, Rows
from mhla_diffusion.evaluation.picture_sets import open_pictures

METRICS = ("fd", "kid", "precision", "recall")


@pytest.fixture
def folders(tmp_path):
    draw = np.random.default_rng(0)
    for name, count in (("samples", 11), ("real", 9)):
        (tmp_path / name).mkdir()
        for index in range(count):
            size = (24, 20 + 4 * (index % 3 == 0), 3)
            Image.fromarray(draw.integers(0, 256, size, dtype=np.uint8)).save(
                tmp_path / name / f"{index:02}.png"
            )
    return tmp_path


@pytest.fixture
def decoded(monkeypatch):
    """Names of the pictures that were decoded, in order."""
    names, decode = [], decoding.decode

    def counting(file, background):
        names.append(f"{file.parent.name}/{file.name}")
        return decode(file, background)

    monkeypatch.setattr(decoding, "decode", counting)
    return names


def sets_of(folder):
    return [open_pictures(folder / name, mixed_sizes=True) for name in ("samples", "real")]


def networks() -> dict:
    return {"small": random_network(16, seed=1, device="cpu"), "large": random_network(64, device="cpu")}


def scorings_of(sets, extractors, **options) -> dict:
    how = {"metrics": METRICS, "batch_size": 4, **options}
    return {
        name: scoring(*sets, PROTOCOLS["smoke"], extractor=each, **how) for name, each in extractors.items()
    }


def numbers(result: dict) -> dict:
    """Everything but times."""
    return {name: value for name, value in result.items() if name != "timings"}


@pytest.mark.parametrize("workers", [0, 2])
def test_several_networks_share_a_reading_and_find_what_each_finds_alone(folders, decoded, workers):
    extractors = networks() | {"efficientnet": efficientnet(device="cpu")}
    expected = {
        name: score(*sets_of(folders), PROTOCOLS["smoke"], extractor=each, metrics=METRICS, batch_size=4)
        for name, each in extractors.items()
    }
    every = decoded[:20]
    assert len(decoded) == 3 * 20 and len(set(every)) == 20
    decoded.clear()
    told = []
    reader = Reader(workers, progress=told.append, expect=lambda count: told.append(-count))
    found = dict(reader.run(scorings_of(sets_of(folders), extractors)))
    assert {name: numbers(each) for name, each in found.items()} == {
        name: numbers(each) for name, each in expected.items()
    }
    assert decoded == ([] if workers else every)  # by other processes
    assert told[0] == -20 and sum(told) == 0 and reader.seconds.keys() == found.keys()


def test_no_batch_is_kept_so_that_memory_does_not_grow_with_the_set(folders):
    shown, most = [], []

    def find(batch, first):
        shown.append(weakref.ref(batch))
        most.append(len({id(each()) for each in shown if each() is not None}))
        return {"first": [first] * len(batch)}

    pictures = open_pictures(folders / "samples", mixed_sizes=True)
    looks = [Look(pictures, Rows(find), 2), Look(pictures, Rows(find), 2)]

    def looking(look):
        yield [look]
        return {"found": look.rows["first"]}

    found = dict(Reader().run({str(index): looking(look) for index, look in enumerate(looks)}))
    assert found["0"]["found"] == found["1"]["found"] and len(found["0"]["found"]) == 11
    assert max(most) <= 2  # the one that is shown, and the one before it
    moments = gather(pictures, random_network(8, device="cpu"), moments={"pool"}, batch_size=2)
    assert moments.state()["rows"] == {} and moments.state()["moments"]["pool"].shape == (10, 8)


def test_sets_that_are_read_differently_are_not_shared(folders, decoded):
    sets, extractors = sets_of(folders), networks()
    on_white = open_pictures(folders / "samples", mixed_sizes=True, background="white")
    scorings = scorings_of(sets, {"small": extractors["small"]})
    scorings |= scorings_of([on_white, sets[1]], {"large": extractors["large"]})
    found = dict(Reader().run(scorings))
    assert found["large"]["inputs"]["samples"]["background"] == "white"
    assert len(decoded) == 11 + 11 + 9
    decoded.clear()
    scorings = scorings_of(sets, {"small": extractors["small"]})
    scorings |= scorings_of(sets, {"large": extractors["large"]}, batch_size=3)  # sums round in another order
    dict(Reader().run(scorings))
    assert len(decoded) == 2 * 20


class Broken:
    """A network that fails in its second batch."""

    def __init__(self, extractor):
        self.extractor, self.calls = extractor, 0

    def __getattr__(self, name):
        return getattr(self.extractor, name)

    def __call__(self, batch):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("out of memory")
        return self.extractor(batch)


def test_a_network_that_fails_costs_the_others_nothing(folders, decoded):
    extractors = networks()
    alone = score(
        *sets_of(folders), PROTOCOLS["smoke"], extractor=extractors["large"], metrics=METRICS, batch_size=4
    )
    decoded.clear()
    broken = Broken(extractors["small"])
    pair = {"small": broken, "large": extractors["large"]}
    found = dict(Reader(faults=(RuntimeError,)).run(scorings_of(sets_of(folders), pair)))
    assert str(found["small"]) == "out of memory" and broken.calls == 2
    assert numbers(found["large"]) == numbers(alone) and len(decoded) == 20
    decoded.clear()
    broken.calls = 0
    found = dict(Reader(faults=(RuntimeError,)).run(scorings_of(sets_of(folders), {"small": broken})))
    assert list(found) == ["small"] and len(decoded) < 11  # nobody looks any longer
    broken.calls = 0
    with pytest.raises(RuntimeError, match="out of memory"):
        dict(Reader(faults=(ValueError,)).run(scorings_of(sets_of(folders), {"small": broken})))


def test_a_picture_that_cannot_be_read_costs_those_that_look_at_it(folders):
    (folders / "real" / "07.png").write_bytes(b"no picture")
    samples, real = sets_of(folders)
    network = networks()["small"]

    def looking():
        look = Look(samples, Rows(lambda batch, first: {"n": [len(batch)]}), 4)
        yield [look]
        return {"pictures": sum(look.rows["n"])}

    scorings = scorings_of([samples, real], {"small": network}) | {"alone": looking()}
    found = dict(Reader(faults=(ValueError,)).run(scorings))
    assert "07.png: cannot be read" in str(found["small"]) and found["alone"] == {"pictures": 11}


def interrupted_after(count: int):
    """A callback of progress that is pressed Ctrl-C at after so many pictures."""
    seen = []

    def progress(number: int) -> None:
        seen.append(number)
        if sum(seen) >= count:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("after", [4, 9, 11, 16, 20])
def test_a_pass_goes_on_where_it_broke_off(folders, decoded, monkeypatch, after):
    monkeypatch.setattr(passes, "EVERY", 0.0)
    monkeypatch.setattr(passes, "SHARE", 0)
    extractors = networks()
    expected = dict(Reader().run(scorings_of(sets_of(folders), extractors)))
    every = list(decoded)
    told = []
    kept = Kept(folders / "kept", {"seed": 1}, told.append)
    with pytest.raises(KeyboardInterrupt):
        dict(
            Reader(progress=interrupted_after(after), kept=kept).run(
                scorings_of(sets_of(folders), extractors)
            )
        )
    decoded.clear()
    reader = Reader(kept=kept)
    found = dict(reader.run(scorings_of(sets_of(folders), extractors)))
    assert {name: numbers(each) for name, each in found.items()} == {
        name: numbers(each) for name, each in expected.items()
    }
    # Batches of four, which pictures of two sizes cut further; what was shown after the last whole one is shown again.
    assert decoded == every[reader.resumed :] and after - 8 < reader.resumed <= after
    assert len(told) == (reader.resumed > 0) + (reader.resumed > 11)
    decoded.clear()
    assert dict(Reader(kept=kept).run(scorings_of(sets_of(folders), extractors)))["small"]["values"]
    assert decoded == []  # all of it is there now
    dict(Reader(kept=Kept(folders / "kept", {"seed": 2})).run(scorings_of(sets_of(folders), extractors)))
    assert decoded == every


def test_what_is_kept_is_whole_or_not_there(tmp_path):
    told = []
    kept = Kept(tmp_path / "kept", {"seed": 1, "device": "cpu"}, told.append)
    assert kept.read("a.pt") is None and kept.read("a.json") is None and not (tmp_path / "kept").exists()
    state = {"sizes": {(4, 3): 2}, "rows": torch.arange(3), "verdicts": [(True, ("why",), 0.5, None)]}
    kept.write("a.pt", state)
    kept.write("a.json", {"fd": 0.1})
    again = Kept(tmp_path / "kept", {"device": "cpu", "seed": 1}, told.append)
    found = again.read("a.pt")
    assert found["sizes"] == state["sizes"] and found["verdicts"] == state["verdicts"]
    assert torch.equal(found["rows"], state["rows"]) and again.read("a.json") == {"fd": 0.1}
    other = Kept(tmp_path / "kept", {"seed": 2, "device": "cpu"}, told.append)
    assert other.read("a.json") is None and other.others() == ["seed"] and again.others() == []
    for name in ("a.pt", "a.json"):
        (kept.folder / name).write_bytes(b"{broken")
        assert kept.read(name) is None and f"{name} cannot be read" in told.pop()
    (tmp_path / "file").write_text("")
    full = Kept(tmp_path / "file", {}, told.append)
    full.write("a.json", 1)
    full.write("b.json", 1)
    assert len(told) == 1 and "nothing more is kept, should this run break off" in told[0]


TWO_PROCESSES = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {folder!r})
from pathlib import Path
from test_passes import METRICS, networks, score, sets_of, PROTOCOLS
from mhla_diffusion.evaluation import decoding
from mhla_diffusion.evaluation.metrics.accumulators import FrechetDistance
rank, decoded, decode = int(sys.argv[1]), [], decoding.decode
decoding.decode = lambda file, background: decoded.append(file) or decode(file, background)
dist.init_process_group("gloo", init_method="file://{meeting}", rank=rank, world_size=2)
folder, extractors = Path({pictures!r}), networks()
metrics = {{name: FrechetDistance(each) for name, each in extractors.items()}}
for pictures, real in zip(sets_of(folder), (False, True), strict=True):
    for batch in pictures.batches(4, start=rank, step=2):
        for metric in metrics.values():
            metric.update(batch, real=real)
found = {{name: metric.compute() for name, metric in metrics.items()}}
assert len(decoded) == len(set(decoded)) == (11 - rank + 1) // 2 + (9 - rank + 1) // 2
dist.destroy_process_group()
if rank == 0:
    for name, each in extractors.items():
        whole = score(*sets_of(folder), PROTOCOLS["smoke"], extractor=each, metrics=("fd",), batch_size=4)
        assert abs(float(found[name]) / whole["values"]["fd"]["unclamped"] - 1) < 1e-5, name
    print("equal")
"""


def test_two_processes_share_the_pictures_and_each_its_reading(folders):
    code = TWO_PROCESSES.format(
        folder=str(Path(__file__).parent), meeting=folders / "meeting", pictures=str(folders)
    )
    commands = [[sys.executable, "-c", code, str(rank)] for rank in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for command in commands]
    outputs = [process.communicate(timeout=200) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert outputs[0][0].strip() == "equal"
