"""Makes the emoji set: renders the drawings of the pinned packages, splits them, writes one tar.

The program is ``train/build_emoji.py``; the file it writes is read by :mod:`mhla_diffusion.training.emoji`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

from .emoji_sources import (
    ATTRIBUTION_STYLES,
    DEFAULT_STYLES,
    NAMES,
    STYLES,
    Drawing,
    Package,
    drawings,
    fetch,
    read_meanings,
    style_caption,
)

# 3D and glossy pictures of one emoji are often near copies of each other, so neither style is held out.
HELDOUT_STYLES = ("flat", "noto", "blob")
NEAR_COPY = 8.0  # mean absolute difference on white, of 255, below which two drawings count as the same
MIN_COVERAGE = 0.02  # share of pixels that an SVG drawing must cover to count as rendered
# About half have a drawing or two in heldout; carrot and saxophone are of val.
SAMPLE_CONCEPTS = (
    "red apple", "whale", "lemon", "umbrella", "eggplant", "cloud", "strawberry", "penguin", "banana", "rocket",
    "carrot", "saxophone", "crayon",
)  # fmt: skip


def fit_square(picture: Image.Image, size: int) -> np.ndarray:
    """Any RGBA picture -> ``(size, size, 4)`` uint8, straight alpha; transparent margins keep the aspect.

    Colours are averaged with alpha as their weight, so what hides under transparent pixels never bleeds in.
    Pixels that end up wholly transparent are black.
    """
    rgba = np.asarray(picture.convert("RGBA"), np.float32) / 255
    rgba[..., :3] *= rgba[..., 3:]
    height, width = rgba.shape[:2]
    side = max(height, width)
    canvas = np.zeros((side, side, 4), np.float32)
    top, left = (side - height) // 2, (side - width) // 2
    canvas[top : top + height, left : left + width] = rgba
    if side != size:
        kernel = Image.Resampling.BOX if side % size == 0 else Image.Resampling.LANCZOS
        planes = [Image.fromarray(plane) for plane in np.ascontiguousarray(canvas.transpose(2, 0, 1))]
        canvas = np.stack([np.asarray(plane.resize((size, size), kernel)) for plane in planes], -1)
    alpha = canvas[..., 3:].clip(0, 1)
    colour = np.where(alpha > 1e-3, canvas[..., :3] / alpha.clip(1e-3), 0).clip(0, 1)
    out = (np.concatenate([colour, alpha], -1) * 255 + 0.5).astype(np.uint8)
    out[out[..., 3] == 0] = 0
    return out


def render_svg(text: str, size: int) -> np.ndarray:
    """SVG text -> ``(size, size, 4)`` uint8, straight alpha; drawn twice as large, then averaged down.

    Raises ValueError when (nearly) nothing is drawn or the text is no SVG. The system's fonts are not read.
    """
    import resvg_py

    png = resvg_py.svg_to_bytes(svg_string=text, width=2 * size, skip_system_fonts=True)
    rgba = fit_square(Image.open(io.BytesIO(bytes(png))), size)
    if (rgba[..., 3] > 16).mean() <= MIN_COVERAGE:
        raise ValueError("the drawing is (nearly) empty")
    return rgba


def render(job: tuple[Drawing, int]) -> tuple[np.ndarray, bytes] | str:
    """One drawing -> its pixels and their WebP bytes, or the reason why it cannot be drawn."""
    drawing, size = job
    try:
        if isinstance(drawing.source, bytes):
            with Image.open(io.BytesIO(drawing.source)) as picture:
                rgba = fit_square(picture, size)
        else:
            rgba = render_svg(drawing.source, size)
    except (KeyboardInterrupt, SystemExit, ImportError):
        raise
    except (
        BaseException
    ) as fault:  # resvg's panics are no Exception; one broken drawing must not end the build
        return f"{type(fault).__name__}: {fault}"
    return rgba, encode(rgba)


def encode(rgba: np.ndarray) -> bytes:
    """Lossless WebP of ``(S, S, 4)`` uint8; colours under alpha 0 are kept as they are."""
    buffer = io.BytesIO()
    Image.fromarray(rgba).save(buffer, "WEBP", lossless=True, exact=True, quality=100, method=4)
    return buffer.getvalue()


def _fraction(text: str, of: int) -> bool:
    """True for one ``text`` in ``of``, by its SHA-1: the same on every machine and in every build."""
    return int.from_bytes(hashlib.sha1(text.encode()).digest(), "big") % of == 0


def assign_splits(keys: Sequence[str], styles: Sequence[str], rgba: np.ndarray) -> list[str]:
    """The split of each drawing; ``rgba`` is ``(N, S, S, 4)`` uint8.

    ``val``: one emoji in 20, in no style ever shown. ``heldout``: one drawing in 11 of the flat, noto and
    blob styles whose emoji stays in ``train`` in another style, unless a drawing there looks nearly the same.
    ``train``: the rest.
    """
    split = ["val" if _fraction(key, 20) else "train" for key in keys]
    alpha = rgba[..., 3:].astype(np.float32) / 255
    on_white = (rgba[..., :3] * alpha + 255 * (1 - alpha) + 0.5).astype(np.uint8).astype(np.int16)
    drawn = {}
    for i, key in enumerate(keys):
        drawn.setdefault(key, []).append(i)
    for i, (key, style) in enumerate(zip(keys, styles, strict=True)):
        if split[i] == "train" and style in HELDOUT_STYLES and _fraction(f"{key}|{style}", 11):
            others = [j for j in drawn[key] if j != i and split[j] == "train"]
            if others and np.abs(on_white[others] - on_white[i]).mean((1, 2, 3)).min() >= NEAR_COPY:
                split[i] = "heldout"
    return split


def manifest(styles: Iterable[str], records: Sequence[dict], size: int, left_out: Sequence[str]) -> dict:
    """What the tar says about itself: counts, and for every style its package, version, licence, holder."""

    def origin(package: Package) -> dict:
        return {
            "package": package.name,
            "version": package.version,
            "licence": package.licence,
            "holder": package.holder,
            "sha512": package.sha512,
        }

    counts = Counter(record["style"] for record in records)
    return {
        "format": 1,
        "size": size,
        "images": len(records),
        "splits": dict(sorted(Counter(record["split"] for record in records).items())),
        "styles": {style: {**origin(STYLES[style].package), "images": counts[style]} for style in styles},
        "names": origin(NAMES),
        "left_out": list(left_out),
    }


def write_set(path: Path, facts: dict, samples: Iterable[tuple[dict, bytes]]) -> None:
    """Writes the tar: ``manifest.json`` first, then ``NNNNNN.webp`` and ``NNNNNN.json`` per drawing.

    The same content gives the same bytes (no times, no owners). The file has its name only when it is whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:

                def add(name: str, data: bytes) -> None:
                    member = tarfile.TarInfo(name)
                    member.size, member.mode = len(data), 0o644
                    archive.addfile(member, io.BytesIO(data))

                add("manifest.json", json.dumps(facts, indent=1, ensure_ascii=False).encode())
                for i, (record, webp) in enumerate(samples):
                    add(f"{i:06d}.webp", webp)
                    add(f"{i:06d}.json", json.dumps(record, ensure_ascii=False).encode())
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def pick_sample(records: Sequence[dict], count: int) -> list[int]:
    """Indices of ``count`` drawings: those of ``SAMPLE_CONCEPTS``, in every style they have."""
    order = {concept: place for place, concept in enumerate(SAMPLE_CONCEPTS)}
    fit = [i for i, record in enumerate(records) if record["concept"] in order]
    fit.sort(key=lambda i: (order[records[i]["concept"]], i))
    return sorted(fit[:count])


def build(out: Path, cache: Path, styles: Sequence[str], size: int, workers: int) -> dict:
    """Fetches, renders, splits and writes the set; returns the manifest."""
    from tqdm import tqdm

    packages = [NAMES, *(STYLES[style].package for style in styles)]
    tarballs = {p.name: fetch(p, cache) for p in tqdm(packages, "packages", disable=None)}
    meanings = read_meanings(tarballs[NAMES.name])
    jobs = [
        (drawing, size)
        for style in styles
        for drawing in drawings(style, tarballs[STYLES[style].package.name], meanings)
    ]
    with get_context("spawn").Pool(workers) as pool:
        done = list(tqdm(pool.imap(render, jobs, chunksize=16), "drawings", total=len(jobs), disable=None))
    kept, left_out = [], []
    for (drawing, _), result in zip(jobs, done, strict=True):
        if isinstance(result, str):
            left_out.append(f"{drawing.style}/{drawing.key}: {result}")
        else:
            kept.append((drawing, *result))
    if not kept:
        raise RuntimeError(f"none of the {len(jobs)} drawings could be rendered; the first: {left_out[:1]}")
    order = [drawing for drawing, *_ in kept]
    split = assign_splits([d.key for d in order], [d.style for d in order], np.stack([p for _, p, _ in kept]))
    records = []
    for drawing, part in zip(order, split, strict=True):
        meaning = meanings[drawing.key]
        records.append(
            {
                "key": drawing.key,
                "caption": style_caption(drawing.style, meaning.name, meaning.group),
                "concept": meaning.name,
                "style": drawing.style,
                "tags": list(meaning.tags),
                "group": meaning.group,
                "subgroup": meaning.subgroup,
                "split": part,
            }
        )
    facts = manifest(styles, records, size, left_out)
    write_set(out, facts, zip(records, (webp for *_, webp in kept), strict=True))
    return facts


def write_sample(source: Path, out: Path, count: int = 64) -> dict:
    """Writes ``count`` drawings of a built set as a small set of its own."""
    from .emoji import load_sprites

    whole = load_sprites(source)
    chosen = pick_sample(whole.records, count)
    records = [whole.records[i] for i in chosen]
    styles = dict.fromkeys(record["style"] for record in whole.records)
    facts = manifest(styles, records, whole.rgba.shape[1], ())
    write_set(out, facts, ((whole.records[i], encode(whole.rgba[i])) for i in chosen))
    return facts


def compare(path: Path, reference: Path) -> list[str]:
    """Compares a built set with an ``.npz`` of the same fields (``rgba``, ``key``, ``caption`` ...).

    Colours under alpha 0 are not compared. Returns one line per kind of difference.
    """
    from .emoji import load_sprites

    ours = load_sprites(path)
    with np.load(reference, allow_pickle=False) as data:
        theirs = {name: data[name] for name in data.files}
    index = {(k, s): i for i, (k, s) in enumerate(zip(theirs["key"], theirs["style"], strict=True))}
    names = [(record["key"], record["style"]) for record in ours.records]
    lines = []
    here, there = set(names), set(index)
    for label, extra in (("only here", here - there), ("only in the reference", there - here)):
        if extra:
            lines.append(f"{label}: {len(extra)} drawings, e.g. {sorted(extra)[:3]}")
    pairs = [(i, index[name]) for i, name in enumerate(names) if name in index]
    for column in ("caption", "concept", "tags", "group", "subgroup", "split"):
        texts = [", ".join(v) if isinstance(v := ours.records[i][column], list) else v for i, _ in pairs]
        wrong = [n for n, (_, j) in enumerate(pairs) if texts[n] != theirs[column][j]]
        if wrong:
            shown = [(*names[pairs[n][0]], texts[n], str(theirs[column][pairs[n][1]])) for n in wrong[:3]]
            lines.append(f"{column}: {len(wrong)} differ, e.g. {shown}")
    if ours.rgba.shape[1:] != theirs["rgba"].shape[1:]:
        lines.append(f"pixels: {ours.rgba.shape[1:]} here, {theirs['rgba'].shape[1:]} in the reference")
        return lines
    off = []
    for i, j in pairs:
        a, b = ours.rgba[i].astype(np.int16), theirs["rgba"][j].astype(np.int16)
        b[b[..., 3] == 0] = 0
        if (a != b).any():
            off.append((int(np.abs(a - b).max()), int((a != b).any(-1).sum()), *names[i]))
    if off:
        worst = "; ".join(
            f"{style} {key}: {n} pixels by up to {most}" for most, n, key, style in sorted(off)[-3:]
        )
        lines.append(f"pixels: {len(off)} drawings differ, e.g. {worst}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of ``train/build_emoji.py``; returns the exit status."""
    parser = argparse.ArgumentParser(description="Builds the emoji set from pinned npm packages (43 MB).")
    parser.add_argument("--out", type=Path, default=Path("data/emoji64.tar"))
    parser.add_argument("--size", type=int, default=64, help="side of the pictures in pixels (default 64)")
    parser.add_argument(
        "--styles", default=",".join(DEFAULT_STYLES),
        help=f"of {','.join(STYLES)}; by default those under MIT or Apache-2.0: %(default)s",
    )  # fmt: skip
    parser.add_argument("--cache", type=Path, help="folder of the packages (default: npm/ beside the result)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--check", type=Path, metavar="NPZ", help="compare with an npz of the same fields")
    parser.add_argument("--sample", type=Path, metavar="TAR", help="also write 64 of the drawings as a set")
    options = parser.parse_args(arguments)
    styles = list(dict.fromkeys(options.styles.split(",")))
    unknown = [style for style in styles if style not in STYLES]
    try:
        if unknown:
            raise ValueError(f"--styles: {unknown[0]!r} is unknown; choose from {','.join(STYLES)}")
        if not 8 <= options.size <= 512:
            raise ValueError(f"--size: {options.size} is not between 8 and 512")
        if options.workers < 1:
            raise ValueError(f"--workers: {options.workers} is not 1 or more")
        for style in (s for s in styles if s in ATTRIBUTION_STYLES):
            package = STYLES[style].package
            print(
                f"note: {style} is {package.licence}: credit {package.holder} where you show or ship results"
            )
        cache = options.cache or options.out.parent / "npm"
        facts = build(options.out, cache, styles, options.size, options.workers)
        print(
            f"{options.out}: {facts['images']} drawings, {facts['splits']}, "
            f"{len(facts['left_out'])} left out, {options.out.stat().st_size / 1e6:.1f} MB"
        )
        if options.sample:
            cut = write_sample(options.out, options.sample)
            print(f"{options.sample}: {cut['images']} drawings, {options.sample.stat().st_size / 1e3:.0f} kB")
        if options.check:
            differences = compare(options.out, options.check)
            print("\n".join(differences) or f"same content as {options.check}")
            return 1 if differences else 0
    except (ValueError, RuntimeError, OSError) as fault:
        print(fault, file=sys.stderr)
        return 2
    except ModuleNotFoundError as fault:
        print(f'{fault.name} is not installed; type: pip install "mhla_diffusion[train]"', file=sys.stderr)
        return 2
    return 0
