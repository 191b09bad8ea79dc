"""Pictures on disk: PNG with its settings inside and a JSON beside it, and contact sheets of them."""

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

# Name of the PNG text chunk that holds the settings as JSON.
SETTINGS_KEY = "mhla_diffusion"


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Call `write(file)` on a new file that takes the place of `path` only once it is complete."""
    # A name may be as long as file systems take; so many letters of it are at most 200 bytes.
    part = path.with_name(f".{path.name[-50:]}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            write(file)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def on_white(image: Image.Image) -> Image.Image:
    """The picture as RGB; what is transparent in it becomes white, whatever colour is stored there."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def save_picture(image: Image.Image, path: Path, settings: dict[str, Any], *, beside: bool = True) -> None:
    """Write `path` (a PNG with `settings` inside) and, if `beside`, the same settings as JSON beside it.

    The PNG is written last and each file appears whole or not at all, so a PNG that exists is finished.
    """
    text = json.dumps(settings, ensure_ascii=False, indent=2)
    chunk = PngInfo()
    chunk.add_itxt(SETTINGS_KEY, json.dumps(settings, ensure_ascii=False))
    if beside:
        write_atomically(path.with_suffix(".json"), lambda file: file.write(f"{text}\n".encode()))
    write_atomically(path, lambda file: image.save(file, format="PNG", pnginfo=chunk))


def read_settings(path: Path) -> dict[str, Any] | None:
    """Settings embedded in a PNG, or None if it has none or cannot be read."""
    try:
        with Image.open(path) as image:
            settings = json.loads(image.info[SETTINGS_KEY])
    except (
        OSError,
        SyntaxError,
        KeyError,
        TypeError,
        ValueError,
    ):  # Pillow raises SyntaxError for a broken PNG
        return None
    return settings if isinstance(settings, dict) else None


def slug(text: str, length: int = 40) -> str:
    """Lower-case part of a file name: ASCII letters and digits joined by hyphens, "picture" if none."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    kept = words[:1]
    for word in words[1:]:
        if len("-".join([*kept, word])) > length:
            break
        kept.append(word)
    return "-".join(kept)[:length] or "picture"


# Pixels of a contact sheet: a picture's square, between squares, a line of its caption; lines of a caption.
CELL, GAP, LINE, LINES = 160, 8, 15, 3


def sheet_size(pictures: int, columns: int, cell: int = CELL) -> tuple[int, int]:
    """Width and height in pixels of a contact sheet."""
    columns = min(columns, pictures)
    rows = math.ceil(pictures / columns)
    return columns * (cell + GAP) + GAP, rows * (cell + LINE * LINES + GAP) + GAP


def contact_sheet(
    images: Sequence[Image.Image | None],
    captions: Sequence[str],
    *,
    columns: int = 4,
    cell: int = CELL,
) -> Image.Image:
    """One RGB picture with every image in a `cell` px square and its caption under it, row by row.

    None leaves a grey square, for a picture that could not be drawn.
    """
    if len(images) != len(captions) or not images:
        raise ValueError(
            f"a contact sheet needs a caption per picture: {len(images)} and {len(captions)} given"
        )
    if columns < 1:
        raise ValueError(f"columns is {columns}; a contact sheet needs at least 1")
    columns = min(columns, len(images))
    font = ImageFont.load_default(size=12)
    step = (cell + GAP, cell + LINE * LINES + GAP)
    sheet = Image.new("RGB", sheet_size(len(images), columns, cell), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = GAP + index % columns * step[0], GAP + index // columns * step[1]
        if image is None:
            draw.rectangle((left, top, left + cell - 1, top + cell - 1), fill="lightgrey")
        else:
            scale = cell / max(image.size)
            size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
            fitted = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
            sheet.paste(fitted, (left + (cell - size[0]) // 2, top + (cell - size[1]) // 2))
        for number, line in enumerate(wrap(caption, lambda text: draw.textlength(text, font), cell)[:LINES]):
            draw.text((left, top + cell + 2 + LINE * number), line, fill="black", font=font)
    return sheet


def wrap(text: str, measure: Callable[[str], float], width: float) -> list[str]:
    """Lines of whole words, each at most `width` wide unless a single word is wider."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and measure(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
