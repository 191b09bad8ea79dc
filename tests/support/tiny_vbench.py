"""A package that stands in for vbench: its classes' signatures, files and layout, with scores that are read off names.

It is built into a wheel and installed by uv into an environment of its own, as the true one is. What its "weights"
say decides how it behaves.
"""

import hashlib
import json
import zipfile
from pathlib import Path

RECORDS = [
    {"prompt_en": "a cat, running", "dimension": ["motion_smoothness", "dynamic_degree"]},
    {"prompt_en": "a dog", "dimension": ["motion_smoothness", "dynamic_degree"]},
    {"prompt_en": "a still stop sign", "dimension": ["temporal_flickering"]},
    {"prompt_en": "a red car", "dimension": ["color"], "auxiliary_info": {"color": "red"}},
]
FILES = {
    "vbench/__init__.py": '''
import importlib, json, os
from pathlib import Path

class VBench:
    def __init__(self, device, full_info_dir, output_path):
        self.device, self.full_info_dir, self.output_path = device, full_info_dir, output_path
        os.makedirs(output_path, exist_ok=True)

    def evaluate(self, videos_path, name, prompt_list=[], dimension_list=None, local=False, read_frame=False,
                 mode="vbench_standard", **kwargs):
        assert local and mode in ("vbench_standard", "custom_input")
        present, found = sorted(os.listdir(videos_path)), {}
        for dimension in dimension_list:
            if mode == "custom_input":
                videos = present
            else:
                suffix = Path(present[0]).suffix
                records = json.loads(Path(self.full_info_dir).read_text())
                prompts = [r["prompt_en"] for r in records if dimension in r["dimension"]]
                names = [f"{prompt}-{i}{suffix}" for prompt in prompts for i in range(5)]
                videos = [n for n in names if n in present]
            module = importlib.import_module(f"vbench.{dimension}")
            found[dimension] = module.compute([os.path.join(videos_path, n) for n in videos], self.device)
        Path(self.output_path, name + "_eval_results.json").write_text(json.dumps(found))
''',
    "vbench/scores.py": '''
import os, subprocess, sys
from pathlib import Path

def rows(videos):
    return [{"video_path": v, "video_results": int(Path(v).stem.rpartition("-")[2]) / 10} for v in videos]

def mean(rows):
    return sum(r["video_results"] for r in rows) / len(rows)

def behave(file, videos):
    path = Path(os.environ["VBENCH_CACHE_DIR"]) / file
    if not path.exists():
        subprocess.run(["wget", "-P", str(path.parent), "https://example.invalid/weights"], check=True)
    how = path.read_text()
    if how == "pickle":
        raise RuntimeError("Weights only load failed ... weights_only=True")
    if how == "trusted" and os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD") != "1":
        raise RuntimeError("Weights only load failed ... weights_only=True")
    if how == "network":
        import urllib.request
        urllib.request.urlopen("https://example.invalid/weights")
    if how == "git":
        subprocess.run(["git", "clone", "https://example.invalid/dino"], check=True)
    if how == "crash":
        os._exit(9)
    found = rows(videos)
    if how == "drop":
        found = found[:-1]
    if how == "nan":
        return float("nan"), found
    if how == "nothing":
        sys.exit(0)
    return mean(found), found
''',
    "vbench/motion_smoothness.py": '''
from .scores import behave
def compute(videos, device):
    return behave("amt_model/amt-s.pth", videos)
''',
    "vbench/dynamic_degree.py": '''
from .scores import behave
def compute(videos, device):
    return behave("raft_model/models/raft-things.pth", videos)
''',
    "vbench/temporal_flickering.py": '''
from .scores import mean, rows
def compute(videos, device):
    found = rows(videos)
    return mean(found), found
''',
    "vbench/color.py": "import detectron2\n",
    "vbench/cli/__init__.py": "",
    "vbench/cli/static_filter.py": '''
from pathlib import Path
DEVICE = "cuda"
class StaticFilter:
    def __init__(self, args, device):
        assert "model" in args and Path(args.model).exists() and DEVICE == device == "cpu"
        self.word = Path(args.model).read_text()
    def infer(self, path):
        number = int(Path(path).stem.rpartition("-")[2])
        return self.word != "restless" and number % 2 == 1
''',
    "vbench/VBench_full_info.json": json.dumps(RECORDS),
}  # fmt: skip
WEIGHTS = ("amt_model/amt-s.pth", "raft_model/models/raft-things.pth")


def build(folder: Path, version: str = "0.1.5") -> tuple[Path, Path]:
    """The wheel's folder and a lock file that names it with its hash."""
    info = f"vbench-{version}.dist-info"
    files = FILES | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vbench\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    listed = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    wheel = wheels / f"vbench-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (files | {f"{info}/RECORD": listed}).items():
            archive.writestr(name, text)
    lock = folder / "tiny.lock"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock.write_text(f"vbench=={version} \\\n    --hash=sha256:{digest}\n")
    return wheels, lock


def weights(folder: Path, *, amt: str = "good", raft: str = "good") -> Path:
    """A folder in the layout of VBench's cache, whose files say how the stand-in is to behave."""
    for file, text in zip(WEIGHTS, (amt, raft), strict=True):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder
