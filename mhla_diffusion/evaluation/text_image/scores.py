"""CLIP score of a set of pictures, ready for JSON."""

from __future__ import annotations

import datetime

import torch
from torch import Tensor

from ...provenance import DISTRIBUTIONS, versions
from ..image_scores import SCHEMA
from ..metrics.clip_score import SCALE, cosines, estimate
from ..networks.image_text import ImageTextModel
from ..passes import Look, Rows, Scoring
from ..picture_sets import PictureSet
from .prompts import Prompts
from .protocols import TextImageProtocol

# Of OpenAI's ViT-L/14, which published scores of the keyed protocol are of.
PUBLISHED = {"width": 768, "image_size": 224, "activation": "QuickGELU"}


def unlike_published(protocol: TextImageProtocol, about: dict) -> list[str]:
    """A warning when the model cannot be the one that the protocol is of."""
    size = about["image_size"]
    found = about | {"image_size": size[0] if isinstance(size, list | tuple) else size}
    unlike = [name for name, value in PUBLISHED.items() if found[name] != value]
    if not unlike:
        return []
    words = ", ".join(f"{name} {found[name]}" for name in unlike)
    return [
        f"{protocol.name} is of OpenAI's {protocol.model}, this model has {words}: not comparable with its numbers"
    ]


def caption_scoring(
    samples: PictureSet,
    prompts: Prompts,
    protocol: TextImageProtocol,
    model: ImageTextModel,
    *,
    long_prompts: str = "truncate",
    batch_size: int = 50,
) -> Scoring:
    """The CLIP score, with the schema of `image_scores.score`.

    Raises ValueError as `PictureSet.batches` and `ImageTextModel` do; nothing was written then.
    """
    notes = list(model.notes)
    if protocol.count and len(samples) != protocol.count:
        notes.append(
            f"{len(samples)} pictures, {protocol.name} has {protocol.count}: not comparable with published numbers"
        )
    if protocol.pretrained:
        notes += unlike_published(protocol, model.about)

    def find(batch: Tensor, first: int) -> dict[str, Tensor | list]:
        texts = model.encode_texts(prompts.texts[first : first + len(batch)], long_prompts)
        return {"cosine": cosines(model.encode_images(batch), texts.features), "truncated": [texts.truncated]}

    look = Look(samples, Rows(find), batch_size)
    yield [look]
    cut = sum(look.rows["truncated"])
    result = estimate(look.rows["cosine"], cut)
    notes += samples.doubts()
    if cut:
        notes.append(f"{cut} prompts are longer than {model.context} tokens and were cut, the end token kept")
    if abs(model.about["logit_scale"] / SCALE - 1) > 1e-3:
        notes.append(
            f"the model's own scale is {model.about['logit_scale']:.4g}; scores are {SCALE:g} x cosine"
        )
    row = {"n": result.count, "higher_is_better": True}
    where = model.device
    return {
        "schema_version": SCHEMA,
        "protocol": protocol.name,
        "values": {
            "clip_score": row
            | {"value": float(result.score), "std": float(result.std), "scale": f"{SCALE:g} x cosine"},
            "clip_cosine": row
            | {"value": float(result.cosine), "std": float(result.std) / SCALE, "scale": "cosine"},
        },
        "skipped": {},
        "warnings": notes,
        "features": model.about,
        "inputs": {
            "samples": samples.about(),
            "prompts": prompts.about | {"truncated": cut},
        },
        "settings": {"long_prompts": long_prompts, "batch_size": batch_size, "clamped": False},
        "environment": {
            "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
            "precision": "float32 features, float64 cosines",
            "versions": versions((*DISTRIBUTIONS, "torchmetrics", "open_clip_torch")),
            "date": datetime.date.today().isoformat(),
        },
        "timings": {"features_seconds": round(look.seconds, 3)},
    }
