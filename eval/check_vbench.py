"""VBench's networks of motion run through `mhla eval vbench run`, with random weights: same scores as its own classes.

    python eval/check_vbench.py --environment path/to/vbench-environment --out outputs/vbench_random_weights.json

The environment is what `mhla eval vbench setup` builds. Weights of RAFT and AMT are drawn at random, so the scores say
nothing about videos; that the two ways agree says that videos, weights and results go where they should.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from mhla_diffusion.evaluation.networks.weight_files import sha256_of
from mhla_diffusion.evaluation.vbench.environment import closed, probe, python_of
from mhla_diffusion.evaluation.vbench.plan import plan
from mhla_diffusion.evaluation.vbench.scoring import run
from mhla_diffusion.pipelines.pictures import write_atomically
from mhla_diffusion.pipelines.videos import save_video
from mhla_diffusion.provenance import versions

DIMENSIONS = ("motion_smoothness", "dynamic_degree", "temporal_flickering")
# With small last weights of RAFT nothing moves for it, so that its filter finds still videos; with others all does.
MOODS = {"lively": DIMENSIONS[:2], "calm": DIMENSIONS[1:]}
RECORDS = [
    {"prompt_en": "a moving pattern", "dimension": list(DIMENSIONS[:2])},
    {"prompt_en": "a still pattern", "dimension": [DIMENSIONS[2]]},
]
# Both run in VBench's environment. The first writes weights into the folder that it is given.
WEIGHTS = """
import argparse, sys
from pathlib import Path
import torch, vbench
from omegaconf import OmegaConf
from vbench.third_party.amt.utils.build_utils import build_from_cfg
from vbench.third_party.RAFT.core.raft import RAFT
torch.manual_seed(0)
amt, raft = Path(sys.argv[1], "amt_model/amt-s.pth"), Path(sys.argv[1], "raft_model/models/raft-things.pth")
amt.parent.mkdir(parents=True)
raft.parent.mkdir(parents=True)
config = OmegaConf.load(Path(vbench.__file__).parent / "third_party/amt/cfgs/AMT-S.yaml").network
torch.save({"state_dict": build_from_cfg(config).state_dict()}, amt)
flow = RAFT(argparse.Namespace(small=False, mixed_precision=False, alternate_corr=False)).state_dict()
if sys.argv[2] == "calm":  # the last layer small, so that every flow is below the thresholds
    last = "update_block.flow_head.conv2"
    flow = {key: value * 1e-3 if key.startswith(last) else value for key, value in flow.items()}
torch.save({"module." + key: value for key, value in flow.items()}, raft)
"""
# The second scores each video by VBench's classes, without anything of ours.
THEIRS = """
import json, sys
from pathlib import Path
import vbench
from easydict import EasyDict
from vbench.dynamic_degree import DynamicDegree
from vbench.motion_smoothness import MotionSmoothness
from vbench.temporal_flickering import cal_score
videos, weights, out = map(Path, sys.argv[1:])
config = str(Path(vbench.__file__).parent / "third_party/amt/cfgs/AMT-S.yaml")
motion = MotionSmoothness(config, str(weights / "amt_model/amt-s.pth"), "cpu")
model = str(weights / "raft_model/models/raft-things.pth")
dynamic = DynamicDegree(EasyDict(model=model, small=False, mixed_precision=False, alternate_corr=False), "cpu")
moving = sorted(map(str, videos.glob("a moving*")))
still = sorted(map(str, videos.glob("a still*")))
found = {
    "motion_smoothness": {path: float(motion.motion_score(path)) for path in moving},
    "dynamic_degree": {path: float(dynamic.infer(path)) for path in moving},
    "temporal_flickering": {path: float(cal_score(path)) for path in still},
}
out.write_text(json.dumps(found))
"""


def call(environment: Path, code: str, work: Path, *arguments: str) -> None:
    command = [str(python_of(environment)), "-I", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=work, env=closed(work))
    if done.returncode:
        raise ValueError(f"VBench failed in {environment}: {done.stderr.strip().splitlines()[-1]}")


def make_videos(folder: Path, rows: list[dict]) -> None:
    """Moving and still patterns, 5 frames of 128 px, the still ones with a little noise."""
    draw = np.random.default_rng(0)
    for row in rows:
        tiles = draw.integers(0, 256, (16, 16, 3)).repeat(8, 0).repeat(8, 1)
        step = 4 if row["file"].startswith("a moving") else 0
        frames = np.stack([np.roll(tiles, index * step, 1) for index in range(5)])
        frames = frames + draw.integers(0, 40, frames.shape)
        save_video(frames.clip(0, 255).astype(np.uint8), folder / row["file"], fps=8, beside=False)


def compare(environment: Path) -> dict:
    """Score of each video by both ways. Raises ValueError when VBench fails or is not there."""
    probe(environment, ())  # names what is missing
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        prompts, videos = work / "info.json", work / "videos"
        prompts.write_text(json.dumps(RECORDS))
        about = {"path": prompts.name, "sha256": sha256_of(prompts)}
        planned = plan(RECORDS, about, samples=2, flicker_samples=2)
        make_videos(videos, planned["videos"])
        rows, scores = [], {}
        for mood, dimensions in MOODS.items():
            weights, out, answer = (work / f"{mood}-{name}" for name in ("weights", "out", "answer"))
            call(environment, WEIGHTS, work, str(weights), mood)
            outcome = run(
                videos,
                out,
                environment,
                plan=planned,
                dimensions=dimensions,
                weights=weights,
                prompts=prompts,
                device="cpu",
            )
            if outcome.failed:
                raise ValueError("; ".join(f"{name}: {why}" for name, why in outcome.failed.items()))
            scores[mood] = outcome.scored
            call(environment, THEIRS, work, str(videos), str(weights), str(answer))
            theirs = json.loads(answer.read_text())
            for name in dimensions:
                found = json.loads((out / f"{name}_eval_results.json").read_text())[name]
                for row in found[1]:
                    video, own = row["video_path"], float(row["video_results"])
                    rows.append(
                        {"weights": mood, "dimension": name, "video": Path(video).name}
                        | {"run": own, "vbench": theirs[name][video]}
                    )
            foreign = json.loads((out / f"{dimensions[0]}_run.json").read_text())["environment"]
    return {
        "note": "random weights: the scores say nothing about videos",
        "scores": scores,
        "videos": rows,
        "largest_difference": max(abs(row["run"] - row["vbench"]) for row in rows),
        "versions": versions(),
        "vbench_environment": foreign,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", required=True, help="what `mhla eval vbench setup` built")
    parser.add_argument("--out", default="outputs/vbench_random_weights.json", help="default: %(default)s")
    args = parser.parse_args()
    try:
        result = compare(Path(args.environment).absolute())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 2)
    text = json.dumps(result, indent=1) + "\n"
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(args.out), lambda file: file.write(text.encode()))
    for row in result["videos"]:
        print(
            f"{row['dimension']:20} {row['video']:24} {row['run']:.9f} by run, {row['vbench']:.9f} by VBench"
        )
    print(f"largest difference {result['largest_difference']:.1e}")
    return 0 if result["largest_difference"] < 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
