"""Single pictures as they are stored: decoded, or said what is wrong with them, and what their pixels do not show."""

from __future__ import annotations

import io
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif"}
CODECS = {"jpg": "jpeg", "tif": "tiff", "mpo": "jpeg"}  # a JPEG with a second one behind it
ORIENTATION = 0x0112  # of EXIF; 1 is upright
ANIMATED, ROTATED = "animated", "rotated"


class Stored(NamedTuple):
    """A part of a file, as members of a tar are."""

    path: Path
    offset: int
    size: int

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


class Picture(NamedTuple):
    """uint8 `(3, H, W)` or what is wrong; mode and codec on disk, whatever the name; `notes` of the above."""

    pixels: Tensor | str
    mode: str
    codec: str
    notes: tuple[str, ...] = ()


def picture_files(folder: Path) -> list[Path]:
    """Every picture below a folder, in the order of their paths; hidden files, and what lies in hidden folders, not.

    Programs put settings beside pictures, and notebooks keep copies in `.ipynb_checkpoints`.
    """
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and not hidden(path.relative_to(folder)) and not path.is_dir()
    )


def hidden(path: Path) -> bool:
    """Whether a file, or a folder that it lies in, is hidden; so are the copies that macOS puts beside files."""
    return any(part.startswith(".") for part in path.parts)


def codec_of(name: str) -> str:
    """Of a format's name or a suffix."""
    name = name.lower().lstrip(".")
    return CODECS.get(name, name)


def decode(file: Path | Stored, background: str | None) -> Picture:
    """The picture in RGB; transparent ones are laid on `background`, and refused without one."""
    try:
        with Image.open(io.BytesIO(file.read()) if isinstance(file, Stored) else file) as image:
            mode, codec = image.mode, codec_of(image.format)
            if deep := deep_mode(image):
                what = f"it has more than 8 bits a colour (mode {deep}), which stand for other colours: store it with 8"
                return Picture(what, mode, codec)
            notes = notes_of(image)
            image.load()
            if image.has_transparency_data:
                image = image.convert("RGBA")
                if image.getextrema()[3][0] < 255:
                    if background is None:
                        what = "it is transparent; name what lies behind it, for example --background white"
                        return Picture(what, mode, codec)
                    image = Image.alpha_composite(Image.new("RGBA", image.size, background), image)
            array = np.asarray(image.convert("RGB"))
    except Exception as error:  # every codec has faults of its own for broken files
        return Picture(f"cannot be read ({' '.join(str(error).split())})", "unreadable", "")
    return Picture(torch.from_numpy(array.copy()).permute(2, 0, 1).contiguous(), mode, codec, notes)


def deep_mode(image: Image.Image) -> str | None:
    """How a picture of more than 8 bits a colour is stored; None of 8. Of colours Pillow keeps 8, and says nothing."""
    if image.mode[0] in "IF":
        return image.mode
    stored = (tile.args if isinstance(tile.args, tuple) else (tile.args,) for tile in image.tile)
    return next((mode for args in stored for mode in args if isinstance(mode, str) and ";16" in mode), None)


def notes_of(image: Image.Image) -> tuple[str, ...]:
    notes = (ANIMATED,) if getattr(image, "is_animated", False) and image.format != "MPO" else ()
    try:
        turned = image.getexif().get(ORIENTATION, 1) > 1
    except Exception:  # broken EXIF makes no broken picture
        turned = False
    return notes + ((ROTATED,) if turned else ())


class PictureFiles(Dataset):
    """Index and picture of each of some files."""

    def __init__(self, files: Sequence[tuple[int, Path | Stored]], background: str | None):
        self.files, self.background = files, background

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> tuple[int, Picture]:
        index, file = self.files[place]
        return index, decode(file, self.background)


def packed(items: list[tuple[int, Picture]]) -> tuple:
    """Indices, pixels, the rest of each. Pictures of one size become one tensor: each costs a worker an open file."""
    indices, pictures = zip(*items, strict=True)
    pixels = [picture.pixels for picture in pictures]
    shapes = {each if isinstance(each, str) else each.shape for each in pixels}
    whole = len(shapes) == 1 and not isinstance(pixels[0], str)
    return indices, torch.stack(pixels) if whole else pixels, [picture[1:] for picture in pictures]


def decoding_processes(workers: int | None, device: str) -> int:
    """How many processes decode: `workers`, or where that is None as many as a GPU that waits for them can use.

    On a CPU none: decoding and the network would share its cores.
    """
    if workers is not None:
        return workers
    on_gpu = torch.cuda.is_available() if device == "auto" else device.partition(":")[0] == "cuda"
    return min(16, max(0, (os.cpu_count() or 1) - 1)) if on_gpu else 0


def decoded_batches(
    files: Sequence[tuple[int, Path | Stored]], background: str | None, batch_size: int, workers: int
) -> Iterator[tuple]:
    """What `packed` makes of every `batch_size` files, in their order, decoded by so many processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "This DataLoader will create"
        )  # more processes than cores, as asked for
        return iter(
            DataLoader(
                PictureFiles(files, background),
                batch_size,
                num_workers=workers,
                collate_fn=packed,
                worker_init_fn=leave_interrupts,
            )
        )


def leave_interrupts(worker: int) -> None:
    """A terminal sends Ctrl-C to every process; one that decodes and died of it would pass for a fault of the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
