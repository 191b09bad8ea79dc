"""Where protocol files lie, and reading them with what they include. Imports no torch.

A protocol is found by path, then by name in the folders of `$MHLA_PROTOCOLS`, then in the checkout's `eval/protocols/`.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..image_protocols import PROTOCOLS
from ..text_image.protocols import TEXT_IMAGE_PROTOCOLS
from .schema import Protocol, Unreadable, build, nearest, read_document

VARIABLE = "MHLA_PROTOCOLS"
SUFFIXES = (".yaml", ".yml")


def folders() -> list[Path]:
    """Folders that are looked into for a name."""
    given = [Path(root).expanduser() for root in os.environ.get(VARIABLE, "").split(os.pathsep) if root]
    checkout = Path(__file__).resolve().parents[3]
    own = [checkout / "eval" / "protocols"] if (checkout / "pyproject.toml").is_file() else []
    return [*given, *own]


def known_protocols() -> dict[str, Path]:
    """Name and file of each protocol that is found by name; the first of one name counts."""
    found: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            if path.suffix in SUFFIXES:
                found.setdefault(path.stem, path)
    return found


def find_file(name: str, beside: Path | None = None) -> Path:
    """File of a protocol: a path (also relative to `beside`), or a name. Raises Unreadable with what there is."""
    for path in (Path(name).expanduser(), *([beside / name] if beside else [])):
        if path.suffix in SUFFIXES or path.is_file():
            if path.is_file():
                return path
    known = known_protocols()
    if name in known:
        return known[name]
    if Path(name).suffix in SUFFIXES:
        raise Unreadable(f"there is no protocol file {name}: give its path")
    if name in (*PROTOCOLS, *TEXT_IMAGE_PROTOCOLS):
        raise Unreadable(
            f"{name} is no file: mhla eval run {name} scores by it, mhla eval list says whether it can run here"
        )
    places = ", ".join(map(str, folders())) or f"nowhere (${VARIABLE} is not set, and this is no checkout)"
    there = f"; there are {', '.join(known)}" if known else "; give the path of a file"
    raise Unreadable(f"no protocol is called {name!r}{nearest(name, known)}; searched {places}{there}")


def load_protocol(name: str | os.PathLike) -> Protocol:
    """A protocol by path or name, with what it includes. Raises Unreadable (exit status 2), naming file and field."""
    path = find_file(os.fspath(name))
    return build(document_of(path, ()), path.name)


def document_of(path: Path, above: tuple[Path, ...]) -> dict:
    """The fields of a file over those of the file that it includes; mappings are merged, lists replaced."""
    path = path.resolve()
    if path in above:
        raise Unreadable(f"{path.name} includes itself, by way of {', '.join(p.name for p in above)}")
    own = read_document(path)
    included = own.pop("include", None)
    if included is None:
        return own
    if not isinstance(included, str):
        raise Unreadable(f"{path.name}: include is {included!r}: give the name or path of one protocol")
    return merged(document_of(find_file(included, path.parent), (*above, path)), own)


def merged(below: dict, above: dict) -> dict:
    found = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = merged(found[name], value) if both else value
    return found
