"""Pictures from a list of prompts: what is done is skipped, and one bad prompt does not lose the others."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mhla_diffusion.pipelines.pictures import read_settings, save_picture, slug, write_atomically
from mhla_diffusion.weights import DEFAULT_PIPELINE, find_pipeline, fingerprint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Request:
    """One picture that is asked for; None means the pipeline's default."""

    index: int
    prompt: str
    seed: int
    steps: int | None = None
    guidance: float | None = None
    height: int | None = None
    width: int | None = None
    dtype: str = "float32"

    @property
    def file_name(self) -> str:
        return f"{self.index:04d}_{slug(self.prompt)}_{self.seed}.png"

    def differences(self, settings: dict[str, Any], pipeline_sha256: str) -> list[str]:
        """In what the picture that has these settings differs from the one asked for here."""
        defaults = settings.get("defaults", {})
        asked = {
            name: defaults.get(name) if getattr(self, name) is None else getattr(self, name)
            for name in ("prompt", "seed", "steps", "guidance", "height", "width", "dtype")
        }
        found = [
            f"{name} {settings.get(name)!r} there, {value!r} asked"
            for name, value in asked.items()
            if settings.get(name) != value
        ]
        return found + (["other weights"] if settings.get("pipeline_sha256") != pipeline_sha256 else [])


@dataclass
class Report:
    """What became of each prompt: paths drawn now, paths that were there already, and reasons for failures."""

    out: Path
    drawn: list[Path] = field(default_factory=list)
    skipped: list[Path] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)  # index of the prompt -> reason


def read_prompts(path: str | os.PathLike) -> list[str]:
    """Prompts of a UTF-8 text file, one a line. Empty lines at the end are dropped, those between are kept.

    A kept empty line fails by itself later, so that the others keep their index and their seed.
    Raises ValueError when the file cannot be read or holds no prompt.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason}): save it as UTF-8, one prompt a line"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {path} ({error.strerror}): give a text file") from None
    prompts = [line.strip() for line in lines]
    while prompts and not prompts[-1]:
        prompts.pop()
    if not prompts:
        raise ValueError(f"the prompt file {path} is empty: write one prompt a line into it")
    return prompts


def match_seeds(seeds: Sequence[int], count: int) -> list[int]:
    """One seed per prompt: a single one serves all, otherwise there are as many as prompts."""
    for seed in seeds:
        if not 0 <= seed <= MAX_SEED:
            raise ValueError(f"seed {seed} is out of range: give a number from 0 to {MAX_SEED}")
    if len(seeds) == 1:
        return list(seeds) * count
    if len(seeds) != count:
        raise ValueError(
            f"{len(seeds)} seeds for {count} prompts: give one seed for all, or {count} "
            "(an empty line between prompts counts)"
        )
    return list(seeds)


def check_out_folder(out: Path) -> None:
    """Raise ValueError unless pictures can be written into `out`; makes nothing."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"cannot write into {out}: {existing} is a file; give another folder with --out")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(
            f"cannot write into {out}: no permission in {existing}; give another folder with --out"
        )


def check_numbers(steps: int | None, guidance: float | None, batch_size: int) -> None:
    """Raise ValueError for numbers that no pipeline can use."""
    if steps is not None and steps < 1:
        raise ValueError(f"steps is {steps}: give a whole number of at least 1, for example --steps 20")
    if guidance is not None and not (math.isfinite(guidance) and guidance >= 0):
        raise ValueError(
            f"guidance is {guidance}: give a finite number of at least 0, for example --guidance 4.5"
        )
    if batch_size < 1:
        raise ValueError(
            f"batch size is {batch_size}: give a whole number of at least 1, for example --batch-size 4"
        )


def choose_device(device: str) -> torch.device:
    """The device named, or for "auto" CUDA where there is one and else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}: give auto, cpu, cuda or cuda:0") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {device} is not there ({torch.cuda.device_count()} CUDA devices): give cpu or auto"
        )
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> str:
    """Name of the dtype asked for, or for "auto" bfloat16 on CUDA and float32 elsewhere."""
    if dtype == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: give auto, {', '.join(DTYPES)}")
    return dtype
