"""Pictures or videos from a list of prompts: what is done is skipped, and one bad prompt does not lose the others."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from tqdm import tqdm

from mhla_diffusion.folders import check_writable
from mhla_diffusion.loading import check_layout
from mhla_diffusion.pipelines.pictures import contact_sheet, read_settings, sheet_size, write_atomically
from mhla_diffusion.pipelines.requests import (
    Request,
    check_names,
    check_numbers,
    check_prompts,
    check_video,
    makes_videos,
    match_seeds,
)
from mhla_diffusion.pipelines.videos import read_video, read_video_settings, save_video
from mhla_diffusion.weights import DEFAULT_PIPELINE, find_pipeline, fingerprint

if TYPE_CHECKING:
    from mhla_diffusion.pipelines.painter import Painter

# What one picture can fail with without the others being at fault: its values, memory, numbers that blew up.
PICTURE_FAULTS = (ValueError, RuntimeError, ArithmeticError)
WEBP_SIDE = 16383  # pixels that a WebP has at most


@dataclass
class Report:
    """What became of each prompt, by its index: path drawn now, path that was there already, or reason."""

    drawn: dict[int, Path] = field(default_factory=dict)
    skipped: dict[int, Path] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def summary(self) -> str:
        parts = [
            f"{len(self.drawn)} drawn",
            f"{len(self.skipped)} there already",
            f"{len(self.failed)} failed",
        ]
        return ", ".join(part for part in parts if not part.startswith("0 ")) or "nothing to do"


def generate(
    prompts: Sequence[str],
    *,
    pipeline: str | os.PathLike = DEFAULT_PIPELINE,
    seeds: int | Sequence[int] = (0,),
    names: Sequence[str] | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    fps: float | None = None,
    out: str | os.PathLike = "outputs",
    batch_size: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    offload: str | None = None,
    overwrite: bool = False,
    sheet: str | os.PathLike | None = None,
    columns: int = 4,
    gif: bool = False,
) -> Report:
    """Draw one picture per prompt into the folder `out`, as `NNNN_<words>_<seed>.png` with a JSON beside it.

    Of a text-to-video pipeline (Wan, SANA-Video), `.mp4` files of `frames` frames, `fps` a second, and with `gif` the
    same as a GIF. At a time `batch_size` are made, None: 4 pictures or 1 video.

    With `names`, files have those and no JSON beside them, which programs that read a folder of videos would take for
    one; the settings are inside.

    `offload`, "model" or "sequential", keeps weights that do not compute in the machine's memory.

    The noise of a picture depends on its seed only (a CPU generator), not on its batch or the device. A
    picture that is there with the same settings is skipped; one with other settings is replaced only by
    `overwrite`.
    Of a class-conditional pipeline (DiT), a prompt is the name or the number of a class.
    An empty prompt, no class of the pipeline, or one that fails while it is drawn, is reported and the others are
    drawn.

    Raises ValueError, before anything is computed or written, for settings that cannot be met.
    """
    out = Path(out)
    check_numbers(steps, guidance, batch_size)
    check_prompts(prompts)
    seeds = match_seeds(seeds, len(prompts))
    check_writable(out, "--out")
    if sheet is not None:
        check_writable(Path(sheet).parent, "--sheet")
        if Path(sheet).is_dir() or columns < 1:
            raise ValueError(
                f"--sheet {sheet} --columns {columns}: give the name of a PNG or WebP file and at least 1 column"
            )
        side = max(sheet_size(len(prompts), columns))
        if is_webp(Path(sheet)) and side > WEBP_SIDE:
            raise ValueError(
                f"--sheet {sheet}: {len(prompts)} pictures in {columns} columns make a side of {side} pixels, a WebP's "
                f"has at most {WEBP_SIDE}: give more --columns, or a .png"
            )
    check_layout(Path(pipeline).expanduser())
    folder = find_pipeline(pipeline)
    video = makes_videos(folder)
    check_video(video, frames, fps, gif)
    batch_size = batch_size or (1 if video else 4)
    suffix = ".mp4" if video else ".png"
    if names is not None:
        check_names(names, len(prompts), suffix)

    # Imported late: torch and Diffusers take seconds, and mistakes should be named at once.
    from mhla_diffusion.pipelines.painter import Painter, check_offload, choose_device, choose_dtype

    if video:
        from mhla_diffusion.pipelines.video_painter import video_painter

        Painter = video_painter(folder)

    chosen_device = choose_device(device)
    check_offload(offload, chosen_device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    sha256 = fingerprint(folder)

    report = Report()
    unit = "video" if video else "picture"
    pending = []
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        request = Request(
            index,
            prompt.strip(),
            seed,
            steps,
            guidance,
            height,
            width,
            chosen_dtype,
            frames,
            fps,
            suffix,
            names[index] if names is not None else None,
        )
        path = out / request.file_name
        if not request.prompt:
            report.failed[index] = "the prompt is empty"
        elif overwrite or not path.exists():
            pending.append(request)
        else:
            settings = read_video_settings(path) if video else read_settings(path)
            found = request.differences(settings, sha256) if settings else ["no settings in it"]
            if found:
                raise ValueError(
                    f"{path} is another {unit} ({', '.join(found)}): use --overwrite or another --out"
                )
            report.skipped[index] = path

    if pending:
        painter = Painter(folder, sha256, chosen_device, chosen_dtype, offload)
        painter.check(pending[0])
        faults = {request.index: painter.fault(request) for request in pending}
        report.failed |= {index: reason for index, reason in faults.items() if reason}
        pending = [request for request in pending if request.index not in report.failed]
        with tqdm(total=len(pending), unit=unit) as bar:
            for start in range(0, len(pending), batch_size):
                draw_batch(painter, pending[start : start + batch_size], out, report)
                bar.update(len(pending[start : start + batch_size]))
    if gif:
        write_gifs([*report.drawn.values(), *report.skipped.values()], overwrite)
    if sheet is not None:
        paths = report.drawn | report.skipped
        write_sheet(Path(sheet), [paths.get(index) for index in range(len(prompts))], prompts, columns)
    return report


def draw_batch(painter: "Painter", requests: Sequence[Request], out: Path, report: Report) -> None:
    """Draw and save the requests together; if that fails, one by one, so that only the bad ones are lost."""
    try:
        images = painter.draw(requests)
    except PICTURE_FAULTS as error:
        if len(requests) == 1:
            report.failed[requests[0].index] = " ".join(str(error).split()) or type(error).__name__
            return
        for request in requests:
            draw_batch(painter, [request], out, report)
        return
    for request, image in zip(requests, images, strict=True):
        path = out / request.file_name
        out.mkdir(parents=True, exist_ok=True)  # only now, so that a run that draws nothing leaves nothing
        painter.save(image, path, request)
        report.drawn[request.index] = path


def write_gifs(videos: Sequence[Path], overwrite: bool) -> None:
    """Write each video as a GIF beside it, unless one is there that is no older."""
    for path in videos:
        gif = path.with_suffix(".gif")
        if overwrite or not gif.exists() or gif.stat().st_mtime_ns < path.stat().st_mtime_ns:
            video = read_video(path)
            settings = {name: value for name, value in (video.settings or {}).items() if name != "video"}
            save_video(video.frames, gif, fps=video.fps, settings=settings)


def middle(path: Path) -> Image.Image:
    """The picture at this path, or the frame in the middle of the video."""
    if path.suffix == ".mp4":
        frames = read_video(path).frames
        return Image.fromarray(frames[len(frames) // 2])
    with Image.open(path) as image:
        return image.convert("RGB")


def is_webp(path: Path) -> bool:
    return path.suffix.lower() == ".webp"


def write_sheet(path: Path, pictures: Sequence[Path | None], captions: Sequence[str], columns: int) -> None:
    """Write a contact sheet of pictures or videos on disk, lossy as .webp, else PNG; None leaves its square empty."""
    images = [None if picture is None else middle(picture) for picture in pictures]
    drawn = contact_sheet(images, captions, columns=columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {"format": "WEBP", "quality": 90, "method": 6} if is_webp(path) else {"format": "PNG"}
    write_atomically(path, lambda file: drawn.save(file, **kind))
