"""Runs that break off: what they leave, who takes it up, and that a picture is read once for all parts."""

import dataclasses
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import tiny_clip
from broken_off import THREE, TWO, interrupt, kept_in, numbers, run, without_times, words_of
from PIL import Image
from protocol_files import protocol, result

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation import image_scores
from mhla_diffusion.evaluation.protocols import runner, unfinished
from mhla_diffusion.evaluation.protocols.files import load_protocol
from mhla_diffusion.evaluation.protocols.inputs import Inputs
from mhla_diffusion.pipelines.pictures import save_picture
from mhla_diffusion.pipelines.videos import save_video

pytestmark = pytest.mark.usefixtures("kept_after_every_batch")


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
