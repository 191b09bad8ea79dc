"""Runs in VBench's own environment, by its path and isolated (`python -I`): nothing of mhla_diffusion is there.

    python -I foreign.py probe ANSWER.json
    python -I foreign.py score JOB.json

The first writes what is installed and which dimensions can be imported; the second scores one dimension.
"""

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import os
import socket
import sys
from pathlib import Path

PACKAGES = (
    "vbench",
    "torch",
    "torchvision",
    "numpy",
    "transformers",
    "timm",
    "pyiqa",
    "decord",
    "opencv-python-headless",
    "opencv-python",
    "detectron2",
)
KEPT = 5  # still videos of each prompt


def no_network(*_, **__):
    raise OSError("scoring reaches no network: everything it reads must be on disk")


def prompts_file():
    return Path(importlib.import_module("vbench").__file__).parent / "VBench_full_info.json"


def probe(answer):
    names = json.loads(os.environ["MHLA_VBENCH_DIMENSIONS"])
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    faults = {}
    for name in names:
        try:
            importlib.import_module(f"vbench.{name}")
        except Exception as error:
            faults[name] = f"{type(error).__name__}: {error}"
    try:
        path = prompts_file()
        prompts = {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    except (ImportError, OSError):
        prompts = None
    found = {"versions": versions, "faults": faults, "prompts": prompts}
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


def chosen_device(asked):
    if asked != "auto":
        return asked
    torch = importlib.import_module("torch")
    return "cuda" if torch.cuda.is_available() else "cpu"


def keep_still(job, device):
    """Put the first still videos of each prompt into a folder of their own, numbered anew; returns it and counts."""
    module = importlib.import_module("vbench.cli.static_filter")
    module.DEVICE = device
    options = argparse.Namespace(model=job["raft"], small=False, mixed_precision=False, alternate_corr=False)
    judge = module.StaticFilter(options, device)
    source, target = Path(job["videos"]), Path(job["work"]) / "still"
    target.mkdir()
    counts, origins = {}, {}
    for name in job["names"]:
        prompt, _, number = name.rpartition("-")
        kept = counts.setdefault(prompt, 0)
        if kept < KEPT and judge.infer(str(source / name)):
            new = f"{prompt}-{kept}{Path(number).suffix}"
            (target / new).symlink_to((source / name).resolve())
            origins[new] = name
            counts[prompt] = kept + 1
    return target, counts, origins


def score(file):
    job = json.loads(Path(file).read_text(encoding="utf-8"))
    socket.socket.connect = no_network
    socket.getaddrinfo = no_network
    device = chosen_device(job["device"])
    answer, videos = {"device": device}, Path(job["videos"])
    if job["raft"]:
        videos, answer["still"], answer["origins"] = keep_still(job, device)
    if any(videos.iterdir()):
        bench = importlib.import_module("vbench").VBench(
            device, job["prompts"] or str(prompts_file()), job["out"]
        )
        bench.evaluate(
            videos_path=str(videos),
            name="vbench",
            dimension_list=[job["dimension"]],
            local=True,
            mode=job["mode"],
        )
    Path(job["answer"]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    {"probe": probe, "score": score}[sys.argv[1]](sys.argv[2])
