"""What VBench's dimensions read from disk, where it is looked for, and what is said when it is not there.

VBench downloads what it lacks when it starts; here everything is found first, and it never reaches the network.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...weights import WEIGHTS_VARIABLE
from ..faults import MissingWeights

CACHE_VARIABLE = "VBENCH_CACHE_DIR"  # VBench's own
RAFT, CLIP_B = "raft_model/models/raft-things.pth", "clip_model/ViT-B-32.pt"
GRIT = "grit_model/grit_b_densecap_objectdet.pth"
VICLIP, WORDS = "ViCLIP/ViClip-InternVid-10M-FLT.pth", "ViCLIP/bpe_simple_vocab_16e6.txt.gz"
DINO = "dino_model/dino_vitbase16_pretrain.pth"
MUSIQ = "pyiqa_model/musiq_spaq_ckpt-358bb6af.pth"

# Files and folders by their places under VBench's cache folder.
FILES = {
    "subject_consistency": (DINO, "dino_model/facebookresearch_dino_main"),
    "background_consistency": (CLIP_B,),
    "temporal_flickering": (),
    "motion_smoothness": ("amt_model/amt-s.pth",),
    "dynamic_degree": (RAFT,),
    "aesthetic_quality": (
        "clip_model/ViT-L-14.pt",
        "aesthetic_model/emb_reader/sa_0_4_vit_l_14_linear.pth",
    ),
    "imaging_quality": (MUSIQ,),
    "object_class": (GRIT,),
    "multiple_objects": (GRIT,),
    "human_action": ("umt_model/l16_ptk710_ftk710_ftk400_f16_res224.pth",),
    "color": (GRIT,),
    "spatial_relationship": (GRIT,),
    "scene": ("caption_model/tag2text_swin_14m.pth", "bert-base-uncased"),
    "appearance_style": (CLIP_B,),
    "temporal_style": (VICLIP, WORDS),
    "overall_consistency": (VICLIP, WORDS),
}
# Who publishes each.
ORIGINS = {
    DINO: "facebookresearch/dino",
    "dino_model/facebookresearch_dino_main": "a clone of facebookresearch/dino",
    CLIP_B: "OpenAI's ViT-B/32",
    "clip_model/ViT-L-14.pt": "OpenAI's ViT-L/14",
    "amt_model/amt-s.pth": "lalala125/AMT",
    RAFT: "in models.zip of princeton-vl/RAFT",
    "aesthetic_model/emb_reader/sa_0_4_vit_l_14_linear.pth": "LAION-AI/aesthetic-predictor",
    MUSIQ: "weights v0.1 of chaofengc/IQA-PyTorch",
    GRIT: "OpenGVLab/VBench_Used_Models",
    "umt_model/l16_ptk710_ftk710_ftk400_f16_res224.pth": "OpenGVLab/VBench_Used_Models",
    VICLIP: "OpenGVLab/VBench_Used_Models",
    "caption_model/tag2text_swin_14m.pth": "xinyu1205/recognize-anything",
    "bert-base-uncased": "a copy of that model in transformers' layout",
    WORDS: "in the package openai-clip, folder clip",
}
# The score of a video's colour is left out where its object was not found.
LEAVES_OUT = {"color"}
# VBench takes these of any videos; of the others it must know the prompt list.
OF_ANY_VIDEOS = (
    "subject_consistency",
    "background_consistency",
    "temporal_flickering",
    "motion_smoothness",
    "dynamic_degree",
    "aesthetic_quality",
    "imaging_quality",
    "human_action",
    "temporal_style",
    "overall_consistency",
)


class Place(NamedTuple):
    path: Path
    why: str


def files_of(dimension: str, static_filter: bool) -> tuple[str, ...]:
    """What a dimension reads; the filter of still videos, which flickering is scored after, has a network."""
    if dimension == "temporal_flickering" and static_filter:
        return (RAFT,)
    return FILES[dimension]


def places(given: str | os.PathLike | None, environment: Path | None = None) -> list[Place]:
    """Folders in the layout of VBench's cache, in the order in which they are looked into."""
    if given is not None:
        found = [Place(Path(given).expanduser(), "--weights")]
    else:
        found = []
        if own := os.environ.get(CACHE_VARIABLE):
            found.append(Place(Path(own).expanduser(), f"${CACHE_VARIABLE}"))
        for root in filter(None, os.environ.get(WEIGHTS_VARIABLE, "").split(os.pathsep)):
            found.append(Place(Path(root).expanduser() / "vbench", f"${WEIGHTS_VARIABLE}"))
        found.append(Place(Path("~/.cache/vbench").expanduser(), "VBench's own"))
    return found


def look(
    dimensions: Iterable[str],
    where: Sequence[Place],
    *,
    static_filter: bool = False,
    environment: Path | None = None,
) -> tuple[dict[str, Path], dict[str, list[str]]]:
    """What is found, by its place in VBench's layout, and what each dimension lacks.

    `environment` is VBench's: its package of CLIP brings the list of words.
    """
    found, lacking = {}, {}
    for dimension in dimensions:
        for file in files_of(dimension, static_filter):
            candidates = [place.path / file for place in where]
            if file == WORDS and environment is not None:
                candidates += environment.glob(f"lib/python3*/site-packages/clip/{Path(file).name}")
            path = next((path for path in candidates if path.exists()), None)
            if path is None:
                lacking.setdefault(dimension, []).append(file)
            else:
                found[file] = path
    return found, lacking


def missing(lacking: dict[str, list[str]], where: Sequence[Place], others: int) -> MissingWeights:
    """The error that says what lacks for which dimensions, every place searched, and what to type."""
    wanted: dict[str, list[str]] = {}
    for dimension, files in lacking.items():
        for file in files:
            wanted.setdefault(file, []).append(dimension)
    parts = [f"{file} ({ORIGINS[file]}; for {', '.join(names)})" for file, names in wanted.items()]
    searched = ", ".join(f"{place.path} ({place.why})" for place in where)
    unset = [f"${name}" for name in (CACHE_VARIABLE, WEIGHTS_VARIABLE) if not os.environ.get(name)]
    unset = f"; not set: {', '.join(unset)}" if unset and where[0].why != "--weights" else ""
    rest = f"; the other {others} can be scored without: add --skip-missing" if others else ""
    return MissingWeights(
        f"no weights {', '.join(parts)}; searched {searched}{unset}. Put them under one of these folders by these "
        f"names, or give another with --weights FOLDER{rest}"
    )
