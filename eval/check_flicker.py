"""Temporal flickering as computed here beside VBench's own class, which runs in an environment of its own.

    python eval/check_flicker.py --python path/to/vbench-env/bin/python --out outputs/vbench_flicker.json

That environment needs torch, torchvision, numpy, pillow, and
pip install --no-deps vbench==0.1.5 decord opencv-python-headless tqdm
Three videos of noise and flicker are made; the result holds both scores of each.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from mhla_diffusion.evaluation.vbench.flicker import flickering_of_videos
from mhla_diffusion.pipelines.pictures import write_atomically
from mhla_diffusion.pipelines.videos import save_video
from mhla_diffusion.provenance import versions

# Runs in the other environment: the folder of videos, then the folder for results.
THEIRS = """
import importlib.metadata, json, sys
from pathlib import Path
import vbench
videos, out = sys.argv[1:]
info = Path(vbench.__file__).parent / "VBench_full_info.json"
vbench.VBench("cpu", str(info), out).evaluate(
    videos_path=videos, name="check", dimension_list=["temporal_flickering"], mode="custom_input"
)
names = ("vbench", "decord", "torch", "numpy")
found = {name: importlib.metadata.version(name) for name in names}
(Path(out) / "versions.json").write_text(json.dumps(found))
"""


def make_videos(folder: Path) -> list[Path]:
    """Three videos that flicker more and more, of different lengths."""
    draw = np.random.default_rng(0)
    paths = []
    for strength in range(3):
        tiles = draw.integers(0, 256, (8, 8, 3)).astype(float).repeat(8, 0).repeat(8, 1)
        frames = [
            tiles + 10 * strength * np.sin(i) + draw.normal(0, 5, tiles.shape)
            for i in range(6 + 4 * strength)
        ]
        paths.append(folder / f"flicker-{strength}.mp4")
        save_video(np.stack(frames).clip(0, 255).astype(np.uint8), paths[-1], fps=8)
        paths[-1].with_suffix(".json").unlink()  # VBench takes everything in the folder for a video
    return paths


def compare(python: str) -> dict:
    """Both scores of each video and of the set. Raises ValueError when the other environment fails."""
    with tempfile.TemporaryDirectory() as place:
        videos, out = Path(place) / "videos", Path(place) / "out"
        videos.mkdir()
        out.mkdir()
        ours = flickering_of_videos(make_videos(videos))
        command = [python, "-c", THEIRS, str(videos), str(out)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=os.environ | {"MPLBACKEND": "agg"}
            )
        except OSError as error:
            raise ValueError(
                f"cannot run {python} ({error.strerror}): give a Python with vbench in it"
            ) from None
        if done.returncode:
            raise ValueError(f"VBench failed in {python}: {done.stderr.strip().splitlines()[-1]}")
        theirs = json.loads((out / "check_eval_results.json").read_text())["temporal_flickering"]
        foreign = json.loads((out / "versions.json").read_text())
    scores = {Path(row["video_path"]).name: row["video_results"] for row in theirs[1]}
    rows = [
        {"video": Path(row["video_path"]).name, "ours": row["video_results"]}
        | {"vbench": scores[Path(row["video_path"]).name]}
        for row in ours[1]
    ]
    return {
        "videos": rows,
        "mean": {"ours": ours[0], "vbench": theirs[0]},
        "largest_difference": max(abs(row["ours"] - row["vbench"]) for row in rows),
        "versions": versions(),
        "vbench_environment": foreign,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="the Python of an environment with vbench")
    parser.add_argument("--out", default="outputs/vbench_flicker.json", help="default: %(default)s")
    args = parser.parse_args()
    try:
        result = compare(args.python)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = json.dumps(result, indent=1) + "\n"
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(args.out), lambda file: file.write(text.encode()))
    for row in result["videos"]:
        print(f"{row['video']}: {row['ours']:.9f} here, {row['vbench']:.9f} by VBench")
    print(f"largest difference {result['largest_difference']:.1e}")
    return 0 if result["largest_difference"] < 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
