"""Sets of pictures, read in order and in batches: a folder, an .npz of samples, a tar of pictures, a tensor."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ImageColor
from torch import Tensor

from .decoding import (
    ANIMATED,
    ROTATED,
    SUFFIXES,
    Picture,
    Stored,
    codec_of,
    decoded_batches,
    hidden,
    packed,
    picture_files,
)
from .networks.preparation import as_uint8

ARRAY = "arr_0.npy"


class PictureSet(ABC):
    """Pictures of one source. `about` says what was read; sizes and colours are known after a pass.

    `codecs`: how many pictures of each, by what the files hold after a pass, before it by their names.

    Args:
        mixed_sizes: allow pictures of several sizes; each is resized by the network's protocol on its own.
        background: colour that transparent pictures are laid on; without it they are refused.
    """

    codecs: dict[str, int]

    def __init__(self, source: str, count: int, *, mixed_sizes: bool = False, background: str | None = None):
        if background is not None:
            try:
                ImageColor.getrgb(background)
            except ValueError:
                raise ValueError(f"background {background!r} is no colour: give a name or #rrggbb") from None
        self.source, self.count, self.mixed_sizes, self.background = source, count, mixed_sizes, background
        self.total = count  # what is there, of which a limit takes the first `count`
        self.sizes: Counter[tuple[int, int]] = Counter()  # (height, width), of the last pass
        self.modes: Counter[str] = Counter()
        self.decoded: Counter[str] = Counter()  # codecs, as far as they were read
        self.notes: Counter[str] = Counter()  # what pixels do not show
        self.brightest = 0  # value of all that were read
        self._listing: str | None = None
        self.codecs = {}

    def __len__(self) -> int:
        return self.count

    def listing(self) -> str:
        """sha256 that tells two sets apart without decoding them."""
        if self._listing is None:
            self._listing = self.digest()
        return self._listing

    @abstractmethod
    def digest(self) -> str:
        """What `listing` gives, computed."""

    def name_of(self, index: int) -> str:
        return f"picture {index}"

    def places(self) -> set[str]:
        """Where each picture lies on disk, by way of links, too; empty where that is one file for all."""
        return set()

    @abstractmethod
    def read(self, start: int, end: int, step: int, batch_size: int, workers: int) -> Iterator[tuple]:
        """(indices, uint8 pictures (3, H, W) or what is wrong with them, (mode, codec, notes)) of each batch."""

    def batches(
        self,
        batch_size: int = 50,
        *,
        start: int = 0,
        step: int = 1,
        workers: int = 0,
        going_on: bool = False,
    ) -> Iterator[Tensor]:
        """uint8 `(n, 3, H, W)`, at most `batch_size` pictures of one size each, in order.

        Args:
            start, step: which pictures; process r of R takes start=r, step=R, so that none is read twice.
            workers: processes that decode.
            going_on: this is the rest of a pass, whose beginning `recall` has brought to mind.

        Raises ValueError for an unreadable picture, several sizes, or transparency without a background; it names one.
        """
        if not going_on:
            for counter in (self.sizes, self.modes, self.notes, self.decoded):
                counter.clear()
            self.brightest = 0
        for part in self.read(start, self.count, step, batch_size, workers) if start < self.count else ():
            kept: list[Tensor] = []
            for index, picture, (mode, codec, notes) in zip(*part, strict=True):
                if isinstance(picture, str):
                    raise ValueError(f"{self.name_of(index)}: {picture}")
                size = tuple(picture.shape[1:])
                if self.sizes and size not in self.sizes and not self.mixed_sizes:
                    first = next(iter(self.sizes))
                    raise ValueError(
                        f"{self.source} mixes sizes: {first[1]}x{first[0]} and, {self.name_of(index)}, "
                        f"{size[1]}x{size[0]}; give pictures of one size, or allow it with --mixed-sizes"
                    )
                self.sizes[size] += 1
                self.modes[mode] += 1
                self.decoded[codec] += 1
                self.notes.update(notes)
                self.brightest = max(self.brightest, int(picture.max()))
                if kept and kept[0].shape != picture.shape:
                    yield torch.stack(kept)
                    kept = []
                kept.append(picture)
            if kept:
                yield torch.stack(kept)
        self.codecs = dict(self.decoded)

    def reading(self) -> str:
        """Which pictures are read and how, in words: sets of one reading give the same batches."""
        return f"{self.count} of {self.source}, mixed_sizes={self.mixed_sizes}, background={self.background}"

    def seen(self) -> dict[str, Any]:
        """What a pass has noticed so far, in plain values, for `recall`."""
        counters = {name: dict(getattr(self, name)) for name in ("sizes", "modes", "notes", "decoded")}
        return {**counters, "brightest": self.brightest}

    def recall(self, seen: dict[str, Any]) -> None:
        """Take up what an earlier pass noticed before it broke off."""
        for name in ("sizes", "modes", "notes", "decoded"):
            setattr(self, name, Counter(seen[name]))
        self.brightest = seen["brightest"]

    def doubts(self) -> list[str]:
        """Warnings about values that cannot be right, and about what was not read, after a pass."""
        found = []
        if self.brightest <= 1:
            found.append(
                f"no value in {self.source} is above {self.brightest}: every picture is black, as of floats in [0, 1] "
                "that were cast to bytes and not multiplied by 255"
            )
        if self.notes[ANIMATED]:
            found.append(
                f"{self.notes[ANIMATED]} pictures of {self.source} are animated: their first frames count"
            )
        if self.notes[ROTATED]:
            found.append(
                f"{self.notes[ROTATED]} pictures of {self.source} are to be turned (EXIF), and are taken as they are "
                "stored, as by other programs for FID: store them upright"
            )
        return found

    def about(self) -> dict:
        """What result files store about the set."""
        return {
            "source": self.source,
            "pictures": self.count,
            **({"of": self.total} if self.total > self.count else {}),  # the first ones, by a limit
            "listing_sha256": self.listing(),
            "codecs": self.codecs,
            "sizes": {f"{width}x{height}": n for (height, width), n in sorted(self.sizes.items())},
            "modes": dict(sorted(self.modes.items())),
            "background": self.background,
        }


class Folder(PictureSet):
    """Every picture below a folder, in the order of their paths."""

    def __init__(self, path: Path, limit: int | None = None, **options):
        found = picture_files(path)
        self.files = found[:limit]
        if not self.files:
            raise ValueError(f"{path} holds no pictures ({', '.join(sorted(SUFFIXES))}): give another folder")
        super().__init__(str(path), len(self.files), **options)
        self.total = len(found)
        self.codecs = dict(Counter(codec_of(file.suffix) for file in self.files))
        self.root = path

    def name_of(self, index: int) -> str:
        return str(self.files[index])

    def places(self) -> set[str]:
        root = os.path.realpath(self.root)
        return {os.path.join(root, file.relative_to(self.root)) for file in self.files}

    def digest(self) -> str:
        lines = (f"{file.relative_to(self.root).as_posix()} {file.stat().st_size}\n" for file in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def read(self, start, end, step, batch_size, workers):
        files = [(i, self.files[i]) for i in range(start, end, step)]
        return decoded_batches(files, self.background, batch_size, workers)


def holds_pictures(path: Path) -> bool:
    """Whether an .npz has samples (arr_0)."""
    if path.suffix != ".npz" or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return ARRAY in archive.namelist()


class Samples(PictureSet):
    """`arr_0` of an .npz, uint8 `(N, H, W, 3)`, as samplers of DiT write it; never whole in memory."""

    def __init__(self, path: Path, limit: int | None = None, **options):
        self.path = path
        with self.opened() as (_, shape):
            self.shape = shape
        if not shape[0]:
            raise ValueError(f"{path}: arr_0 holds no pictures: give another file")
        super().__init__(str(path), shape[0] if limit is None else min(limit, shape[0]), **options)
        self.total = shape[0]
        self.codecs = {"npz": self.count}

    @contextmanager
    def opened(self):
        """The stream of arr_0 behind its header, and its shape."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                if ARRAY not in archive.namelist():
                    names = ", ".join(name.removesuffix(".npy") for name in archive.namelist()[:3])
                    raise ValueError(f"{self.path} has no pictures in it (arr_0), but {names or 'nothing'}")
                with archive.open(ARRAY) as member:
                    first = np.lib.format.read_magic(member) == (1, 0)
                    header = (
                        np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
                    )
                    shape, fortran, dtype = header(member)
                    if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3:
                        raise ValueError(
                            f"{self.path}: arr_0 is {dtype} {shape}: give uint8 (N, height, width, 3)"
                        )
                    if fortran:
                        raise ValueError(
                            f"{self.path}: arr_0 is in Fortran's order: store np.ascontiguousarray of it"
                        )
                    yield member, shape
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{self.path} cannot be read ({error}): copy it again") from None

    def digest(self) -> str:
        with zipfile.ZipFile(self.path) as archive:
            info = archive.getinfo(ARRAY)
        return hashlib.sha256(f"{self.shape} {self.count} {info.CRC:08x}".encode()).hexdigest()

    def read(self, start, end, step, batch_size, workers):
        size = int(np.prod(self.shape[1:]))
        with self.opened() as (member, shape):
            part = []
            for index in range(end):
                raw = member.read(size)
                if len(raw) < size:
                    raise ValueError(
                        f"{self.path} is cut short at picture {index} of {shape[0]}: copy it again"
                    )
                if index < start or (index - start) % step:
                    continue
                picture = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(shape[1:])
                part.append((index, Picture(picture.permute(2, 0, 1).contiguous(), "RGB", "npz")))
                if len(part) == batch_size:
                    yield packed(part)
                    part = []
            if part:
                yield packed(part)


class Tar(PictureSet):
    """Pictures of a tar, each with a JSON of the same name beside it; `split` keeps those whose JSON says so.

    The pictures stay on disk, the JSON is in memory.
    """

    def __init__(self, path: Path, limit: int | None = None, split: str | None = None, **options):
        pictures, records = {}, {}  # (name, suffix) -> its place; name -> what the JSON says
        try:
            with tarfile.open(path, "r:") as archive:  # a compressed one cannot be read from the middle
                for member in archive:
                    file = Path(member.name)
                    name = str(file.with_suffix(""))
                    if not member.isfile() or hidden(file):
                        continue
                    if file.suffix.lower() in SUFFIXES:
                        pictures[name, file.suffix] = Stored(path, member.offset_data, member.size)
                    elif file.suffix == ".json":
                        records[name] = json.loads(archive.extractfile(member).read())
        except (tarfile.TarError, ValueError) as error:
            raise ValueError(f"{path} is no readable tar ({error}): copy it again, unpacked") from None
        records = {key: record for key, record in records.items() if isinstance(record, dict)}
        splits = sorted(
            {record["split"] for record in records.values() if isinstance(record.get("split"), str)}
        )
        if split is not None and split not in splits:
            raise ValueError(f"{path} has no split {split!r}: it has {', '.join(splits) or 'none'}")
        kept = sorted(
            key for key in pictures if split is None or records.get(key[0], {}).get("split") == split
        )
        if not kept:
            raise ValueError(f"{path} holds no pictures: give another file")
        self.names = [name for name, _ in kept[:limit]]
        self.stored = [pictures[key] for key in kept[:limit]]
        self.records = [records.get(name, {}) for name in self.names]
        super().__init__(f"{path}" + (f", split {split}" if split else ""), len(self.names), **options)
        self.total = len(kept)
        self.codecs = dict(Counter(codec_of(suffix) for _, suffix in kept[:limit]))

    def name_of(self, index: int) -> str:
        return f"{self.names[index]} of {self.source}"

    def places(self) -> set[str]:
        return {f"{os.path.realpath(each.path)}:{each.offset}" for each in self.stored}

    def digest(self) -> str:
        digest = hashlib.sha256()
        for stored in self.stored:
            digest.update(hashlib.sha256(stored.read()).digest())
        return digest.hexdigest()

    def read(self, start, end, step, batch_size, workers):
        files = [(i, self.stored[i]) for i in range(start, end, step)]
        return decoded_batches(files, self.background, batch_size, workers)


class Tensors(PictureSet):
    """A tensor `(N, 3, H, W)`: uint8, or floats in [0, 1]."""

    def __init__(self, pictures: Tensor, **options):
        self.pictures = as_uint8(pictures).cpu()
        super().__init__("tensor", len(pictures), **options)
        self.codecs = {"tensor": self.count}

    def digest(self) -> str:
        digest = hashlib.sha256(str(tuple(self.pictures.shape)).encode())
        digest.update(self.pictures.numpy().tobytes())
        return digest.hexdigest()

    def read(self, start, end, step, batch_size, workers):
        chosen = list(range(start, end, step))
        for first in range(0, len(chosen), batch_size):
            part = chosen[first : first + batch_size]
            yield part, self.pictures[part], [("RGB", "tensor", ())] * len(part)


def open_pictures(
    source: str | Path | Tensor,
    *,
    limit: int | None = None,
    split: str | None = None,
    mixed_sizes: bool = False,
    background: str | None = None,
) -> PictureSet:
    """The set behind a path or tensor.

    Raises ValueError (one line) when there is nothing, or nothing that is a set of pictures.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit}: give at least 1 picture")
    options = {"mixed_sizes": mixed_sizes, "background": background}
    if isinstance(source, Tensor):
        return Tensors(source[:limit], **options)
    path = Path(source).expanduser()
    if not path.exists():
        raise ValueError(f"there is no {path}: give a folder of pictures, an .npz of samples or a .tar")
    if path.is_dir():
        found: PictureSet = Folder(path, limit, **options)
    elif path.suffix == ".tar":
        return Tar(path, limit, split, **options)
    elif path.suffix == ".npz":
        found = Samples(path, limit, **options)
    else:
        raise ValueError(f"{path} is no set of pictures: give a folder, an .npz with arr_0, or a .tar")
    if split is not None:
        raise ValueError(f"{path} has no splits: leave split out, or give a .tar whose JSON names them")
    return found
