"""Named ways to score pictures against their captions. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextImageProtocol:
    """What `mhla eval run NAME` computes from pictures and prompts, without any reference.

    `model`, `pretrained`: open_clip's names, which a file of weights is taken to be of; None: what the file says.
    `keyed`: each picture is named by its prompt's key, as MJHQ-30K's are, and `count` of them make the set.
    """

    name: str
    summary: str
    metrics: tuple[str, ...]
    roles: tuple[str, ...]
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
    )
}
