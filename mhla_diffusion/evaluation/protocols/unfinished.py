"""All that decides the numbers of a run, so that what an unfinished one has left is taken up by the same run alone."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...provenance import DISTRIBUTIONS, versions
from ...weights import find_pipeline
from ..faults import MissingWeights
from ..kept import Kept
from ..networks.weight_files import find_weights, sha256_of
from .inputs import Inputs
from .schema import Part, Protocol
from .scorers import scorers

# Whose releases a number depends on.
PACKAGES = (*DISTRIBUTIONS, "torchmetrics", "open_clip_torch", "efficientnet-lite-pytorch", "av")


def unfinished(
    protocol: Protocol, inputs: Inputs, parts: dict[str, Part], say: Callable[[str], object]
) -> Kept | None:
    """What this run keeps and takes up; None where nothing is to be kept, or a file that decides cannot be read."""
    if inputs.unfinished is None:
        return None
    try:
        kept = Kept(inputs.unfinished, decides(protocol, inputs, parts), say)
    except (OSError, zipfile.BadZipFile) as error:  # the scorers say what it means to them
        say(f"nothing is kept, should this run break off: {' '.join(str(error).split())}")
        return None
    if not kept.folder.is_dir() and (others := kept.others()):
        say(f"{inputs.unfinished} is of a run with other {', '.join(others)}: nothing of it is taken up")
    return kept


def decides(protocol: Protocol, inputs: Inputs, parts: dict[str, Part]) -> dict[str, Any]:
    """The protocol, the settings, and sha256 of every file that is read, the program's own among them."""
    from ..emoji_world.scenes import LIST

    known = [scorers()[part.scorer] for part in parts.values()]
    roles = sorted({role for scorer in known for role in (*scorer.roles, *scorer.optional)})
    return {
        "protocol": protocol.sha256,
        "parts": {name: [part.metrics, part.options] for name, part in parts.items()},
        "samples": [inputs.samples, contents_of(inputs.samples, protocol.samples.kind, inputs.limit)],
        "reference": [inputs.reference, contents_of(inputs.reference, "pictures", inputs.limit)],
        "prompts": [inputs.prompts, contents_of(inputs.prompts or str(LIST))],
        "results": [[path, contents_of(path)] for path in inputs.results],
        "plan": [inputs.plan, contents_of(inputs.plan)],
        "weights": {role: weights_of(role, inputs.weights.get(role)) for role in roles},
        "seed": inputs.seed,
        "batch size": inputs.batch_size,
        "limit": inputs.limit,
        "splits": [inputs.samples_split, inputs.reference_split],
        "background": inputs.background,
        "mixed sizes": inputs.mixed_sizes,
        "device": device_of(inputs.device),
        "versions": versions(PACKAGES),
        "program": program(),
    }


def program() -> str:
    """sha256 of this package's sources: of a checkout that changes, the release says too little."""
    folder = Path(__file__).resolve().parents[2]
    sources = sorted(folder.rglob("*.py"))
    return digest_of(folder, sources, len(sources))


def contents_of(source: str | None, kind: str | None = None, limit: int | None = None) -> str | None:
    """sha256 of a file's bytes, or of the names and bytes of a folder's files that samples of a kind are read from.

    Of an .npz, which may hold 50,000 pictures, of the checksums that it carries. None for what is not there.
    """
    if source is None:
        return None
    if kind == "pipeline":
        return sha256_of(find_pipeline(source))
    path = Path(source).expanduser()
    if path.is_dir():
        files = files_of(path, kind)
        return digest_of(path, files[:limit], len(files))
    if path.suffix == ".npz" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            lines = [f"{file.filename} {file.file_size} {file.CRC:08x}" for file in archive.infolist()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return sha256_of(path) if path.exists() else None


def files_of(folder: Path, kind: str | None) -> list[Path]:
    """The files of a folder that a scorer reads, in their order."""
    if kind == "videos":
        from ..vbench.check import VIDEO_SUFFIXES

        return sorted(path for path in folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)
    if kind is not None:
        from ..decoding import picture_files

        return picture_files(folder)
    # As VBench writes its results.
    return sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".zip"))


def digest_of(folder: Path, files: Sequence[Path], total: int) -> str:
    """Of the names and bytes of files, and of how many there are."""
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        hashes = pool.map(sha256_of, files)
        lines = [
            f"{path.relative_to(folder).as_posix()} {found}"
            for path, found in zip(files, hashes, strict=True)
        ]
    return hashlib.sha256("\n".join([f"{total}", *lines]).encode()).hexdigest()


def weights_of(role: str, given: str | None) -> str | None:
    """sha256 of the weights that a run would find; None where there are none, and the run does without."""
    try:
        return sha256_of(find_weights(role, given).path)
    except MissingWeights:
        return None


def device_of(device: str) -> str:
    """What computes: numbers of another GPU, or of none, are not the same to the last digit. ValueError for none."""
    import torch

    from ..networks.extractors import usable

    where = usable(device)
    return torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
