"""Results side by side, refused where they do not compare."""

from __future__ import annotations

import json
import math
from pathlib import Path

from .faults import ReferenceMismatch

HASH = "protocol's hash"
FRECHET = ("fd", "sfd")  # biased by an amount that the count decides


def read_result(path: Path) -> dict:
    """A result of `mhla eval run`, or a folder of one, with its path under "file". Raises ValueError for others."""
    if path.is_dir():
        path = path / "result.json"
    if not path.is_file():
        raise ValueError(f"there is no result {path}: give what mhla eval run wrote")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found["protocol"], str) or found["schema_version"] != 1:
            raise ValueError(f"schema {found['schema_version']} of {found['protocol']!r}")
        for metric, row in found["values"].items():
            number = isinstance(row["value"], int | float) and not isinstance(row["value"], bool)
            if not (number and math.isfinite(row["value"])):
                raise ValueError(f"{metric} is {row['value']!r}")
        basis(found), weights_of(found)  # which a file of another shape breaks
    except UnicodeDecodeError:  # its words hold the whole file
        raise ValueError(f"{path} is no JSON: give what mhla eval run wrote") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no result of this version ({error!r}): make it again") from None
    return found | {"file": str(path)}


def basis(result: dict) -> dict:
    """What must be the same for two values to compare: protocol, network, resize, the reference, of every part."""
    found = {"protocol": result["protocol"], HASH: result.get("protocol_sha256")} | features_of(result)
    for name, part in result.get("parts", {}).items():
        if part["status"] == "ok":
            found |= {f"{key} of {name}": value for key, value in features_of(part).items()}
    return found


def features_of(result: dict) -> dict:
    def of_inputs(name: str) -> dict:
        """Empty where it is a path: the parts of a protocol say more."""
        inputs = result.get("inputs", {})
        found = inputs.get(name) if isinstance(inputs, dict) else None
        return found if isinstance(found, dict) else {}

    features, reference = result.get("features", {}), of_inputs("reference")
    return {
        "network": features.get("network"),
        "resize": features.get("resize"),
        "reference": reference.get("sha256") or reference.get("listing_sha256"),
        "prompts": of_inputs("prompts").get("sha256"),
    }


def weights_of(result: dict) -> dict[str, str]:
    """Role -> sha256 of each file of weights, of every part."""
    found = {}
    for part in (result, *result.get("parts", {}).values()):
        weights = part.get("features", {}).get("weights")
        for each in weights if isinstance(weights, list) else [weights]:
            if isinstance(each, dict) and "sha256" in each:
                found[each["role"]] = each["sha256"]
    return found


def check_comparable(results: list[dict]) -> list[str]:
    """Warnings about weights and counts. Raises ReferenceMismatch, naming what keeps results from comparing."""
    first = basis(results[0])
    for result in results[1:]:
        other = basis(result)
        for key in (key for key in first if key in other):  # a part that only one result has is an empty cell
            if first[key] != other[key] and None in (first[key], other[key]) and key == HASH:
                raise ReferenceMismatch(
                    f"{results[0]['file']} and {result['file']} do not compare: only one is of a protocol's file, the "
                    f"other of mhla eval run {other['protocol']} without one"
                )
            if first[key] != other[key]:
                raise ReferenceMismatch(
                    f"{results[0]['file']} and {result['file']} do not compare: {key} {first[key]} and {other[key]}"
                )
    notes = []
    hashes = [weights_of(result) for result in results]
    for role in dict.fromkeys(role for each in hashes for role in each):
        found = list(dict.fromkeys(each[role] for each in hashes if role in each))
        if len(found) > 1:
            notes.append(
                f"{role} is of several files ({', '.join(sha256[:12] for sha256 in found)}): scores of other weights "
                "do not compare"
            )
    for metric in dict.fromkeys(metric for result in results for metric in result["values"]):
        counts = [result["values"][metric].get("n") for result in results if metric in result["values"]]
        if len(set(counts)) > 1:
            why = ": a Fréchet distance depends on the count" if metric in FRECHET else ""
            notes.append(f"{metric} is of {', '.join(map(str, counts))} samples{why}")
    return notes


def as_table(results: list[dict]) -> list[str]:
    """Markdown, a row for each result; values missing in one are left empty. Raises as `check_comparable`."""
    notes = check_comparable(results)
    metrics = list(dict.fromkeys(metric for result in results for metric in result["values"]))
    arrows = {True: " (higher is better)", False: " (lower is better)", None: ""}
    heads = []
    for metric in metrics:
        row = next(result["values"][metric] for result in results if metric in result["values"])
        heads.append(metric + arrows[row.get("higher_is_better")])
    lines = [
        f"{results[0]['protocol']}",
        "",
        "| result | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for result in results:
        cells = []
        for metric in metrics:
            row = result["values"].get(metric)
            spread = f" +- {row['std']:.3g}" if row and "std" in row else ""
            cells.append(f"{row['value']:.5g}{spread}" if row else "")
        lines.append(f"| {result['file']} | " + " | ".join(cells) + " |")
    return lines + [""] * bool(notes) + notes
