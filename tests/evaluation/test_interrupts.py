"""Ctrl-C is never lost, whoever swallows it."""

import contextlib
import os
import signal
import threading

import pytest

from mhla_diffusion.evaluation.interrupts import interruptible


@pytest.fixture(autouse=True)
def pythons_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # what a block changes it puts back
    signal.signal(signal.SIGINT, before)


def swallowed():
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler is called between two lines
            pass


def test_one_that_was_swallowed_is_raised_at_the_next_look_and_at_the_end():
    with pytest.raises(KeyboardInterrupt), interruptible() as check:
        check()
        swallowed()
        with pytest.raises(KeyboardInterrupt):
            check()
    with interruptible() as check:
        check()


def test_a_fault_that_stands_in_its_place_is_none():
    with pytest.raises(KeyboardInterrupt), interruptible():
        swallowed()
        raise RuntimeError("a process that decodes exited unexpectedly")
    with pytest.raises(RuntimeError, match="its own"), interruptible():
        raise RuntimeError("its own")


def test_other_handlers_and_threads_are_left_alone():
    told = []
    signal.signal(signal.SIGINT, lambda number, frame: told.append(number))
    with interruptible() as check:
        swallowed()
        check()
    assert told == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def other():
        with interruptible() as check:
            check()
            told.append("thread")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert told[1:] == ["thread"]


def test_processes_that_decode_leave_it_to_the_one_that_asked_them():
    from mhla_diffusion.evaluation.decoding import leave_interrupts

    leave_interrupts(0)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
