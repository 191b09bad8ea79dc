"""Runs of protocols that tests break off, and what is left of them."""

import numpy as np
import tiny_clip
from PIL import Image
from protocol_files import protocol

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation import decoding
from mhla_diffusion.pipelines.pictures import save_picture

THREE = (
    "samples: {kind: pictures}\nreference: {kind: pictures}\nparts:\n"
    "- {scorer: fd_efficientnet, metrics: [fd]}\n- {scorer: smoke}\n- {scorer: clip_score}\n"
)
TWO = THREE.replace("- {scorer: fd_efficientnet, metrics: [fd]}\n", "")  # of no network that takes its time


def draw_folders(tmp_path):
    """Pictures that carry a prompt, others to compare them with, and the weights of a small CLIP."""
    draw = np.random.default_rng(0)
    for name, count in (("samples", 10), ("real", 8)):
        (tmp_path / name).mkdir()
        for index in range(count):
            picture = Image.fromarray(draw.integers(0, 256, (24, 24, 3), dtype=np.uint8))
            save_picture(picture, tmp_path / name / f"{index}.png", {"prompt": "a cat"}, beside=False)
    tiny_clip.open_clip_folder(tmp_path / "clip", tiny_clip.open_clip_network())
    return tmp_path


class Decoder:
    """Stands in for `decode`: notes what is decoded, and calls `then` before picture number `at`."""

    def __init__(self, monkeypatch):
        self.names, self.decode, self.at, self.then = [], decoding.decode, None, None
        monkeypatch.setattr(decoding, "decode", self)

    def __call__(self, file, background):
        self.names.append(f"{file.parent.name}/{file.name}")
        if len(self.names) == self.at:
            self.then()
        return self.decode(file, background)

    def breaks_at(self, number, then):
        self.names, self.at, self.then = [], number, then


def interrupt():
    raise KeyboardInterrupt


def run(folder, *more, text: str = THREE) -> int:
    return main(["eval", "run", "--protocol", protocol(folder, text), *words_of(folder), *map(str, more)])


def words_of(folder) -> list[str]:
    return ["--samples", str(folder / "samples"), "--reference", str(folder / "real"), "--out", str(folder / "out"),
            "--device", "cpu", "--batch-size", "3", "--weights", f"clip={folder / 'clip'}"]  # fmt: skip


def numbers(found: dict) -> dict:
    """A result without its times and what it was put together from."""
    parts = {name: without_times(part) for name, part in found["parts"].items()}
    return without_times(found) | {"parts": parts}


def without_times(found: dict) -> dict:
    return {name: value for name, value in found.items() if name not in ("timings", "seconds")}


def kept_in(folder) -> list[str]:
    return sorted(path.suffix for path in (folder / "out" / "unfinished").glob("*/*"))
