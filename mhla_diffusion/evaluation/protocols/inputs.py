"""What a run of a protocol is given, and how a part's options are read. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .schema import Unreadable

VBENCH_TOTALS = ("quality", "semantic", "total")


@dataclass
class Inputs:
    """What a run is given besides the protocol; paths as typed.

    unfinished: a folder that keeps what is finished, should the run break off, and that it is taken up from. progress,
    expect: are told how many samples were read or scored, and how many will be. sets: what was opened, by how it is
    read, so that parts which read alike share a set, and a reading.
    """

    samples: str
    reference: str | None = None
    prompts: str | None = None
    results: list[str] = field(default_factory=list)
    plan: str | None = None
    samples_split: str | None = None
    reference_split: str | None = None
    background: str | None = None
    mixed_sizes: bool = False
    limit: int | None = None
    weights: dict[str, str] = field(default_factory=dict)
    skip_missing: bool = False
    device: str = "auto"
    batch_size: int = 50
    workers: int | None = None  # None: as many as the device can use
    seed: int = 0
    out: Path = Path("outputs/eval")
    unfinished: Path | None = None
    progress: Callable[[int], object] = lambda count: None
    expect: Callable[[int], object] = lambda count: None
    sets: dict[tuple, Any] = field(default_factory=dict)


def listed(options: dict[str, Any], name: str, kind: type) -> list | None:
    """An option that is a list of texts or whole numbers; None where it is not given. Raises Unreadable."""
    value = options.get(name)
    fits = isinstance(value, list) and all(
        isinstance(each, kind) and not isinstance(each, bool) for each in value
    )
    if value is not None and not (fits and value):
        raise Unreadable(
            f"option {name} is {value!r}: give a list of {'texts' if kind is str else 'whole numbers'}"
        )
    return value


def optional(options: dict[str, Any], kind: type, **names: str) -> dict[str, Any]:
    """Options of a part under the names of arguments. Raises Unreadable for another type."""
    found = {}
    for name, argument in names.items():
        if options.get(name) is None:
            continue
        value = options[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if (kind in (int, float) and not number) or (kind is int and value != int(value)):
            raise Unreadable(f"option {name} is {value!r}: give a {'whole ' if kind is int else ''}number")
        if kind not in (int, float) and not isinstance(value, kind):
            raise Unreadable(f"option {name} is {value!r}: give {kind.__name__}")
        found[argument] = kind(value)
    return found
