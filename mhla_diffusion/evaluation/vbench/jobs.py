"""One dimension of VBench in one process: what it is to see, and whether what comes back is whole."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .aggregate import one_score
from .environment import RUNNER, closed, python_of
from .needs import DINO, LEAVES_OUT, RAFT
from .plan import FLICKER, SAMPLES

SUFFIXES = (".mp4", ".gif")  # that VBench reads


@dataclass
class Job:
    """One dimension: which videos, and what it reads."""

    dimension: str
    names: list[str]
    weights: dict[str, Path] = field(default_factory=dict)  # by their places in VBench's layout
    raft: bool = False  # still videos are chosen first


def wanted(dimension: str, plan: dict, static_filter: bool) -> list[str]:
    """Names of the plan's videos that VBench looks at: five of each prompt, all where it chooses the still ones."""
    everything = dimension == FLICKER and static_filter
    return [
        row["file"]
        for row in plan["videos"]
        if dimension in row["dimensions"]
        and (everything or int(Path(row["file"]).stem.rpartition("-")[2]) < SAMPLES)
    ]


def jobs_of(videos: Path, plan: dict | None, dimensions: Sequence[str], static_filter: bool) -> list[Job]:
    """A job for each dimension. Raises ValueError when videos are missing, with the name of the first."""
    if not videos.is_dir():
        raise ValueError(f"there is no folder {videos}: give the one with the videos")
    present = {path.name for path in videos.iterdir() if path.suffix.lower() in SUFFIXES}
    if plan is None:
        if not present:
            raise ValueError(f"{videos} holds no videos ({', '.join(SUFFIXES)}): give the folder with them")
        return [Job(name, sorted(present)) for name in dimensions]
    jobs = [
        Job(name, wanted(name, plan, static_filter), raft=static_filter and name == FLICKER)
        for name in dimensions
    ]
    expected = list(dict.fromkeys(name for job in jobs for name in job.names))
    absent = [name for name in expected if name not in present]
    if absent:
        raise ValueError(
            f"{len(expected) - len(absent)} of {len(expected)} expected videos found in {videos}; first missing: "
            f"{absent[0]!r}. Draw them: mhla generate --vbench-plan PLAN.json --pipeline PIPELINE --out {videos}"
        )
    return jobs


def listing(videos: Path, names: Sequence[str]) -> str:
    """sha256 over names and sizes."""
    lines = (f"{name} {(videos / name).stat().st_size}\n" for name in names)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def stage(job: Job, videos: Path, work: Path) -> tuple[Path, Path]:
    """Folders of links that hold exactly what the dimension is to see: its videos, and its weights."""
    seen, cache = work / "videos", work / "cache"
    seen.mkdir()
    for name in job.names:
        (seen / name).symlink_to((videos / name).resolve())
    for file, path in job.weights.items():
        (cache / file).parent.mkdir(parents=True, exist_ok=True)
        (cache / file).symlink_to(path.resolve(), target_is_directory=path.is_dir())
    cache.mkdir(exist_ok=True)
    if DINO in job.weights:  # the code of DINO's repository looks for its weights where torch.hub keeps them
        hub = work / "torch" / "hub" / "checkpoints"
        hub.mkdir(parents=True)
        (hub / Path(DINO).name).symlink_to(job.weights[DINO].resolve())
    return seen, cache


def accepted(path: Path, job: Job, expected: Sequence[str]) -> tuple[float, list[dict[str, Any]]]:
    """Score and rows of a result of VBench. Raises ValueError unless it is whole and has a score."""
    if not path.is_file():
        raise ValueError("VBench wrote no result")
    entry = json.loads(path.read_text(encoding="utf-8")).get(job.dimension)
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)):
        raise ValueError(f"VBench's result holds no scores of {job.dimension}")
    value, _ = one_score(job.dimension, entry[0], "VBench's result")
    names = [Path(row["video_path"]).name for row in entry[1]]
    absent = [name for name in expected if name not in set(names)]
    if len(set(names)) != len(names) or set(names) - set(expected):
        raise ValueError("VBench's result lists videos that are not in the set, or twice")
    if absent and (job.dimension not in LEAVES_OUT or len(absent) == len(expected)):
        raise ValueError(
            f"VBench scored {len(names)} of {len(expected)} videos; first missing: {absent[0]!r}"
        )
    return value, entry[1]


def explained(log: str) -> str:
    """What went wrong, of the last lines that a process wrote."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if "Weights only load failed" in log:
        return (
            "its weights hold more than tensors, and reading them could run code: if you trust where they are from, "
            "add --trust-weights"
        )
    if any("is not run: everything must be on disk" in line for line in lines):
        return "VBench wanted to fetch something, which it must find on disk"
    return lines[-1][:300] if lines else "the process said nothing"


def run_job(
    job: Job,
    videos: Path,
    environment: Path,
    prompts: str | None,
    mode: str,
    device: str,
    trust: bool,
    log: Path,
) -> tuple[float, list[dict[str, Any]], dict[str, Any]]:
    """Score one dimension in its own process: score, rows with the videos' true paths, and what the process said.

    Raises ValueError when it fails or its result is not whole; the process's output is in `log`.
    """
    with tempfile.TemporaryDirectory(prefix="mhla-vbench-") as place:
        work = Path(place)
        seen, cache = stage(job, videos, work)
        variables = closed(work) | {"VBENCH_CACHE_DIR": str(cache), "TORCH_HOME": str(work / "torch")}
        if trust:
            variables["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        answer, out = work / "answer.json", work / "out"
        task = {
            "dimension": job.dimension, "names": job.names, "videos": str(seen), "out": str(out), "mode": mode,
            "device": device, "prompts": prompts, "answer": str(answer), "work": str(work),
            "raft": str(cache / RAFT) if job.raft else None,
        }  # fmt: skip
        (work / "job.json").write_text(json.dumps(task), encoding="utf-8")
        command = [str(python_of(environment)), "-I", str(RUNNER), "score", str(work / "job.json")]
        with open(log, "w", encoding="utf-8") as file:
            # In the folder of weights, where a model that is asked for by its bare name is found.
            code = subprocess.run(command, stdout=file, stderr=file, env=variables, cwd=cache).returncode
        if not code and not answer.exists():
            raise ValueError(f"VBench wrote no result (see {log})")
        if code:
            raise ValueError(f"{explained(log.read_text(encoding='utf-8', errors='replace'))} (see {log})")
        said = json.loads(answer.read_text(encoding="utf-8"))
        origins = said.pop("origins", None)
        if origins == {}:
            raise ValueError("none of the videos is still, so flickering cannot be scored")
        expected = job.names if origins is None else list(origins)
        value, rows = accepted(out / "vbench_eval_results.json", job, expected)
    for row in rows:
        name = Path(row["video_path"]).name
        row["video_path"] = str(videos / (origins[name] if origins else name))
    return value, rows, said
