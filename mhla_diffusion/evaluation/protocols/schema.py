"""A protocol file (YAML) as dataclasses, with complaints that name the place and the nearest allowed word.

protocol: dit_imagenet256
version: 1.0
summary: one line
include: another_protocol            # optional: its fields, where this file has none of its own
source: where the protocol is from
samples: {kind: pictures, count: 50000, size: [256, 256]}
reference: {kind: statistics, what: a sentence}
drawing: {steps: 250, guidance: 1.5} # how the samples are to be drawn, for the reader
parts:
  - {scorer: fid_adm, metrics: [fd, sfd]}
published:
  - {name: DiT-XL/2, values: {fd: 2.27}, source: its paper}
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

SampleKind = Literal["pictures", "videos", "detections", "pipeline"]
ReferenceKind = Literal["pictures", "statistics", "either", "none"]


@dataclasses.dataclass(frozen=True)
class SampleRules:
    """What is scored. `count` and `size` (height, width) are what the protocol asks for.

    other_count, other_size: what happens with others. `least`: fewer are always refused. `background` is what
    transparent pictures are laid on.
    """

    kind: SampleKind = "pictures"
    count: int | None = None
    size: tuple[int, int] | None = None
    other_count: Literal["warn", "refuse"] = "warn"
    other_size: Literal["warn", "refuse"] = "warn"
    least: int = 2
    background: str | None = None


@dataclasses.dataclass(frozen=True)
class ReferenceRules:
    """What samples are compared with; `split` of a .tar, `what` in words."""

    kind: ReferenceKind = "none"
    what: str = ""
    split: str | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """A scorer, and which of its metrics; None: all. `options` are the scorer's own."""

    scorer: str
    metrics: tuple[str, ...] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Published:
    """Numbers of others by this protocol, shown beside; they are not checked."""

    name: str
    values: dict[str, float]
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Protocol:
    """A protocol as its file says, after `include`. `file` is where it came from."""

    protocol: str
    version: str
    summary: str
    samples: SampleRules
    parts: tuple[Part, ...]
    reference: ReferenceRules = ReferenceRules()
    source: str = ""
    drawing: dict[str, Any] = dataclasses.field(default_factory=dict)
    published: tuple[Published, ...] = ()
    file: str = ""

    @property
    def sha256(self) -> str:
        """Of everything that decides the numbers: not of comments, words for readers, or others' numbers."""
        found = dataclasses.asdict(self)
        for name in ("file", "summary", "source", "published"):
            del found[name]
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


class Unreadable(ValueError):
    """A protocol file that cannot be used; one line that says where and why."""

    exit_status = 2


def read_document(path: Path) -> dict:
    """The mapping in a YAML file. Raises Unreadable."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise Unreadable(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read ({error.strerror})") from None
    if not isinstance(found, dict):
        raise Unreadable(f"{path} holds no protocol: write protocol: NAME, samples: and parts:")
    return found


def build(document: Mapping[str, Any], file: str) -> Protocol:
    """The protocol of a document without `include`. Raises Unreadable, naming field and file."""
    document = {name: value for name, value in document.items() if name != "file"}
    found = converted(Protocol, document, file, "")
    if not found.parts:
        raise Unreadable(f"{file}: parts is empty: name at least one scorer")
    for index, part in enumerate(found.parts):
        if part.metrics == ():
            raise Unreadable(f"{file}: parts[{index}].metrics is empty: name some, or leave it out for all")
    if found.samples.count is not None and found.samples.count < found.samples.least:
        raise Unreadable(
            f"{file}: samples.count {found.samples.count} is below samples.least {found.samples.least}: raise it"
        )
    return dataclasses.replace(found, file=file)


def converted(kind, value, file: str, place: str):
    """`value` as `kind`, a type as the dataclasses above have them. Raises Unreadable."""

    def wrong(wanted: str) -> Unreadable:
        return Unreadable(f"{file}: {place or 'the file'} is {value!r}: give {wanted}")

    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return plain(value, file, place)
    if dataclasses.is_dataclass(kind):
        return converted_fields(kind, value, file, place)
    if origin is Literal:
        if value not in arguments:
            raise wrong(f"one of {', '.join(arguments)}{nearest(value, arguments)}")
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None else converted(arguments[0], value, file, place)
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise wrong("a list")
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise wrong(f"{len(arguments)} entries")
        return tuple(converted(arguments[0], each, file, f"{place}[{i}]") for i, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise wrong("fields with values")
        return {
            str(name): converted(arguments[1], each, file, f"{place}.{name}") for name, each in value.items()
        }
    if kind is str:
        if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
            raise wrong("text")
        return str(value)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        if not number or value != int(value) or value < 1:
            raise wrong("a whole number of at least 1")
        return int(value)
    if not number:
        raise wrong("a number")
    return float(value)


def converted_fields(kind: type, value, file: str, place: str):
    """A dataclass from a mapping: unknown fields and missing ones are named."""
    if not isinstance(value, Mapping):
        raise Unreadable(f"{file}: {place or 'the file'} is {value!r}: give fields with values")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name != "file"}
    for name in value:
        if name not in fields:
            where = f"{place}.{name}" if place else str(name)
            raise Unreadable(
                f"{file}: there is no field {where}{nearest(name, fields) or ': ' + ', '.join(fields)}"
            )
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and name not in value:
            raise Unreadable(f"{file}: {place + '.' if place else ''}{name} is missing: it has to be there")
    return kind(
        **{
            name: converted(hints[name], each, file, f"{place}.{name}" if place else name)
            for name, each in value.items()
        }
    )


def plain(value, file: str, place: str):
    """Numbers, text, lists and fields only: what JSON can hold."""
    if (
        value is None
        or isinstance(value, bool | int | str)
        or isinstance(value, float)
        and math.isfinite(value)
    ):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(each, file, f"{place}.{name}") for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each, file, f"{place}[{i}]") for i, each in enumerate(value)]
    raise Unreadable(f"{file}: {place} is {value!r}: give numbers, text, lists or fields")


def nearest(word, allowed) -> str:
    """ ", did you mean X?" or nothing."""
    near = difflib.get_close_matches(str(word), [str(each) for each in allowed], n=1)
    return f", did you mean {near[0]}?" if near else ""
