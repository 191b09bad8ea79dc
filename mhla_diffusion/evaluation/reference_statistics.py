"""Mean and covariance of a set's features in an .npz: ours, and those of ADM's evaluator, which can read ours as well.

Keys: `mu`, `sigma` (tap "pool"), `mu_s`, `sigma_s` (tap "spatial", sFID), `mu.<tap>`, `sigma.<tap>` for others; ours
also hold `count` and `about`, the JSON of the network, its weights and preparation, and of the pictures.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..pipelines.pictures import write_atomically
from .faults import ReferenceMismatch
from .metrics.moments import Moments
from .networks.weight_files import sha256_of

SUFFIX = {"pool": "", "spatial": "_s"}


def suffix_of(tap: str) -> str:
    return SUFFIX.get(tap, f".{tap}")


@dataclass(frozen=True)
class Statistics:
    """Moments by tap. `about` is None in a file that is not ours: nothing then tells the network."""

    moments: dict[str, Moments]
    about: dict | None
    path: str
    sha256: str


def write_statistics(path: Path, moments: dict[str, Moments], about: dict) -> None:
    """Write an .npz, whole or not at all. Raises ValueError for another suffix, or taps of different counts."""
    if path.suffix != ".npz":
        raise ValueError(f"{path} must end with .npz")
    counts = {value.count for value in moments.values()}
    if len(counts) != 1 or None in counts:
        raise ValueError(
            f"the taps were gathered over {sorted(map(str, counts))} pictures: gather them in one pass"
        )
    arrays = {"count": np.int64(counts.pop()), "about": np.array(json.dumps(about))}
    for tap, value in moments.items():
        arrays[f"mu{suffix_of(tap)}"] = value.mean.double().cpu().numpy()
        arrays[f"sigma{suffix_of(tap)}"] = value.covariance.double().cpu().numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: np.savez(file, **arrays))


def holds_statistics(path: Path) -> bool:
    """Whether an .npz has a mean and a covariance; False for other files."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {"mu.npy", "sigma.npy"} <= set(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def read_statistics(path: str | Path) -> Statistics:
    """Statistics of an .npz. Nothing pickled is read.

    Raises ValueError, naming the file and the array, when an array is missing, of the wrong shape, not finite, or not
    symmetric, or when what the file says about itself is nothing that `write_statistics` wrote.
    """
    path = Path(path).expanduser()
    if not holds_statistics(path):
        raise ValueError(
            f"{path} holds no statistics (mu, sigma): make them with mhla eval stats PICTURES {path.name}"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            names = [name for name in file.files if name.startswith("mu")]
            arrays = {
                name: file[name].astype(np.float64, casting="same_kind")
                for mean in names
                for name in (mean, f"sigma{mean[2:]}")
                if name in file.files
            }
            count = int(file["count"]) if "count" in file.files else None
            about = json.loads(str(file["about"])) if "about" in file.files else None
        if about is not None and not {"network", "protocol"} <= about["features"].keys():
            raise ValueError("about names no network and no protocol")
        if count is not None and count < 2:
            raise ValueError(f"count is {count}")
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ValueError(f"{path} cannot be read ({error!r}): make or copy it again") from None
    moments = {}
    for mean in names:
        ending = mean[2:]
        tap = {value: key for key, value in SUFFIX.items()}.get(ending, ending[1:])
        if f"sigma{ending}" not in arrays:
            raise ValueError(f"{path} has {mean} without sigma{ending}: make it again")
        mu, sigma = arrays[mean], arrays[f"sigma{ending}"]
        if mu.ndim != 1 or sigma.shape != (len(mu), len(mu)):
            raise ValueError(
                f"{path}: {mean} has shape {mu.shape}, sigma{ending} {sigma.shape}: make it again"
            )
        if not (np.isfinite(mu).all() and np.isfinite(sigma).all()):
            raise ValueError(f"{path}: {mean} or sigma{ending} is not finite: make it again")
        if np.abs(sigma - sigma.T).max() > 1e-3 * np.abs(sigma).max():
            raise ValueError(f"{path}: sigma{ending} is not symmetric, so no covariance: make it again")
        moments[tap] = Moments(torch.from_numpy(mu), torch.from_numpy(sigma), count)
    return Statistics(moments, about, str(path), sha256_of(path))


def check_reference(statistics: Statistics, network: dict, taps: dict[str, int]) -> list[str]:
    """Warnings about a reference for features of `network` (an extractor's `about`).

    Raises ReferenceMismatch when it lacks a tap or comes from another network, resize or scaling.
    """
    theirs = None if statistics.about is None else statistics.about["features"]
    for key in ("network", "protocol") if theirs else ():
        if theirs[key] != network[key]:
            raise ReferenceMismatch(
                f"{statistics.path} was made with {key} {theirs[key]!r}, these samples with {network[key]!r}: "
                "make the statistics again, or choose the same"
            )
    for tap, width in taps.items():
        if tap not in statistics.moments:
            raise ReferenceMismatch(
                f"{statistics.path} has no {tap!r} features, only {', '.join(statistics.moments)}: leave the metric "
                "out, or make the statistics again"
            )
        found = len(statistics.moments[tap].mean)
        if found != width:
            raise ReferenceMismatch(f"{statistics.path}: {found} {tap!r} features, the network has {width}")
    if not theirs:
        return [f"{statistics.path} does not say which network made it: taken for {network['protocol']}"]
    hashes = [(side.get("weights") or {}).get("sha256") for side in (theirs, network)]
    if hashes[0] != hashes[1]:
        return [f"{statistics.path} was made with another file of weights ({str(hashes[0])[:12]}...)"]
    return []
