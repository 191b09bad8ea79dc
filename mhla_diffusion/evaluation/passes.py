"""One reading of each set of pictures for all that look at it, and where to go on should it break off.

A scoring is a generator. It first makes ready, which raises what is missing or mistaken; yields, once, the looks that
it wants to take; and returns its result when every picture was shown to them. So several scorings share each decoding,
and each computes what it would compute alone: its network is given the same batches.
"""

from __future__ import annotations

import functools
import hashlib
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .kept import Kept
from .networks.preparation import BLACK
from .picture_sets import PictureSet

EVERY = 30.0  # seconds between two writes of what was found so far, ...
SHARE = 20  # ... or so many times as long as the last one took


class Rows:
    """What `find` finds in each batch of a set: rows of tensors `(n, ...)`, on the CPU, or items of lists.

    Args:
        find: uint8 batch `(n, 3, H, W)` and the index of its first picture -> name -> tensor or list. Items of lists
            are plain values, tuples and lists of them, so that they can be kept.
    """

    def __init__(self, find: Callable[[Tensor, int], Mapping[str, Tensor | list]]):
        self.find, self.count = find, 0
        self.parts: dict[str, list] = {}

    def take(self, batch: Tensor) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", BLACK)  # of a batch; the set's `doubts` say it of all
            self.add(self.find(batch, self.count))
        self.count += len(batch)

    def add(self, found: Mapping[str, Tensor | list]) -> None:
        for name, value in found.items():
            parts = self.parts.setdefault(name, [])
            if isinstance(value, Tensor):
                parts.append(value.cpu())
            else:
                parts.extend(value)

    def __getitem__(self, name: str) -> Any:
        """All rows of a name, or all items."""
        parts = self.parts[name]
        if not (parts and isinstance(parts[0], Tensor)):
            return parts
        if len(parts) > 1:
            parts[:] = [torch.cat(parts)]
        return parts[0]

    def state(self) -> dict:
        """What `Kept` can hold, for `restore`."""
        return {"count": self.count, "rows": {name: self[name] for name in self.parts}}

    def restore(self, state: dict) -> None:
        self.count = state["count"]
        self.parts = {
            name: [value] if isinstance(value, Tensor) else list(value)
            for name, value in state["rows"].items()
        }


@dataclass
class Look:
    """Every picture of a set, in order, in batches of so many, shown to `rows`.

    `seconds`: what the reading took, with all that looked at the set.
    """

    pictures: PictureSet
    rows: Rows
    batch_size: int
    seconds: float = 0.0


Scoring = Generator[list[Look], None, dict]


@dataclass
class Reader:
    """Runs scorings together.

    Args:
        workers: processes that decode.
        progress, expect: are told how many pictures were read, and how many will be; a picture counts once.
        kept: where what was found so far is written now and then, and taken up from.
        faults: exceptions that cost one scoring and not the others; any other ends all.

    `seconds`: what each scoring took by itself. `reading`: what was spent waiting for pictures. `resumed`: pictures
    whose rows were taken up.
    """

    workers: int = 0
    progress: Callable[[int], object] = lambda count: None
    expect: Callable[[int], object] = lambda count: None
    kept: Kept | None = None
    faults: tuple[type[Exception], ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    reading: float = 0.0
    resumed: int = 0
    due: float = field(default_factory=lambda: time.perf_counter() + EVERY)

    def alone(self, scoring: Scoring) -> dict:
        """The result of one; its faults are raised."""
        return next(found for _, found in self.run({"": scoring}))

    def run(self, scorings: Mapping[str, Scoring]) -> Iterator[tuple[str, dict | Exception]]:
        """Name and result, or fault, of each scoring, as soon as it is known."""
        self.seconds = dict.fromkeys(scorings, 0.0)
        wanted: dict[str, list[Look]] = {}
        for name, scoring in scorings.items():
            try:
                with self.timed(name):
                    wanted[name] = next(scoring)
            except self.faults as error:
                yield name, error
        readings = readings_of(wanted)
        self.expect(sum(len(next(iter(looks.values())).pictures) for looks in readings))
        while readings:
            yield from self.read(readings.pop(0), wanted)
        for name in list(wanted):
            del wanted[name]  # its rows go with it, before the next one computes
            try:
                with self.timed(name):
                    result = finish(scorings[name])
            except self.faults as error:
                yield name, error
            else:
                yield name, result

    def read(self, looks: dict[str, Look], wanted: dict[str, list[Look]]) -> Iterator[tuple[str, Exception]]:
        """Show every batch of one set to its looks; gives scorings that fail meanwhile, no longer wanted, and why."""
        looks = {name: look for name, look in looks.items() if name in wanted}
        if not looks:
            return
        pictures, batch_size = next((look.pictures, look.batch_size) for look in looks.values())
        file = f"{hashlib.sha256(f'{pictures.reading()} {batch_size}'.encode()).hexdigest()[:16]}.pt"
        started = time.perf_counter()
        done = self.take_up(file, looks)
        try:
            batches = pictures.batches(batch_size, start=done, workers=self.workers, going_on=done > 0)
            while looks and (batch := self.next_of(batches)) is not None:
                for name, look in list(looks.items()):
                    try:
                        with self.timed(name):
                            look.rows.take(batch)
                    except self.faults as error:
                        del looks[name], wanted[name]
                        yield name, error
                done += len(batch)
                self.progress(len(batch))
                self.keep(file, looks, done)
        except self.faults as error:  # of a picture that cannot be read
            for name in looks:
                del wanted[name]
                yield name, error
        for look in looks.values():
            look.seconds = time.perf_counter() - started

    def next_of(self, batches: Iterator[Tensor]) -> Tensor | None:
        started = time.perf_counter()
        try:
            return next(batches, None)
        finally:
            self.reading += time.perf_counter() - started

    def take_up(self, file: str, looks: dict[str, Look]) -> int:
        """Give each look what was kept of it; returns how many pictures of the set need not be read again."""
        state = self.kept and self.kept.read(file)
        if not state or not looks.keys() <= state["looks"].keys():
            return 0
        for name, look in looks.items():
            look.rows.restore(state["looks"][name])
        done, pictures = state["done"], look.pictures
        pictures.recall(state["seen"])
        self.kept.say(
            f"taken up of an unfinished run: {done} of {len(pictures)} pictures of {pictures.source}"
        )
        self.resumed += done
        self.progress(done)
        return done

    def keep(self, file: str, looks: dict[str, Look], done: int) -> None:
        """Write what the looks have found, if it is time to, or the set is at its end."""
        if self.kept is None or not looks:
            return
        pictures, batch_size = next((look.pictures, look.batch_size) for look in looks.values())
        # Where sizes are mixed, batches end elsewhere, too, and those that follow would be others from there.
        if done < len(pictures) and (done % batch_size or time.perf_counter() < self.due):
            return
        started = time.perf_counter()
        states = {name: look.rows.state() for name, look in looks.items()}
        self.kept.write(file, {"done": done, "seen": pictures.seen(), "looks": states})
        ended = time.perf_counter()
        self.due = ended + max(EVERY, SHARE * (ended - started))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started


def readings_of(wanted: Mapping[str, list[Look]]) -> list[dict[str, Look]]:
    """The looks that one reading serves, by scoring: those at the same set, that take as many pictures at a time."""
    readings: dict[tuple[int, int], dict[str, Look]] = {}
    for name, looks in wanted.items():
        for look in looks:
            found = readings.setdefault((id(look.pictures), look.batch_size), {})
            assert name not in found, "a scoring looks once at a set"
            found[name] = look
    return list(readings.values())


def finish(scoring: Scoring) -> dict:
    try:
        next(scoring)
    except StopIteration as end:
        return end.value
    raise AssertionError("a scoring yields its looks once")


def by_itself(scoring: Callable[..., Scoring]) -> Callable[..., dict]:
    """A function that runs one scoring and raises its faults; it also takes `workers` and `progress` (see `Reader`)."""

    @functools.wraps(scoring)
    def run(
        *args: Any, workers: int = 0, progress: Callable[[int], object] = lambda count: None, **options: Any
    ) -> dict:
        return Reader(workers, progress).alone(scoring(*args, **options))

    return run
