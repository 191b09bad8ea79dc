"""Named ways to score pictures against their captions. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..geneval.judge import TASKS as GENEVAL_TASKS

SCENE_TASKS = ("single_object", "two_object", "counting", "colors", "position", "place")


@dataclass(frozen=True)
class TextImageProtocol:
    """What `mhla eval run NAME` computes from pictures and prompts, without any reference.

    `kind`: which code scores them: clip, retrieval, scenes or detections. `optional`: roles that are only read for some
    sets. `model`, `pretrained`: open_clip's names, which a file of weights is taken to be of; None: what the file says.
    `keyed`: each picture is named by its prompt's key, as MJHQ-30K's are, and `count` of them make the set.
    """

    name: str
    summary: str
    metrics: tuple[str, ...]
    roles: tuple[str, ...]
    kind: str = "clip"
    optional: tuple[str, ...] = ()
    model: str = "ViT-L-14"
    pretrained: str | None = None
    keyed: bool = False
    count: int | None = None


TEXT_IMAGE_PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        TextImageProtocol(
            "clip_score",
            "CLIP score of pictures and their prompts, with any CLIP; 100 x cosine, and the cosine",
            ("clip_score", "clip_cosine"),
            ("clip",),
        ),
        TextImageProtocol(
            "mjhq30k_clip",
            "CLIP score as SANA reports it: OpenAI's ViT-L/14, MJHQ-30K's 30,000 prompts, pictures named by key",
            ("clip_score", "clip_cosine"),
            ("clip",),
            pretrained="openai",
            keyed=True,
            count=30000,
        ),
        TextImageProtocol(
            "emoji_retrieval",
            "is the asked concept the nearest of all 1,923, or among five, by heads on EfficientNet-Lite0; offline",
            ("r_at_1", "r_at_5"),
            ("efficientnet-lite0", "emoji-heads"),
            kind="retrieval",
            optional=("minilm",),
        ),
        TextImageProtocol(
            "emoji_scenes",
            "GenEval's rules on emoji: objects, number, background colour, place, read from the picture; offline",
            (
                "emoji_geneval",
                *SCENE_TASKS,
                "objects_found",
                "pixels_background",
                "pixels_count",
                "pixels_place",
            ),
            ("efficientnet-lite0", "emoji-heads"),
            kind="scenes",
        ),
        TextImageProtocol(
            "geneval",
            "GenEval: six tasks judged from detections (a .jsonl), or from pictures by Mask2Former and CLIP",
            ("geneval", *GENEVAL_TASKS),
            (),
            kind="detections",
            optional=("mask2former", "clip"),
        ),
    )
}
