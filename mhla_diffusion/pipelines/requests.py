"""What is asked for: prompts, seeds, numbers and places, checked before any heavy import."""

import json
import math
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mhla_diffusion.pipelines.pictures import slug
from mhla_diffusion.pipelines.videos import FASTEST_GIF, check_encoder, check_fps
from mhla_diffusion.weights import read_json

VIDEO_PIPELINES = ("MHLAWanPipeline", "WanPipeline", "SanaVideoPipeline")
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Request:
    """One picture or video that is asked for; None means the pipeline's default."""

    index: int
    prompt: str
    seed: int
    steps: int | None = None
    guidance: float | None = None
    height: int | None = None
    width: int | None = None
    dtype: str = "float32"
    frames: int | None = None
    fps: float | None = None
    suffix: str = ".png"
    name: str | None = None  # of its file, where it is given

    @property
    def file_name(self) -> str:
        return self.name or f"{self.index:04d}_{slug(self.prompt)}_{self.seed}{self.suffix}"

    def differences(self, settings: dict[str, Any], pipeline_sha256: str) -> list[str]:
        """In what a picture with these settings differs from the one asked for; empty if it is that one."""
        if settings.get("pipeline_sha256") != pipeline_sha256:
            return ["other weights"]
        # The same pipeline has the same defaults, so the stored ones stand for what was left open.
        defaults = settings.get("defaults", {})
        found = []
        for name in ("prompt", "seed", "steps", "guidance", "height", "width", "dtype", "frames", "fps"):
            asked = defaults.get(name) if getattr(self, name) is None else getattr(self, name)
            if settings.get(name) != asked:
                found.append(f"{name} {settings.get(name)!r} there, {asked!r} asked")
        return found


def read_prompts(path: str | os.PathLike) -> list[str]:
    """Prompts of a UTF-8 file: one a line, or in a .json file a list of strings or of objects with "prompt".

    Empty lines at the end are dropped. Those between are kept and fail by themselves later, so that the
    others keep their index and their seed. Raises ValueError when the file cannot be read or holds no prompt.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason}): save it as UTF-8, one prompt a line"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read the prompt file {path} ({error.strerror}): give a text file") from None
    # Not splitlines(), which also cuts at a form feed or at Unicode's line separators inside a prompt.
    lines = prompts_of_json(text, path) if Path(path).suffix == ".json" else text.split("\n")
    prompts = [line.strip() for line in lines]
    while prompts and not prompts[-1]:
        prompts.pop()
    if not prompts:
        raise ValueError(f"the prompt file {path} is empty: write one prompt a line into it")
    return prompts


def prompts_of_json(text: str, path: str | os.PathLike) -> list[str]:
    """The strings of a JSON list, or the "prompt" of its objects. Raises ValueError for anything else."""
    try:
        entries = json.loads(text)
        prompts = [entry["prompt"] if isinstance(entry, dict) else entry for entry in entries]
        if isinstance(entries, list) and all(isinstance(prompt, str) for prompt in prompts):
            return prompts
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f'{path} is no JSON list of prompts: write ["a", "b"] or [{{"prompt": "a"}}], or use a .txt file'
    )


def match_seeds(seeds: Sequence[int], count: int) -> list[int]:
    """One seed per prompt: a single one serves all, otherwise there are as many as prompts."""
    if isinstance(seeds, numbers.Integral):
        seeds = [seeds]
    for seed in seeds:
        if not is_whole(seed):
            raise ValueError(f"seed {seed!r} is no whole number: give a number from 0 to {MAX_SEED}")
        if not 0 <= seed <= MAX_SEED:
            raise ValueError(f"seed {seed} is out of range: give a number from 0 to {MAX_SEED}")
    if len(seeds) == 1:
        return list(seeds) * count
    if len(seeds) != count:
        raise ValueError(
            f"{len(seeds)} seeds for {count} prompts (an empty line between prompts counts as one): "
            f"give one seed for all, or {count} joined by commas; for several pictures of each prompt, one call a seed"
        )
    return list(seeds)


def check_names(names: Sequence[str], count: int, suffix: str) -> None:
    """Raise ValueError unless these can be the names of `count` files, each its own, that end in `suffix`."""
    if len(names) != count:
        raise ValueError(f"{len(names)} file names for {count} prompts: give one for each")
    for name in names:
        if "/" in name or os.sep in name or not name.endswith(suffix) or name.startswith("."):
            raise ValueError(
                f"{name!r} cannot be the name of a file here: give names without folders that end in {suffix}, "
                "which text-to-video pipelines write as .mp4 and others as .png"
            )
    if len(set(names)) != count:
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the file name {twice!r} is there twice: give each prompt its own")


def is_whole(value) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_prompts(prompts: Sequence[str]) -> None:
    """Raise ValueError unless `prompts` is a list of strings, one of which is not empty."""
    if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"prompts is {prompts!r}: give a list of strings, one for each picture")
    if not any(prompt.strip() for prompt in prompts):
        raise ValueError('no prompt given: for example mhla generate "a 3D emoji of a red apple"')


def check_numbers(steps: int | None, guidance: float | None, batch_size: int | None) -> None:
    """Raise ValueError for numbers that no pipeline can use."""
    if steps is not None and not (is_whole(steps) and steps >= 1):
        raise ValueError(f"steps is {steps!r}: give a whole number of at least 1, for example --steps 20")
    number = isinstance(guidance, numbers.Real) and math.isfinite(guidance) and guidance >= 0
    if guidance is not None and not number:
        raise ValueError(
            f"guidance is {guidance!r}: give a finite number of at least 0, for example --guidance 4.5"
        )
    if batch_size is not None and not (is_whole(batch_size) and batch_size >= 1):
        raise ValueError(
            f"batch size is {batch_size!r}: give a whole number of at least 1, for example --batch-size 4"
        )


def check_video(video: bool, frames: int | None, fps: float | None, gif: bool) -> None:
    """Raise ValueError unless these options of videos go with the kind of pipeline, and an encoder is installed."""
    if not video:
        given = [
            name
            for name, value in (("frames", frames), ("fps", fps), ("gif", gif or None))
            if value is not None
        ]
        if given:
            raise ValueError(
                f"--{given[0]} is for videos, and this pipeline draws pictures: leave it out, or give a text-to-video "
                "pipeline"
            )
        return
    check_encoder()
    if frames is not None and not (is_whole(frames) and frames >= 1):
        raise ValueError(f"frames is {frames!r}: give a whole number of at least 1, for example --frames 17")
    if fps is not None:
        check_fps(fps)
    if gif and fps is not None and fps > FASTEST_GIF:
        raise ValueError(f"fps is {fps}: a GIF shows at most {FASTEST_GIF} frames a second, leave --gif out")


def makes_videos(folder: Path) -> bool:
    """Whether the pipeline in `folder` makes videos of texts."""
    return read_json(folder / "model_index.json").get("_class_name") in VIDEO_PIPELINES


def check_size(height: int | None, width: int | None, multiple: int) -> None:
    """Raise ValueError, naming the nearest sizes, unless both sides are multiples of `multiple` pixels."""
    for name, value in (("height", height), ("width", width)):
        if value is None or (is_whole(value) and value > 0 and value % multiple == 0):
            continue
        if not is_whole(value):
            raise ValueError(f"{name} is {value!r}: give whole pixels, a multiple of {multiple}")
        below = max(value // multiple, 1) * multiple
        near = f"{below}" if value <= multiple else f"{below} or {below + multiple}"
        raise ValueError(
            f"{name} is {value}: it must be a multiple of {multiple}, for example --{name} {near}"
        )
