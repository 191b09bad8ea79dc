"""Are all videos of a plan there, readable, and alike? VBench itself scores what it finds and says nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VIDEO_SUFFIXES = {".mp4", ".gif", ".mkv", ".webm", ".avi", ".mov"}
LONG_SECONDS = 5.0  # from here on VBench-Long is meant, whose scores are others


def pyav():
    """The module that reads videos. Raises ValueError, saying what to type, where it is not installed."""
    try:
        import av
    except ImportError:
        raise ValueError("reading videos needs PyAV: pip install 'mhla_diffusion[video]'") from None
    return av


def decoded(path: Path) -> Iterator[np.ndarray]:
    """Frames of a video, uint8 `(H, W, 3)`, one at a time. Raises ValueError when it cannot be read."""
    av = pyav()
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError("has no video in it")
            for frame in container.decode(video=0):
                yield frame.to_ndarray(format="rgb24")
    except (OSError, av.FFmpegError) as error:
        raise ValueError(f"cannot be read ({' '.join(str(error).split())})") from None


def measure(path: Path, whole: bool) -> dict | str:
    """Frames, size and rate of a video, or what is wrong with it. `whole` decodes every frame, otherwise the first."""
    av = pyav()
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                return "has no video in it"
            stream = container.streams.video[0]
            count = 0
            for frame in container.decode(stream):
                count += 1
                size = (frame.width, frame.height)
                if not whole:
                    break
            if not count:
                return "has no frames"
            if whole and stream.frames and count < stream.frames:
                return f"is cut short: {count} of {stream.frames} frames"
            rate = stream.average_rate
            return {
                "frames": count if whole else stream.frames or None,
                "width": size[0],
                "height": size[1],
                "fps": None if rate is None else float(rate),
            }
    except (OSError, ValueError, av.FFmpegError) as error:
        return f"cannot be read ({' '.join(str(error).split())})"


def check_videos(
    folder: Path,
    plan: dict,
    *,
    fps: float | None = None,
    size: tuple[int, int] | None = None,
    frames: int | None = None,
    whole: bool = False,
) -> dict:
    """Report, ready for JSON: counts, and lists of what is missing, unexpected, doubled, unreadable, or unlike.

    Args:
        fps, size (width, height), frames: what every video must have; those not given, what most of them have.
        whole: decode every frame, which finds files that are cut short.

    Raises ValueError when there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give the one with the videos")
    present = sorted(p.name for p in folder.iterdir() if p.is_file() and p.suffix.lower() in VIDEO_SUFFIXES)
    expected = [row["file"] for row in plan["videos"]]
    missing = [name for name in expected if name not in set(present)]
    by_stem = defaultdict(list)
    for name in present:
        by_stem[Path(name).stem].append(name)
    doubled = [names for names in by_stem.values() if len({Path(name).suffix for name in names}) > 1]
    measured, unreadable = {}, {}
    for name in sorted(set(expected) & set(present)):
        found = measure(folder / name, whole)
        if isinstance(found, str):
            unreadable[name] = found
        else:
            measured[name] = found
    common = {"fps": fps, "frames": frames}
    common |= {"width": size[0] if size else None, "height": size[1] if size else None}
    for key, value in common.items():
        if value is None and measured:
            common[key] = Counter(row[key] for row in measured.values()).most_common(1)[0][0]
    unlike = {}
    for name, row in measured.items():
        parts = [
            f"{key} {row[key]}, not {value}"
            for key, value in common.items()
            if value is not None and row[key] is not None and abs(row[key] - value) > 1e-3 * value
        ]
        if parts:
            unlike[name] = "; ".join(parts)
    notes = []
    if common["fps"] and common["frames"] and common["frames"] / common["fps"] >= LONG_SECONDS:
        notes.append(
            f"videos of {common['frames'] / common['fps']:.1f} s: from 5 s on papers report VBench-Long"
        )
    return {
        "expected": len(expected),
        "found": len(expected) - len(missing),
        "missing": missing,
        "unexpected": [name for name in present if name not in set(expected)],
        "doubled": doubled,
        "unreadable": unreadable,
        "unlike": unlike,
        "videos": common,
        "warnings": notes,
    }


def faults(report: dict) -> list[str]:
    """What keeps the set from being scored, a line each, with the first example; empty when it is whole."""
    found = []
    if report["missing"]:
        found.append(
            f"{report['found']} of {report['expected']} expected videos found; first missing: {report['missing'][0]!r}"
        )
    if report["doubled"]:
        found.append(
            f"{len(report['doubled'])} videos are there in two formats, first: {report['doubled'][0]}"
        )
    for key, words in (("unreadable", "cannot be used"), ("unlike", "differ from the others")):
        if report[key]:
            name, why = next(iter(report[key].items()))
            found.append(f"{len(report[key])} videos {words}, first: {name!r} {why}")
    return found
