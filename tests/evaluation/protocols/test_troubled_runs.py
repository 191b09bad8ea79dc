"""Runs in trouble: a disk without room, Ctrl-C where a library swallows it, files that a power cut left empty."""

import contextlib
import errno
import io
import os
import signal

import pytest
from broken_off import TWO, interrupt, numbers, run
from protocol_files import result

from mhla_diffusion.evaluation import image_scores, kept
from mhla_diffusion.pipelines.pictures import write_atomically


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
