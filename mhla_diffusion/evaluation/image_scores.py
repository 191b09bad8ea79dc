"""Compares a set of pictures with a reference: one pass through a network for each, every metric from it."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..pipelines.pictures import write_atomically
from ..provenance import DISTRIBUTIONS, versions
from .faults import InsufficientSamples, ReferenceMismatch
from .gathering import Gathered, look_at
from .image_protocols import METRICS, ImageProtocol, check_roles, with_weights
from .metrics.frechet import unclamped_distance
from .metrics.inception_score import inception_score
from .metrics.kernel import clip_discrepancy, kernel_distance
from .metrics.moments import moments_of_state, state_of
from .metrics.neighbours import check_counts, nearest, precision_recall, squared_radii
from .networks import extractors
from .networks.extractors import Extractor
from .passes import Scoring, by_itself
from .picture_sets import PictureSet
from .reference_statistics import Statistics, check_reference
from .two_sets import compare_read, compare_sets

SCHEMA = 1
KID_SUBSET = 1000
# A distance below this share of the variance is rounding: two draws of n pictures are about 1 / n of it apart.
IDENTICAL = 1e-8


def build_extractor(
    protocol: ImageProtocol, weights: Mapping[str, str], device: str, metrics: tuple[str, ...] | None = None
) -> Extractor:
    """The protocol's network with the taps that its metrics read.

    Args:
        weights: role -> path; roles that are not in it are looked for.

    Raises MissingWeights (every place searched), or ValueError for a role that the protocol does not use.
    """
    check_roles(protocol, weights)
    if protocol.features == "inception":
        wanted = {METRICS[metric][0] for metric in (metrics or protocol.metrics)}
        taps = tuple(tap for tap in ("spatial", "pool", "logits") if tap in wanted)
        role = "inception-classifier" if "logits" in taps else "inception"
        path = weights.get(role) or weights.get(
            "inception-classifier"
        )  # whose file has all that the other has
        return extractors.inception(taps, protocol=protocol.resize, weights=path, device=device)
    if protocol.features == "efficientnet":
        return extractors.efficientnet(weights.get("efficientnet-lite0"), device=device)
    if protocol.features == "random":
        return extractors.random_network(device=device)
    return extractors.transformers_vision(protocol.features, weights.get(protocol.features), device=device)


def needs(metrics: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """Taps whose moments are wanted, and taps whose features are kept."""
    moments = {METRICS[m][0] for m in metrics if m in ("fd", "sfd")}
    kept = {METRICS[m][0] for m in metrics if m not in ("fd", "sfd")}
    return moments, kept


def beyond(metrics: Iterable[str], statistics: Statistics | None, pictures: bool) -> dict[str, str]:
    """Metric -> what it needs that a reference of statistics, or of pictures, does not have."""
    lost = {}
    for metric in metrics:
        tap = METRICS[metric][0]
        if metric in ("fd", "sfd"):
            if statistics is not None and tap not in statistics.moments:
                lost[metric] = f"statistics of {tap!r} features"
        elif metric != "inception_score" and not pictures:
            lost[metric] = "the reference's pictures"
    return lost


def check_metrics(
    protocol: ImageProtocol, metrics: tuple[str, ...] | None, statistics: Statistics | None, pictures: bool
) -> tuple[tuple[str, ...], list[str]]:
    """The metrics to compute, and warnings about those that the reference does not allow.

    Raises ValueError for one that was asked for and that the protocol, or the reference, does not have.
    """
    chosen = tuple(metrics or protocol.metrics)
    unknown = [metric for metric in chosen if metric not in protocol.metrics]
    if unknown:
        raise ValueError(
            f"protocol {protocol.name} has no {unknown[0]!r}: it has {', '.join(protocol.metrics)}"
        )
    lost = beyond(chosen, statistics, pictures)
    if lost and metrics:
        metric, need = next(iter(lost.items()))
        held = f"statistics of {', '.join(statistics.moments)}"
        raise ReferenceMismatch(
            f"{metric} needs {need}, {statistics.path} holds {held} only: give pictures, or leave {metric} out"
        )
    chosen = tuple(metric for metric in chosen if metric not in lost)
    if not chosen:
        raise ReferenceMismatch(
            f"protocol {protocol.name} needs the reference's pictures: give a folder, .npz or .tar"
        )
    return chosen, [f"{metric} is left out: it needs {need}" for metric, need in lost.items()]


def scoring(
    samples: PictureSet,
    reference: PictureSet | Statistics,
    protocol: ImageProtocol,
    *,
    reference_pictures: PictureSet | None = None,
    gathered: Gathered | None = None,
    metrics: tuple[str, ...] | None = None,
    weights: Mapping[str, str] | None = None,
    extractor: Extractor | None = None,
    device: str = "auto",
    batch_size: int = 50,
    seed: int = 0,
    floor: bool = False,
    skip_missing: bool = False,
) -> Scoring:
    """A comparison; its result is ready for JSON. `score` runs it alone.

    Args:
        reference_pictures: beside statistics, for metrics that need pictures, as ADM's files hold 10,000 of them.
        gathered: what a pass of the same network over the reference's pictures found before; they are not read again.
        metrics: some of the protocol's (default: all that the reference allows).
        weights: role -> path. extractor: a network in hand, in place of the protocol's.
        seed: of KID's subsets.
        skip_missing: leave out the metrics whose weights are missing, if others remain; "skipped" lists them.
        floor: also compare the reference's even with its odd pictures, what a perfect sampler would get.

    Raises:
        MissingWeights, InsufficientSamples, ReferenceMismatch, ValueError: nothing was computed.
    """
    statistics = reference if isinstance(reference, Statistics) else None
    pictures = reference_pictures if statistics else reference
    chosen, notes = check_metrics(protocol, metrics, statistics, pictures is not None)
    if floor and pictures is None:
        raise ReferenceMismatch(
            f"a floor needs the reference's pictures, {reference.path} holds statistics only"
        )
    notes += compare_sets(samples, pictures) if pictures is not None else []
    if (
        pictures is not None
        and {"precision", "recall"} & set(chosen)
        and min(len(pictures), len(samples)) > 1
    ):
        # Now, and not after a pass over the larger set; a single picture is too few for any metric, as `look_at` says.
        check_counts(len(pictures), len(samples))
    if floor and len(pictures) < 4:
        raise InsufficientSamples(
            f"{pictures.source} has {len(pictures)} pictures: a floor compares halves of at least 2, give 4 or more"
        )
    skipped: dict[str, str] = {}
    if extractor is None:
        chosen, skipped = with_weights(protocol, chosen, weights or {}, skip_missing)
        extractor = build_extractor(protocol, weights or {}, device, chosen)
    moments, kept = needs(chosen)
    if statistics:
        notes += check_reference(
            statistics, extractor.about, {tap: extractor.taps[tap] for tap in sorted(moments)}
        )
    looks = [look_at(samples, extractor, moments, kept, batch_size)]
    wanted = kept - {"logits"} | (
        moments if floor else set()
    )  # the floor compares halves, so it needs the features
    if gathered is None and pictures is not None and (wanted or not statistics):
        looks.append(look_at(pictures, extractor, set() if statistics else moments, wanted, batch_size))
    yield looks
    started = time.perf_counter()
    ours, theirs = looks[0].rows, looks[1].rows if len(looks) > 1 else gathered
    notes += samples.doubts() + (pictures.doubts() if theirs else [])
    # Of statistics of ours it is known which pictures they were made of.
    compared_with = pictures.about() if theirs else (statistics.about or {}).get("pictures", {})
    notes += compare_read(samples.about(), compared_with)
    if not theirs and samples.listing() == compared_with.get("listing_sha256"):
        notes.append(
            f"{statistics.path} was made of pictures listed as {samples.source}: is one a copy of the other?"
        )
    values = values_of(chosen, ours, theirs, statistics, protocol, seed, notes)
    result = {
        "schema_version": SCHEMA,
        "protocol": protocol.name,
        "values": values,
        "skipped": skipped,
        "warnings": notes,
        "features": extractor.about,
        "inputs": {"samples": samples.about(), "reference": about_reference(statistics, pictures)},
        "settings": {
            "metrics": list(chosen),
            "batch_size": batch_size,
            "kid_seed": seed,
            "arithmetic": protocol.arithmetic,
            "split_size": protocol.split_size,
        },
        "environment": environment(extractor),
        "timings": {"features_seconds": round(sum(look.seconds for look in looks), 3)},
    }
    if floor:
        result["floor"] = floor_of(theirs, moments)
    result["timings"]["metrics_seconds"] = round(time.perf_counter() - started, 3)
    return result


score = by_itself(scoring)


def values_of(
    metrics: tuple[str, ...],
    ours: Gathered,
    theirs: Gathered | None,
    statistics: Statistics | None,
    protocol: ImageProtocol,
    seed: int,
    notes: list[str],
) -> dict[str, dict]:
    """Metric -> its row; warnings are put into `notes`."""
    values: dict[str, dict] = {}

    def put(metric: str, value: Tensor, std: Tensor | None = None, **more) -> None:
        row = {"value": float(value), "n": ours.count, "higher_is_better": METRICS[metric][1], **more}
        values[metric] = row if std is None else row | {"std": float(std)}

    for metric in metrics:
        tap = METRICS[metric][0]
        if metric in ("fd", "sfd"):
            fake = ours.moments(tap, "sample set")
            real = statistics.moments[tap] if statistics else theirs.moments(tap, "reference")
            width = len(fake.mean)
            for what, count in (("samples", fake.count), ("reference pictures", real.count)):
                if count is not None and count <= width:
                    notes.append(
                        f"{metric}: {count} {what} for {width} features: too few for a covariance of full rank; the "
                        "distance is biased upwards, compare it only at equal counts"
                    )
            value = unclamped_distance(real, fake)
            if value < IDENTICAL * real.covariance.trace():
                notes.append(
                    f"{metric} is 0 but for rounding: samples and reference hold the same pictures, stored in "
                    "whatever way"
                )
            put(metric, value.clamp(min=0), unclamped=float(value), reference_n=real.count)
        elif metric == "kid":
            size, fewest = KID_SUBSET, min(ours.count, theirs.count)
            if fewest < KID_SUBSET:  # half of them: subsets of all would be one and the same
                size = max(2, fewest // 2)
                notes.append(f"kid: subsets of {size} pictures, for want of {KID_SUBSET}")
            draw = torch.Generator().manual_seed(seed)
            found = kernel_distance(
                theirs.features(tap), ours.features(tap), subset_size=size, generator=draw
            )
            put(metric, *found, subset_size=size, subsets=100, reference_n=theirs.count)
        elif metric in ("precision", "recall"):
            if metric not in values:
                found = precision_recall(
                    theirs.features(tap), ours.features(tap), arithmetic=protocol.arithmetic
                )
                for name in {"precision", "recall"} & set(metrics):
                    put(name, getattr(found, name), k=3, reference_n=theirs.count)
        elif metric == "cmmd":
            put(metric, clip_discrepancy(theirs.features(tap), ours.features(tap)), reference_n=theirs.count)
        elif metric == "nearest":
            reference = theirs.features(tap)
            own = squared_radii(reference, 1, "float64", 2048).sqrt()
            found, _ = nearest(ours.features(tap), reference)
            put(metric, found.median(), smallest=float(found.min()), reference_median=float(own.median()))
        elif metric == "inception_score":
            size = protocol.split_size
            put(metric, *inception_score(ours.features(tap), split_size=size), split_size=size)
            if size is not None and ours.count % size:
                notes.append(
                    f"inception_score: {ours.count} samples are no multiple of {size}, the published parts: a smaller "
                    "part scores lower"
                )
    return {metric: values[metric] for metric in metrics}


def floor_of(reference: Gathered, taps: set[str]) -> dict[str, dict]:
    """Fréchet distance of the reference's even pictures to its odd ones, by tap."""
    found = {}
    for tap in sorted(taps):
        features = reference.features(tap)
        halves = [moments_of_state(state_of(features[first::2]), "half of the reference") for first in (0, 1)]
        found[tap] = {
            "value": float(unclamped_distance(*halves).clamp(min=0)),
            "n": halves[0].count,
            "reference_n": halves[1].count,
        }
    return found


def about_reference(statistics: Statistics | None, pictures: PictureSet | None) -> dict:
    found = {} if pictures is None else pictures.about()
    if statistics:
        found |= {"statistics": statistics.path, "sha256": statistics.sha256, "about": statistics.about}
    return found


def environment(extractor: Extractor) -> dict:
    where = extractor.device
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    return {
        "device": name,
        "precision": "float32 features, float64 distances",
        "versions": versions((*DISTRIBUTIONS, "torchmetrics")),
        "date": datetime.date.today().isoformat(),
    }


def write_result(result: dict, path: Path) -> None:
    """Write it as JSON. Raises OSError, which names the file, where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write((json.dumps(result, indent=1) + "\n").encode()))
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror}): make room for it and run the same again"
        ) from None


TITLES = {"fd": "FD", "sfd": "sFD", "kid": "KID", "inception_score": "IS", "cmmd": "CMMD"}
INCEPTION_TITLES = {"fd": "FID", "sfd": "sFID"}


def as_lines(result: dict) -> list[str]:
    """The values as people read them; only Inception's distances are called FID."""
    titles = TITLES | (INCEPTION_TITLES if result["features"]["network"].startswith("inception") else {})
    lines = []
    for metric, row in result["values"].items():
        spread = f" +- {row['std']:.4g}" if "std" in row else ""
        if metric == "nearest":
            spread = f", between references {row['reference_median']:.6g}"
        if "chance" in row:
            spread += f", by guessing {row['chance']:.2g}"
        lines.append(
            f"{titles.get(metric, metric):12} {row['value']:.6g}{spread}  ({result['protocol']}, n={row['n']})"
        )
    for tap, row in result.get("floor", {}).items():
        lines.append(
            f"floor {tap:6} {row['value']:.6g}  (halves of the reference, {row['n']} and {row['reference_n']})"
        )
    return lines
