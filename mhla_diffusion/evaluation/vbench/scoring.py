"""Scores videos by VBench itself, a dimension in a process of its own in VBench's environment.

Everything is looked for before anything starts. A result is kept only when it names every video that was to be
scored; one that is kept is not computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..faults import MissingWeights, ReferenceMismatch
from ..networks.weight_files import sha256_of
from .aggregate import one_score
from .check import LONG_SECONDS
from .dimensions import DIMENSIONS, members
from .environment import MissingEnvironment, probe, python_of
from .jobs import Job, jobs_of, listing, run_job
from .needs import OF_ANY_VIDEOS, files_of, look, missing, places
from .plan import FLICKER, SAMPLES

STANDARD, CUSTOM = "vbench_standard", "custom_input"
RESULT, RECORD = "{}_eval_results.json", "{}_run.json"
SCHEMA = 1


@dataclass
class Outcome:
    """What became of each dimension: its score now, the score that was there, or why there is none."""

    scored: dict[str, float] = field(default_factory=dict)
    kept: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def chosen(asked: Sequence[str], plan: dict | None) -> list[str]:
    """The dimensions to score: those asked for, all of the plan, or of any videos the seven of quality."""
    for name in asked:
        if name not in DIMENSIONS:
            raise ValueError(f"{name!r} is no dimension of VBench: they are {', '.join(DIMENSIONS)}")
        if plan is None and name not in OF_ANY_VIDEOS:
            raise ValueError(
                f"{name} asks what VBench's own prompts ask for: give their videos with --plan PLAN.json"
            )
    if plan is None:
        return list(asked) or list(members("quality"))
    planned = {name for row in plan["videos"] for name in row["dimensions"]}
    if absent := [name for name in asked if name not in planned]:
        raise ValueError(f"the plan has no videos for {absent[0]}: make one with it, or leave it out")
    return [name for name in DIMENSIONS if name in (asked or planned)]


def kept_score(out: Path, dimension: str, key: dict[str, Any]) -> float | None:
    """Score that is there from the same videos, weights and settings; None when there is none.

    Raises ValueError for one of others.
    """
    path = out / RESULT.format(dimension)
    if not path.exists():
        return None
    try:
        record = json.loads((out / RECORD.format(dimension)).read_text(encoding="utf-8"))
        found = record["key"]
        value = one_score(dimension, json.loads(path.read_text(encoding="utf-8"))[dimension], str(path))[0]
    except (OSError, ValueError, KeyError, TypeError):
        found, value = {}, None
    if found != key:
        names = ", ".join(name for name in key if found.get(name) != key[name])
        why = f"{names} differ" if found else "nothing beside it says of what"
        raise ValueError(f"{path} is of another run ({why}): use --overwrite or another --out")
    return value


def prepared(
    jobs: list[Job], environment: Path, weights: str | os.PathLike | None, static_filter: bool, skip: bool
) -> tuple[list[Job], dict[str, str]]:
    """The jobs whose weights are there, and why others are left out. Raises MissingWeights for what lacks."""
    where = places(weights)
    found, lacking = look(
        [job.dimension for job in jobs], where, static_filter=static_filter, environment=environment
    )
    able = [job for job in jobs if job.dimension not in lacking]
    faults = []
    if lacking and not (skip and able):
        faults.append(str(missing(lacking, where, len(able))))
    if not python_of(environment).exists():
        faults.append(
            f"no environment of VBench at {environment}: make one with mhla eval vbench setup {environment}, or give "
            "yours with --environment FOLDER"
        )
    if faults:
        raise MissingWeights(". ".join(faults))
    for job in able:
        own = files_of(job.dimension, job.raft)
        job.weights = {file: found[file] for file in own}
    return able, {name: f"no weights {', '.join(files)}" for name, files in lacking.items()}


def run(
    videos: Path,
    out: Path,
    environment: Path,
    *,
    plan: dict | None = None,
    dimensions: Sequence[str] = (),
    weights: str | os.PathLike | None = None,
    prompts: str | os.PathLike | None = None,
    static_filter: bool = True,
    device: str = "auto",
    skip_missing: bool = False,
    trust_weights: bool = False,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
) -> Outcome:
    """Score videos into `out`, a `<dimension>_eval_results.json` each, as VBench writes them, for `aggregate`.

    Args:
        plan: of VBench's own prompts; None takes any videos (its mode custom_input).
        weights: folder in the layout of VBench's cache, then the only place.
        prompts: VBench_full_info.json (default: the one in the environment); it must be the plan's.
        static_filter: choose still videos, by optical flow, before flickering is scored, as the protocol has it.

    Raises ValueError for missing videos or results of another run, MissingWeights for weights, packages or an
    environment that are not there, each before anything is scored.
    """
    static_filter = static_filter and plan is not None
    jobs = jobs_of(videos, plan, chosen(dimensions, plan), static_filter)
    jobs, skipped = prepared(jobs, environment, weights, static_filter, skip_missing)
    outcome = Outcome(skipped=skipped)
    about = probe(environment, [job.dimension for job in jobs])
    unable = {
        job.dimension: about["faults"][job.dimension] for job in jobs if job.dimension in about["faults"]
    }
    if unable and not (skip_missing and len(unable) < len(jobs)):
        raise MissingEnvironment(
            "; ".join(f"{name} cannot be scored in {environment}: {why}" for name, why in unable.items())
            + ". Install what it names there (detectron2 from its source, against that torch)"
            + (
                f"; the other {len(jobs) - len(unable)} can: add --skip-missing"
                if len(unable) < len(jobs)
                else ""
            )
        )
    outcome.skipped |= unable
    jobs = [job for job in jobs if job.dimension not in unable]
    list_hash = sha256_of(Path(prompts)) if prompts else about["prompts"]["sha256"]
    if plan is not None and plan["settings"]["prompt_file"]["sha256"] != list_hash:
        raise ReferenceMismatch(
            f"the plan is of another prompt list than {prompts or about['prompts']['path']}: make it again with "
            "--prompts of that file, or give the plan's with --prompts"
        )
    if not static_filter and any(job.dimension == FLICKER for job in jobs):
        outcome.warnings.append(f"{FLICKER} is of all videos, not of still ones as published")

    hashes: dict[str, str] = {}
    settings = {
        "mode": STANDARD if plan is not None else CUSTOM,
        "plan": plan["settings"] if plan is not None else None,
        "static_filter": static_filter,
        "drawn": drawing(videos, outcome.warnings),
    }
    keys = {}
    for job in jobs:
        for file, path in job.weights.items():
            hashes.setdefault(file, tree_hash(path))
        keys[job.dimension] = {
            "mode": settings["mode"],
            "static_filter": job.raft,
            "videos": listing(videos, job.names),
            "prompts": list_hash if plan is not None else None,
            "weights": {file: hashes[file] for file in job.weights},
            "vbench": about["versions"]["vbench"],
        }
        if not overwrite and (value := kept_score(out, job.dimension, keys[job.dimension])) is not None:
            outcome.kept[job.dimension] = value
    out.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        if job.dimension in outcome.kept:
            report(f"{job.dimension:24} {outcome.kept[job.dimension]:.6f}  (there already)")
            continue
        start, log = time.monotonic(), out / f"{job.dimension}.log"
        try:
            value, rows, said = run_job(
                job, videos, environment, str(Path(prompts).resolve()) if prompts else None, settings["mode"], device,
                trust_weights, log,
            )  # fmt: skip
        except ValueError as error:
            outcome.failed[job.dimension] = str(error)
            report(f"{job.dimension:24} failed: {error}")
            continue
        seconds = time.monotonic() - start
        few = sorted(prompt for prompt, count in said.get("still", {}).items() if count < SAMPLES)
        if few:
            outcome.warnings.append(f"{FLICKER}: {len(few)} prompts have fewer than {SAMPLES} still videos, "
                                    f"for example {few[0]!r}")  # fmt: skip
        if len(rows) < len(job.names) and not job.raft:
            outcome.warnings.append(f"{job.dimension}: {len(rows)} of {len(job.names)} videos count")
        record = {
            "schema_version": SCHEMA,
            "key": keys[job.dimension],
            "settings": settings,
            "videos": {"folder": str(videos), "planned": len(job.names), "scored": len(rows)},
            "environment": {"versions": about["versions"]} | said,
            "seconds": round(seconds, 3),
        }
        keep(out, job.dimension, [value, rows], record)
        outcome.scored[job.dimension] = value
        report(f"{job.dimension:24} {value:.6f}  ({len(rows)} videos, {seconds:.1f} s)")
    return outcome


def keep(out: Path, dimension: str, entry: list, record: dict[str, Any]) -> None:
    """Write result and record, so that a result is never beside the record of another."""
    from ...pipelines.pictures import write_atomically

    path = out / RESULT.format(dimension)
    path.unlink(missing_ok=True)
    for file, value in ((out / RECORD.format(dimension), record), (path, {dimension: entry})):
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        write_atomically(file, lambda stream, text=text: stream.write(text.encode()))


def tree_hash(path: Path) -> str:
    """sha256 of a file, or of the names and contents of everything in a folder but hidden folders."""
    if path.is_file():
        return sha256_of(path)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        inside = file.relative_to(path)
        if not any(part.startswith(".") or part == "__pycache__" for part in inside.parts):
            digest.update(f"{inside.as_posix()} {sha256_of(file)}\n".encode())
    return digest.hexdigest()


def drawing(videos: Path, notes: list[str]) -> dict[str, Any]:
    """With what the videos were drawn, as far as they carry it."""
    from ..protocols.drawn import drawn_with

    try:
        found, more = drawn_with(str(videos), "videos", {})
    except ValueError as error:  # PyAV, which reads it, is an extra
        found, more = {}, [f"how the videos were drawn is not known: {error}"]
    frames, fps = found.get("frames"), found.get("fps")
    if isinstance(frames, int) and isinstance(fps, int | float) and frames / fps >= LONG_SECONDS:
        notes.append(
            f"videos of {frames / fps:.1f} s: from 5 s on papers report VBench-Long, and this is VBench"
        )
    notes += more
    return found
