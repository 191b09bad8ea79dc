"""Runs a protocol: everything that is missing is named first, a part that fails does not lose the others."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable

from ...provenance import DISTRIBUTIONS, versions
from ..faults import MissingWeights
from ..geneval.records import needed_weights
from ..kept import Kept
from .drawn import drawn_with
from .inputs import Inputs
from .running import check_samples
from .schema import Part, Protocol
from .scorers import Lack, Scorer, check_protocol, lacks
from .unfinished import unfinished

SCHEMA = 1
FAILED = 4  # exit status: some part failed, the others are in the result
# What a part may fail with without the others being at fault.
PART_FAULTS = (ValueError, RuntimeError, ArithmeticError, OSError)
# Options that samples of these kinds have no use for.
OF_PICTURES = {
    "videos": ("samples_split", "background", "mixed_sizes"),
    "pipeline": ("samples_split", "background", "mixed_sizes", "limit"),
}
NEEDS = {
    "reference": "real pictures or their statistics: give --reference SET",
    "prompts": "the file of its prompts: give --prompts FILE",
    "results": "VBench's result files: make them with mhla eval vbench, and give --results FILE ...",
}


def run(
    protocol: Protocol, inputs: Inputs, *, say: Callable[[str], object] = lambda text: None
) -> tuple[dict, int]:
    """The result, ready for JSON, and the exit status: 0, or `FAILED`.

    Raises, with nothing computed, ValueError for a mistake and MissingWeights for what is missing (unless
    `inputs.skip_missing` and something remains); and when no part succeeded, what the first one failed with.
    """
    chosen = named_parts(protocol)
    check_inputs(protocol, inputs)
    skipped = preflight(protocol, inputs)
    notes = check_samples(protocol, inputs)
    drawn, more = drawn_with(inputs.samples, protocol.samples.kind, protocol.drawing)
    notes += more
    if inputs.limit is not None:
        notes.append(f"only the first {inputs.limit} of each set: no result of the protocol")
    started = time.perf_counter()
    runs = {
        name: (without(part, scorer.metrics, skipped[name].metric if name in skipped else None), scorer)
        for name, part, scorer in chosen
        if name not in skipped or skipped[name].metric is not None
    }
    kept = unfinished(protocol, inputs, {name: part for name, (part, _) in runs.items()}, say)
    found, times = scored(protocol, inputs, runs, kept, say)
    values, parts, faults = {}, {}, {}
    for name, (part, _) in runs.items():
        if isinstance(found[name], Exception):
            faults[name] = found[name]
            parts[name] = {"scorer": part.scorer, "status": "failed", "reason": reason_of(found[name])}
            continue
        rest = dict(found[name])
        for metric, row in rest.pop("values").items():
            values[metric if metric not in values else f"{name}.{metric}"] = row
        notes += [f"{name}: {note}" for note in rest.pop("warnings", [])]
        for key in ("schema_version", "protocol"):
            rest.pop(key, None)
        parts[name] = {"scorer": part.scorer, "status": "ok", **rest}
    if not values and faults:
        fault = next(iter(faults.values()))
        if isinstance(fault, ValueError | OSError):
            raise fault
        raise ValueError(reason_of(fault)) from fault  # one line of a GPU without memory, too
    reasons = {
        f"{name}.{lack.metric}" if lack.metric else name: lack.advice for name, lack in skipped.items()
    }
    result = result_of(protocol, inputs, values, parts, reasons, notes)
    result["settings"]["drawn"] = drawn
    result["timings"] = {"seconds": round(time.perf_counter() - started, 3)} | times
    return result, FAILED if faults else 0


def scored(
    protocol: Protocol,
    inputs: Inputs,
    runs: dict[str, tuple[Part, Scorer]],
    kept: Kept | None,
    say: Callable[[str], object],
) -> tuple[dict[str, dict | Exception], dict]:
    """Result or fault of each part, all of whose pictures are read once; and times, with what was taken up."""
    found: dict[str, dict | Exception] = {}
    for name in runs if kept else ():
        if result := kept.read(f"{name}.json"):
            found[name] = result
    done = list(found)
    scorings = {
        name: scorer.run(part, protocol, inputs) for name, (part, scorer) in runs.items() if name not in found
    }
    if done:
        say(f"taken up of an unfinished run: {', '.join(done)}")
    # Late: it imports torch, which takes seconds.
    from ..decoding import decoding_processes
    from ..passes import Reader

    workers = decoding_processes(inputs.workers, inputs.device)
    reader = Reader(workers, inputs.progress, inputs.expect, kept, PART_FAULTS)
    for name, result in reader.run(scorings):
        found[name] = result
        if isinstance(result, Exception):
            if len(runs) > 1:  # of a single part it is raised
                say(f"{name} failed: {reason_of(result)}")
            continue
        result["seconds"] = round(reader.seconds[name], 3)
        if kept:
            kept.write(f"{name}.json", result)
    times = {"reading_seconds": round(reader.reading, 3)}
    if done or reader.resumed:
        times["taken_up"] = {"parts": done, "pictures": reader.resumed}
    return found, times


def reason_of(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def named_parts(protocol: Protocol) -> list[tuple[str, Part, Scorer]]:
    """Name, part and scorer; a scorer that is there twice is numbered. Raises as `check_protocol`."""
    found: dict[str, tuple[str, Part, Scorer]] = {}
    for part, scorer in zip(protocol.parts, check_protocol(protocol), strict=True):
        name, number = part.scorer, 2
        while name in found:
            name, number = f"{part.scorer}-{number}", number + 1
        found[name] = (name, part, scorer)
    return list(found.values())


def check_inputs(protocol: Protocol, inputs: Inputs) -> None:
    """Raises ValueError for what a scorer needs and was not given, and for what none uses."""
    roles, read = set(), set()
    lost = lost_parts(protocol, inputs) if inputs.skip_missing else {}
    for name, _, scorer in named_parts(protocol):
        roles |= {*scorer.roles, *scorer.optional}
        read |= {*scorer.needs, *scorer.reads}
        if name in lost and lost[name].metric is None:
            continue  # it is left out, whatever is given
        for need in scorer.needs:
            if not getattr(inputs, need):
                raise ValueError(f"{protocol.protocol}: {name} needs {NEEDS[need]}")
    for name in ("reference", "prompts", "results", "plan"):
        if getattr(inputs, name) and name not in read:
            raise ValueError(f"no part of {protocol.protocol} reads --{name}: leave it out")
    for name in OF_PICTURES.get(protocol.samples.kind, ()):
        if getattr(inputs, name):
            option = name.replace("_", "-")
            raise ValueError(f"{protocol.protocol} scores {protocol.samples.kind}: leave --{option} out")
    foreign = sorted(inputs.weights.keys() - roles)
    if foreign:
        raise ValueError(
            f"protocol {protocol.protocol} uses no weights {foreign[0]!r}: it uses "
            f"{', '.join(sorted(roles)) or 'none'}"
        )


def without(part: Part, all_metrics: tuple[str, ...], metric: str | None) -> Part:
    if metric is None:
        return part
    return Part(part.scorer, tuple(m for m in part.metrics or all_metrics if m != metric), part.options)


def missing(protocol: Protocol, weights: dict[str, str]) -> dict[str, list[Lack]]:
    """What each part lacks, by the part's name; parts that can run have an empty list."""
    return {name: list(lacks(part, scorer, weights)) for name, part, scorer in named_parts(protocol)}


def lost_parts(protocol: Protocol, inputs: Inputs) -> dict[str, Lack]:
    """Part -> what it lacks; of several things the one that keeps the whole part from running."""
    listed = inputs.plan or inputs.prompts  # of the videos that VBench wants
    weights = {"vbench-prompts": listed, **inputs.weights} if listed else inputs.weights
    found = missing(protocol, weights)
    for name, part, scorer in named_parts(protocol):
        if scorer.kind == "detections" and inputs.prompts:
            needed = needed_weights(inputs.samples, inputs.prompts)
            found[name] += lacks(part, dataclasses.replace(scorer, roles=needed), inputs.weights)
    return {
        name: next((lack for lack in lacking if lack.metric is None), lacking[0])
        for name, lacking in found.items()
        if lacking
    }


def preflight(protocol: Protocol, inputs: Inputs) -> dict[str, Lack]:
    """Part -> what it lacks, whole or for one metric; raises MissingWeights unless that is to be left out.

    And also when nothing would remain.
    """
    found = lost_parts(protocol, inputs)
    if not found:
        return {}
    left = len(protocol.parts) - sum(lack.metric is None for lack in found.values())
    if inputs.skip_missing and left:
        return found
    name, lack = next(iter(found.items()))
    metric = f" ({lack.metric})" if lack.metric else ""
    others = (
        f" (and {len(found) - 1} more, see mhla eval doctor {protocol.protocol})" if len(found) > 1 else ""
    )
    more = ". The others can run: add --skip-missing" if left else ""
    raise MissingWeights(f"{protocol.protocol}: {name}{metric}: {lack.advice}{others}{more}")


def result_of(
    protocol: Protocol,
    inputs: Inputs,
    values: dict[str, dict],
    parts: dict[str, dict],
    skipped: dict[str, str],
    notes: list[str],
) -> dict:
    # Rules that are plain Python, as GenEval's, name no device.
    environments = [part.get("environment", {}) for part in parts.values()]
    devices = [each["device"] for each in environments if "device" in each]
    return {
        "schema_version": SCHEMA,
        "protocol": protocol.protocol,
        "protocol_version": protocol.version,
        "protocol_sha256": protocol.sha256,
        "protocol_file": protocol.file,
        "values": values,
        "published": [
            {"name": each.name, "values": each.values, "source": each.source} for each in protocol.published
        ],
        "skipped": skipped,
        "failed": {name: part["reason"] for name, part in parts.items() if part["status"] == "failed"},
        "warnings": list(dict.fromkeys(notes)),
        "parts": parts,
        "drawing": protocol.drawing,
        "inputs": {
            "samples": inputs.samples,
            "reference": inputs.reference,
            "prompts": inputs.prompts,
            "results": inputs.results,
        },
        "settings": {
            "seed": inputs.seed,
            "batch_size": inputs.batch_size,
            "limit": inputs.limit,
            "samples_split": inputs.samples_split,
            "reference_split": inputs.reference_split or protocol.reference.split,
            "background": inputs.background or protocol.samples.background,
            "mixed_sizes": inputs.mixed_sizes,
        },
        "environment": {
            "device": next(iter(devices), inputs.device),
            "versions": versions((*DISTRIBUTIONS, "torchmetrics", "open_clip_torch")),
            "date": datetime.date.today().isoformat(),
        },
    }
