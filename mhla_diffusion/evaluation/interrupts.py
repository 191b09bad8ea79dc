"""Ctrl-C that no library swallows. Imports no torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Gives a function that raises KeyboardInterrupt if Ctrl-C was pressed since; so do the block's end and its faults.

    The interpreter ignores exceptions in what it calls around a fork, torch's C++ puts one of its own in their place,
    and processes that decode may die of the same Ctrl-C and pass for a fault: without this a run would go on, or fail.
    Where another handler is in charge, and in other threads, it changes nothing.
    """
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield check
    except Exception:
        check()
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
    check()
