"""A protocol's result for people: lines, a Markdown table with published numbers beside, a grid of samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...pipelines.pictures import contact_sheet, read_settings, sheet_size, write_atomically

MOST_PIXELS = 1 << 27  # of a grid; what Pillow opens without a warning ends at 1.33 times as many
ARROWS = {True: "higher is better", False: "lower is better", None: ""}


def as_markdown(result: dict) -> list[str]:
    """The report: table of values and published ones, then what was left out, failed or must be known."""
    others = result["published"]
    heads = ["metric", "value", "n", "", *(each["name"] for each in others)]
    lines = [
        f"# {result['protocol']} {result['protocol_version']}",
        "",
        f"Samples: {Path(result['inputs']['samples']).name}; protocol {result['protocol_sha256'][:12]}, "
        f"{result['environment']['date']}.",
        "",
        "| " + " | ".join(heads) + " |",
        "|---" * len(heads) + "|",
    ]
    named = [name for each in others for name in each["values"] if name not in result["values"]]
    for name in dict.fromkeys([*result["values"], *named]):
        row = result["values"].get(name)
        cells = [name, number(row) if row else "not computed", "" if row is None else str(row.get("n") or "")]
        cells.append(ARROWS[row.get("higher_is_better")] if row else "")
        cells += [f"{each['values'][name]:g}" if name in each["values"] else "" for each in others]
        lines.append("| " + " | ".join(cells) + " |")
    sources = [f"{each['name']}: {each['source']}" for each in others if each["source"]]
    for title, texts in (
        ("Left out", [f"{name}: {why}" for name, why in result["skipped"].items()]),
        ("Failed", [f"{name}: {why}" for name, why in result["failed"].items()]),
        ("To know", result["warnings"]),
        ("Published by", sources),
    ):
        if texts:
            lines += ["", f"{title}:", "", *(f"- {text}" for text in texts)]
    return lines


def number(row: dict) -> str:
    spread = f" ± {row['std']:.3g}" if "std" in row else ""
    guess = f" (by guessing {row['chance']:.2g})" if "chance" in row else ""
    return f"{row['value']:.6g}{spread}{guess}"


def as_lines(result: dict) -> list[str]:
    width = max([len(name) for name in result["values"]], default=0)
    return [
        f"{name:{width}}  {number(row)}" + (f"  (n={row['n']})" if row.get("n") else "")
        for name, row in result["values"].items()
    ]


def write_markdown(result: dict, path: Path) -> None:
    text = "\n".join(as_markdown(result)) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def write_grid(
    source: str,
    path: Path,
    *,
    count: int = 16,
    columns: int = 4,
    split: str | None = None,
    background: str | None = None,
    cell: int = 160,
) -> int:
    """A PNG of the first `count` pictures of a set, or middle frames of a folder's videos; returns how many.

    Under each its prompt, where it carries one, or its name. Raises ValueError as `open_pictures`, and for a grid of
    more than `MOST_PIXELS`, before any sample is read.
    """
    folder = Path(source).expanduser()

    def check(count: int) -> None:
        width, height = sheet_size(count, columns, cell)
        if width * height > MOST_PIXELS:
            raise ValueError(
                f"a grid of {width}x{height} pixels is too large: give fewer samples or smaller cells"
            )

    images, captions = videos_of(folder, count, check) if folder.is_dir() else ([], [])
    if not images:
        images, captions = pictures_of(source, count, split, background, check)
    drawn = contact_sheet(images, captions, columns=columns, cell=cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: drawn.save(file, format="PNG"))
    return len(images)


def videos_of(folder: Path, count: int, check: Callable[[int], None]) -> tuple[list, list[str]]:
    from PIL import Image

    from ...pipelines.videos import read_video
    from ..vbench.check import VIDEO_SUFFIXES

    suffixes = VIDEO_SUFFIXES - {".gif"}  # which a set of pictures may hold
    images, captions = [], []
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes)[:count]
    if paths:
        check(len(paths))
    for path in paths:
        video = read_video(path)
        images.append(Image.fromarray(video.frames[len(video.frames) // 2]))
        captions.append((video.settings or {}).get("prompt") or path.stem)
    return images, captions


def pictures_of(
    source: str, count: int, split: str | None, background: str | None, check: Callable[[int], None]
) -> tuple[list, list[str]]:
    from PIL import Image

    from ..picture_sets import Folder, open_pictures

    pictures = open_pictures(source, limit=count, split=split, mixed_sizes=True, background=background)
    check(len(pictures))
    images, captions = [], []
    for batch in pictures.batches():
        for picture in batch:
            images.append(Image.fromarray(picture.permute(1, 2, 0).numpy()))
            index = len(images) - 1
            prompt = (
                (read_settings(pictures.files[index]) or {}).get("prompt")
                if isinstance(pictures, Folder)
                else None
            )
            captions.append(prompt or Path(pictures.name_of(index).partition(" of ")[0]).stem)
    return images, captions
