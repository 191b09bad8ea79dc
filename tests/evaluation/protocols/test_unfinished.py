"""Runs that break off: what they leave, who takes it up, and that a picture is read once for all parts."""

import contextlib
import dataclasses
import errno
import io
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import tiny_clip
from PIL import Image
from protocol_files import protocol, result

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation import decoding, image_scores, kept, passes
from mhla_diffusion.evaluation.protocols import runner, unfinished
from mhla_diffusion.evaluation.protocols.files import load_protocol
from mhla_diffusion.evaluation.protocols.inputs import Inputs
from mhla_diffusion.pipelines.pictures import save_picture, write_atomically
from mhla_diffusion.pipelines.videos import save_video

THREE = (
    "samples: {kind: pictures}\nreference: {kind: pictures}\nparts:\n"
    "- {scorer: fd_efficientnet, metrics: [fd]}\n- {scorer: smoke}\n- {scorer: clip_score}\n"
)
TWO = THREE.replace("- {scorer: fd_efficientnet, metrics: [fd]}\n", "")  # of no network that takes its time


@pytest.fixture(autouse=True)
def kept_after_every_batch(monkeypatch):
    monkeypatch.delenv("MHLA_WEIGHTS", raising=False)
    monkeypatch.delenv("MHLA_PROTOCOLS", raising=False)
    monkeypatch.setattr(passes, "EVERY", 0.0)
    monkeypatch.setattr(passes, "SHARE", 0)


@pytest.fixture
def folders(tmp_path):
    draw = np.random.default_rng(0)
    for name, count in (("samples", 10), ("real", 8)):
        (tmp_path / name).mkdir()
        for index in range(count):
            picture = Image.fromarray(draw.integers(0, 256, (24, 24, 3), dtype=np.uint8))
            save_picture(picture, tmp_path / name / f"{index}.png", {"prompt": "a cat"}, beside=False)
    tiny_clip.open_clip_folder(tmp_path / "clip", tiny_clip.open_clip_network())
    return tmp_path


class Decoder:
    """Stands in for `decode`: notes what is decoded, and calls `then` before picture number `at`."""

    def __init__(self, monkeypatch):
        self.names, self.decode, self.at, self.then = [], decoding.decode, None, None
        monkeypatch.setattr(decoding, "decode", self)

    def __call__(self, file, background):
        self.names.append(f"{file.parent.name}/{file.name}")
        if len(self.names) == self.at:
            self.then()
        return self.decode(file, background)

    def breaks_at(self, number, then):
        self.names, self.at, self.then = [], number, then


def interrupt():
    raise KeyboardInterrupt


@pytest.fixture
def decoder(monkeypatch):
    return Decoder(monkeypatch)


def run(folder, *more, text: str = THREE) -> int:
    return main(["eval", "run", "--protocol", protocol(folder, text), *words_of(folder), *map(str, more)])


def words_of(folder) -> list[str]:
    return ["--samples", str(folder / "samples"), "--reference", str(folder / "real"), "--out", str(folder / "out"),
            "--device", "cpu", "--batch-size", "3", "--weights", f"clip={folder / 'clip'}"]  # fmt: skip


def numbers(found: dict) -> dict:
    """A result without its times and what it was put together from."""
    parts = {name: without_times(part) for name, part in found["parts"].items()}
    return without_times(found) | {"parts": parts}


def without_times(found: dict) -> dict:
    return {name: value for name, value in found.items() if name not in ("timings", "seconds")}


def kept_in(folder) -> list[str]:
    return sorted(path.suffix for path in (folder / "out" / "unfinished").glob("*/*"))


def test_all_networks_of_a_protocol_share_one_reading(folders, decoder):
    whole = load_protocol(protocol(folders, THREE))
    told = []

    def parts_of(parts) -> dict:
        """Results of a run of some parts."""
        reference = str(folders / "real") if parts[0].scorer != "clip_score" else None
        inputs = Inputs(str(folders / "samples"), reference, device="cpu", batch_size=3, out=folders / "out")
        if parts[-1].scorer == "clip_score":
            inputs.weights = {"clip": str(folders / "clip")}
        inputs.expect, inputs.progress = told.append, lambda count: told.append(-count)
        found, status = runner.run(dataclasses.replace(whole, parts=tuple(parts)), inputs)
        assert status == 0 and not (folders / "out").exists()  # nothing is kept unless it is asked for
        return {name: without_times(part) for name, part in found["parts"].items()}

    together = parts_of(whole.parts)
    first, *others = decoder.names  # which says of what size the samples are
    assert first == "samples/0.png"
    assert others == [f"samples/{i}.png" for i in range(10)] + [f"real/{i}.png" for i in range(8)]
    assert told[0] == 18 and sum(told) == 0
    for part in whole.parts:
        assert parts_of([part]) == {part.scorer: together[part.scorer]}


@pytest.mark.parametrize("at", [6, 13, 18])
def test_an_interrupted_run_goes_on_and_ends_the_same(folders, decoder, capsys, at):
    assert run(folders) == 0
    expected = result(folders)
    assert not (folders / "out" / "unfinished").exists() and "taken_up" not in expected["timings"]
    shutil.rmtree(folders / "out")
    decoder.breaks_at(1 + at, interrupt)
    assert run(folders) == 130
    assert "unfinished keeps what is finished: the same command goes on" in capsys.readouterr().err
    assert not (folders / "out" / "result.json").exists() and kept_in(folders)
    decoder.breaks_at(None, None)
    assert run(folders) == 0
    assert "taken up of an unfinished run: " in capsys.readouterr().err
    found = result(folders)
    assert numbers(found) == numbers(expected)
    again = found["timings"]["taken_up"]["pictures"]
    assert (
        at - 3 <= again < at and len(decoder.names) == 1 + 18 - again + 10
    )  # the first one's size, and the grid
    assert sorted(path.name for path in (folders / "out").iterdir()) == [
        "grid.png",
        "result.json",
        "result.md",
    ]


def test_a_killed_run_leaves_nothing_half_written(folders, decoder, capsys):
    assert run(folders) == 0
    expected = result(folders)
    shutil.rmtree(folders / "out")
    code = (
        "import os, signal, sys\n"
        "from mhla_diffusion.cli import main\n"
        "from mhla_diffusion.evaluation import decoding, passes\n"
        "passes.EVERY, passes.SHARE, count, decode = 0.0, 0, [], decoding.decode\n"
        "def killed(file, background):\n"
        "    count.append(file)\n"
        "    if len(count) == 9:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return decode(file, background)\n"
        "decoding.decode = killed\n"
        "main(sys.argv[1:])\n"
    )
    line = ["eval", "run", "--protocol", protocol(folders, THREE), *words_of(folders)]
    ended = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, timeout=200)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert kept_in(folders) == [".json", ".pt"]
    assert run(folders) == 0 and "6 of 10 pictures" in capsys.readouterr().err
    assert numbers(result(folders)) == numbers(expected)


class Refusing(io.BytesIO):
    """A file that takes a few bytes, and then raises."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def write(self, data):
        if self.tell() + len(data) > 1000:
            raise self.fault
        return super().write(data)


@pytest.fixture
def refusing(monkeypatch):
    """Makes every file of a name's end raise while it is written."""

    def refuse(ending, fault):
        def write(path, write, whole=write_atomically):
            return write(Refusing(fault)) if path.name.endswith(ending) else whole(path, write)

        monkeypatch.setattr(kept, "write_atomically", write)
        monkeypatch.setattr(image_scores, "write_atomically", write)

    return refuse


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_without_room_for_what_is_kept_costs_no_numbers(folders, refusing, capsys):
    assert run(folders, text=TWO) == 0
    expected = result(folders)
    refusing(".pt", FULL)  # of which torch says "unexpected pos"
    assert run(folders, text=TWO) == 0
    said = "nothing more is kept, should this run break off: "
    err = capsys.readouterr().err
    assert err.count(said) == 1 and "cannot be written (No space left on device)" in err
    assert numbers(result(folders)) == numbers(expected)


def test_ctrl_c_while_something_is_kept_is_one(folders, refusing, capsys):
    refusing(".pt", KeyboardInterrupt())
    assert run(folders, text=TWO) == 130
    assert "failed" not in capsys.readouterr().err


def test_ctrl_c_that_a_library_turns_into_a_fault_is_one(folders, decoder, capsys):
    """As torch does while it makes a tensor, and processes that die of the same Ctrl-C."""

    def swallowed():
        with contextlib.suppress(KeyboardInterrupt):
            interrupt_by_signal()
        raise RuntimeError("could not determine the shape of object type")

    def interrupt_by_signal():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler is called between two lines
            pass

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        decoder.breaks_at(8, swallowed)
        assert run(folders, text=TWO) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "failed" not in capsys.readouterr().err
    decoder.breaks_at(3, lambda: fail("out of memory"))  # of the samples, which all parts read
    assert run(folders, text=TWO) == 2  # a fault of its own, in a line
    assert capsys.readouterr().err.endswith("mhla: out of memory\n")


def fail(why):
    raise RuntimeError(why)


def test_numbers_are_told_before_they_are_written(folders, refusing, capsys):
    refusing("result.json", FULL)
    assert run(folders, text=TWO) == 2
    out, err = capsys.readouterr()
    assert "precision" in out and "clip_score" in out and "written" not in out
    assert err.endswith(
        "result.json cannot be written (No space left on device): make room for it and run the same again\n"
    )
    refusing("nothing", FULL)
    assert run(folders, text=TWO) == 0  # and not computed again
    assert result(folders)["timings"]["taken_up"]["parts"] == ["smoke", "clip_score"]


def test_a_file_that_a_power_cut_left_empty_is_passed_over(folders, decoder, capsys):
    decoder.breaks_at(15, interrupt)
    assert run(folders, text=TWO) == 130
    (decides,) = (folders / "out" / "unfinished").glob("*/decides.json")
    decides.write_text("")
    (decides.parent / "smoke.json").write_text("")
    decoder.breaks_at(None, None)
    assert run(folders, "--seed", 3, text=TWO) == 0
    assert "is of a run with other" not in capsys.readouterr().err


def test_metrics_that_are_there_are_not_computed_again(folders, decoder, monkeypatch, capsys):
    """Precision of 50,000 pictures takes minutes after all of them were read."""
    computed, precision_recall = [], image_scores.precision_recall

    def interrupted(*args, **options):
        computed.append(options)
        if len(computed) == 1:
            raise KeyboardInterrupt
        return precision_recall(*args, **options)

    monkeypatch.setattr(image_scores, "precision_recall", interrupted)
    assert run(folders) == 130
    decoder.breaks_at(None, None)
    assert run(folders) == 0 and len(computed) == 2
    err = capsys.readouterr().err
    assert "taken up of an unfinished run: fd_efficientnet\n" in err and "8 of 8 pictures" in err
    assert result(folders)["timings"]["taken_up"] == {"parts": ["fd_efficientnet"], "pictures": 18}
    assert len(decoder.names) == 1 + 10  # the first one's size, and the grid


def changed_picture(folder):
    """Other pixels in as many bytes: noise is stored as it is."""
    path = folder / "samples" / "9.png"
    size = path.stat().st_size
    pixels = np.asarray(Image.open(path)).copy()
    pixels[0, 0] ^= 1
    save_picture(Image.fromarray(pixels), path, {"prompt": "a cat"}, beside=False)
    assert path.stat().st_size == size


def other_weights(folder):
    shutil.rmtree(folder / "clip")
    tiny_clip.open_clip_folder(folder / "clip", tiny_clip.open_clip_network(seed=1))


@pytest.mark.parametrize(
    ("change", "words", "told"),
    [
        (changed_picture, [], "samples"),
        (other_weights, [], "weights"),
        (None, ["--seed", 3], "seed"),
        (None, ["--batch-size", 4], "batch size"),
        (None, ["--limit", 8], "limit, samples"),
        (lambda folder: (folder / "real" / "7.png").unlink(), [], "reference"),
        (lambda folder: None, ["--fresh"], None),
    ],
)
def test_what_is_of_other_files_or_settings_is_not_taken_up(folders, decoder, capsys, change, words, told):
    decoder.breaks_at(15, interrupt)
    assert run(folders, text=TWO) == 130
    if change:
        change(folders)
    capsys.readouterr()
    decoder.breaks_at(None, None)
    assert run(folders, *words, text=TWO) == 0
    err = capsys.readouterr().err
    assert "taken up of" not in err and "taken_up" not in result(folders)["timings"]
    if told:
        assert f"unfinished is of a run with other {told}: nothing of it is taken up" in err
    assert not (folders / "out" / "unfinished").exists()


def test_what_cannot_be_read_is_not_kept(folders, decoder, capsys):
    """As a link whose picture is gone: nothing tells whether the next run has the same ones."""
    (folders / "real" / "7.png").unlink()
    (folders / "real" / "7.png").symlink_to(folders / "nothing.png")
    assert run(folders, text=TWO) == 4
    out, err = capsys.readouterr()
    assert "nothing is kept, should this run break off: " in err and "smoke failed" in err
    assert "keeps the parts" not in out and not (folders / "out" / "unfinished").exists()


def test_other_releases_take_nothing_up(folders, decoder, monkeypatch, capsys):
    decoder.breaks_at(15, interrupt)
    assert run(folders, text=TWO) == 130
    decoder.breaks_at(None, None)
    monkeypatch.setattr(unfinished, "versions", lambda names: {"torch": "99.0"})
    assert run(folders, text=TWO) == 0
    assert "is of a run with other versions" in capsys.readouterr().err


def test_another_state_of_the_checkout_takes_nothing_up(folders, decoder, monkeypatch, capsys):
    decoder.breaks_at(15, interrupt)
    assert run(folders, text=TWO) == 130
    decoder.breaks_at(None, None)
    own = unfinished.program()
    assert len(own) == 64
    monkeypatch.setattr(unfinished, "program", lambda: own[::-1])
    assert run(folders, text=TWO) == 0
    assert "is of a run with other program:" in capsys.readouterr().err


def test_the_same_command_computes_a_part_that_failed(folders, decoder, monkeypatch, capsys):
    """As when a GPU had no memory left for a moment."""
    from mhla_diffusion.evaluation.networks.image_text import ImageTextModel

    encode = ImageTextModel.encode_images

    def fails(self, images):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ImageTextModel, "encode_images", fails)
    assert run(folders) == 4
    out, err = capsys.readouterr()
    assert "clip_score failed: out of memory" in err and "the same command computes only the others" in out
    assert result(folders)["failed"] == {"clip_score": "out of memory"}
    monkeypatch.setattr(ImageTextModel, "encode_images", encode)
    decoder.breaks_at(None, None)
    assert run(folders) == 0
    found = result(folders)
    assert found["timings"]["taken_up"]["parts"] == ["fd_efficientnet", "smoke"]
    assert (
        set(found["values"]) >= {"fd", "precision", "clip_score"}
        and list(found["parts"])[0] == "fd_efficientnet"
    )
    assert not any(name.startswith("real") for name in decoder.names)  # captions need no reference
    assert not (folders / "out" / "unfinished").exists()


def test_a_network_without_weights_is_left_out_of_the_reading(folders, decoder):
    words = words_of(folders)[:-2]
    line = ["eval", "run", "--protocol", protocol(folders, THREE), *words]
    assert main([*line]) == 3 and decoder.names == []
    assert main([*line, "--skip-missing"]) == 0
    found = result(folders)
    assert "no weights 'clip'" in found["skipped"]["clip_score"] and set(found["parts"]) == {
        "fd_efficientnet",
        "smoke",
    }
    assert decoder.names.count("real/0.png") == 1


def test_videos_go_on_part_by_part(tmp_path, monkeypatch, capsys):
    (tmp_path / "samples").mkdir()
    for index in range(2):
        frames = np.full((5, 32, 32, 3), 255, dtype=np.uint8)
        for step, frame in enumerate(frames):
            frame[12:20, 4 * step : 4 * step + 8] = (200, 30, 30)
        save_video(
            frames, tmp_path / "samples" / f"{index}.mp4", fps=8, settings={"prompt": "a box moving right"}
        )
    text = "samples: {kind: videos}\nparts:\n- {scorer: moving_emoji}\n- {scorer: vbench_flicker}\n"
    line = ["eval", "run", "--protocol", protocol(tmp_path, text), "--samples", str(tmp_path / "samples")]
    line += ["--out", str(tmp_path / "out")]
    assert main(line) == 0
    expected = result(tmp_path)
    from mhla_diffusion.evaluation.moving import videos
    from mhla_diffusion.evaluation.vbench import flicker

    flickering, scored = flicker.flickering_of_videos, []
    monkeypatch.setattr(flicker, "flickering_of_videos", lambda paths: interrupt())
    assert main(line) == 130 and kept_in(tmp_path) == [".json", ".json"]
    monkeypatch.setattr(flicker, "flickering_of_videos", flickering)
    monkeypatch.setattr(videos, "read_and_score", lambda *args: scored.append(args))
    assert main(line) == 0 and scored == []
    assert "taken up of an unfinished run: moving_emoji\n" in capsys.readouterr().err
    assert numbers(result(tmp_path)) == numbers(expected)


def test_a_run_of_one_scorer_keeps_nothing_and_says_so(folders, capsys):
    line = [
        "eval",
        "run",
        "smoke",
        "--samples",
        str(folders / "samples"),
        "--reference",
        str(folders / "real"),
    ]
    assert main([*line, "--fresh", "--out", str(folders / "a.json")]) == 2
    assert "keeps nothing: leave them, and --fresh, out" in capsys.readouterr().err
