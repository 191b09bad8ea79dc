"""What a part of a protocol can name: each scorer's metrics, weights and packages, and how it is run. Imports no torch.

The scorers are the ways of `mhla eval run NAME` (networks and resizes; pictures and captions), VBench's native and
imported scores, and attention.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from ..faults import MissingWeights
from ..image_protocols import PROTOCOLS
from ..networks.weight_files import find_weights
from ..text_image.protocols import TEXT_IMAGE_PROTOCOLS
from ..vbench.dimensions import DIMENSIONS
from . import running
from .inputs import VBENCH_TOTALS, Inputs
from .schema import Part, Protocol, Unreadable, nearest


@dataclass(frozen=True)
class Scorer:
    """`run(part, protocol, inputs)` is a scoring (see `passes`), its result has "values" and "warnings".

    roles: weights that it needs; optional: weights that it reads for some samples only; packages: modules, and what
    brings each; needs: fields of `Inputs` without which it cannot run; reads: others that it looks at; options: names
    of a part's options.
    """

    name: str
    kind: str
    metrics: tuple[str, ...]
    run: Callable[[Part, Protocol, Inputs], Generator]
    roles: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    packages: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    summary: str = ""


EFFICIENTNET = ("efficientnet_lite_pytorch", "pip install 'mhla_diffusion[eval]'")
PYAV = ("av", "pip install 'mhla_diffusion[video]'")


def scorers() -> dict[str, Scorer]:
    """Every scorer by name."""
    found = [
        Scorer(
            each.name,
            "pictures",
            each.metrics,
            running.run_distances,
            roles=each.roles,
            packages=(EFFICIENTNET,) if each.features == "efficientnet" else (),
            needs=("reference",),
            summary=each.summary,
        )
        for each in PROTOCOLS.values()
    ]
    found += [
        Scorer(
            each.name,
            "detections" if each.kind == "detections" else "pictures",
            each.metrics,
            running.run_captions,
            roles=each.roles,
            optional=each.optional,
            needs=("prompts",) if each.keyed or each.kind == "detections" else (),
            reads=("prompts",),
            options=("long_prompts",) if each.kind == "clip" else (),
            summary=each.summary,
        )
        for each in TEXT_IMAGE_PROTOCOLS.values()
    ]
    found += [
        Scorer(
            "vbench_check",
            "videos",
            ("videos_found",),
            running.at_once(running.run_video_check),
            roles=("vbench-prompts",),
            packages=(PYAV,),
            reads=("plan", "prompts"),
            options=("fps", "size", "frames", "dimensions"),
            summary="are all videos of VBench's plan there, readable and alike",
        ),
        Scorer(
            "vbench_flicker",
            "videos",
            ("temporal_flickering",),
            running.at_once(running.run_flicker),
            packages=(PYAV,),
            summary="temporal flickering, the dimension of VBench that needs no weights",
        ),
        Scorer(
            "moving_emoji",
            "videos",
            ("motion", "direction", "background"),
            running.at_once(running.run_motions),
            packages=(PYAV,),
            reads=("prompts",),
            summary="do videos of one object on a plain background move as their captions say; pixels only",
        ),
        Scorer(
            "vbench_totals",
            "videos",
            (*DIMENSIONS, *VBENCH_TOTALS),
            running.at_once(running.run_totals),
            needs=("results",),
            summary="raw scores from VBench's result files; Quality, Semantic and Total as published",
        ),
        Scorer(
            "attention",
            "pipeline",
            (),
            running.at_once(running.run_attention),
            options=("prompts", "steps", "at", "threshold", "entropy_rows", "exact_limit", "one_block"),
            summary="rank and entropy of every attention layer while the pipeline draws",
        ),
    ]
    return {each.name: each for each in found}


def check_protocol(protocol: Protocol) -> list[Scorer]:
    """The scorer of each part. Raises Unreadable for names, metrics or options that do not exist, or do not fit."""
    known = scorers()
    found = []
    for index, part in enumerate(protocol.parts):
        place = f"{protocol.file}: parts[{index}]"
        if part.scorer not in known:
            hint = nearest(part.scorer, known) or f": they are {', '.join(known)}"
            raise Unreadable(f"{place}.scorer: there is no {part.scorer!r}{hint}")
        scorer = known[part.scorer]
        for metric in part.metrics or ():
            if scorer.metrics and metric not in scorer.metrics:
                hint = nearest(metric, scorer.metrics) or f": it has {', '.join(scorer.metrics)}"
                raise Unreadable(f"{place}.metrics: {part.scorer} has no {metric!r}{hint}")
        for option in part.options:
            if option not in scorer.options:
                hint = nearest(option, scorer.options) or f": it has {', '.join(scorer.options) or 'none'}"
                raise Unreadable(f"{place}.options: {part.scorer} has no {option!r}{hint}")
        if scorer.kind != protocol.samples.kind:
            raise Unreadable(
                f"{place}: {part.scorer} scores {scorer.kind}, samples.kind is {protocol.samples.kind}: use one"
            )
        if "reference" in scorer.needs and protocol.reference.kind == "none":
            raise Unreadable(f"{place}: {part.scorer} needs a reference: say reference: {{kind: pictures}}")
        found.append(scorer)
    return found


@dataclass(frozen=True)
class Lack:
    """Something that a part needs and that is not here. `metric`: the only metric that it keeps from running."""

    scorer: str
    what: str
    advice: str
    metric: str | None = None


def lacks(part: Part, scorer: Scorer, weights: dict[str, str]) -> Iterator[Lack]:
    """Weights and packages that are missing for a part."""
    wanted = part.metrics or scorer.metrics
    # Last, for a file with the classifier has all that Inception's other metrics need.
    roles = sorted(scorer.roles, key=lambda role: role == "inception")
    whole = False
    for role in roles:
        single = "inception_score" if role == "inception-classifier" else None
        if (single and single not in wanted) or (role == "inception" and whole):
            continue
        given = weights.get(role) or (weights.get("inception-classifier") if role == "inception" else None)
        try:
            find_weights(role, given)
            whole |= single is not None
        except MissingWeights as error:
            yield Lack(scorer.name, f"weights {role!r}", str(error), single if len(wanted) > 1 else None)
    for module, advice in scorer.packages:
        if importlib.util.find_spec(module) is None:
            yield Lack(scorer.name, f"package {module}", f"{module} is not installed: {advice}")
