"""One call for every network: uint8 pictures in, named features out, and a record of what computed them."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .inception import INPUT_SIZE, TAPS, FIDInception
from .inception_weights import load_inception
from .preparation import DESCRIPTIONS, as_uint8, pil_bicubic, prepare
from .transformers_folders import load_model
from .weight_files import about_weights, find_weights


class Extractor:
    """Features of pictures by a frozen network, in float32.

    The features of the last batch are kept: metrics that are given the same tensor one after another share a pass.

    Args:
        run: uint8 pictures on `device` -> tap -> features `(N, width)`.
        taps: tap -> width, what `run` gives.
        about: network, weights and preparation, as result files store them; sets with different ones do not compare.
    """

    def __init__(
        self,
        run: Callable[[Tensor], dict[str, Tensor]],
        taps: dict[str, int],
        about: dict,
        device: torch.device,
    ):
        self.run, self.taps, self.about, self.device = run, taps, about, torch.device(device)
        self.passes = 0  # batches that went through the network
        self._last: tuple | None = None

    def __deepcopy__(self, memo) -> Extractor:
        return self  # the network never changes; a copy of a metric needs none of its own

    @torch.no_grad()
    def __call__(self, pictures: Tensor) -> dict[str, Tensor]:
        """Tap -> float32 `(N, width)` on `device`. Raises ValueError as `as_uint8` does."""
        # A tensor that inference mode made counts no changes, so nothing tells whether it is still the same.
        version = None if pictures.is_inference() else pictures._version
        if self._last is not None and version is not None:
            last, last_version, found = self._last
            if last() is pictures and last_version == version:
                return found
        with full_precision(self.device):
            found = {
                tap: value.float() for tap, value in self.run(as_uint8(pictures).to(self.device)).items()
            }
        self.passes += 1
        self._last = None if version is None else (weakref.ref(pictures), version, found)
        return found


@contextlib.contextmanager
def full_precision(device: torch.device):
    """No autocast and no TF32 convolutions: both shift FID."""
    with torch.autocast(device.type, enabled=False), contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, allow_tf32=False))
        yield


def usable(device: str | torch.device) -> torch.device:
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(device, str):
        try:
            chosen = torch.device(device)
        except RuntimeError:
            raise ValueError(f"unknown device {device!r}: give auto, cpu, cuda or cuda:0") from None
        count = torch.cuda.device_count()
        if chosen.type == "cuda" and (chosen.index or 0) >= count:
            raise ValueError(
                f"device {device} is not there ({count} CUDA devices): give --device cpu or auto"
            )
    return torch.device(device)


def inception(
    taps: Sequence[str] = ("pool",),
    *,
    protocol: str = "fid_adm",
    weights: str | os.PathLike | None = None,
    device: str | torch.device = "auto",
) -> Extractor:
    """The Inception network of FID (see `networks.inception.TAPS`).

    Args:
        protocol: resize and scaling: fid_adm, fid_pytorch or fid_clean.
        weights: a file; without it `$MHLA_WEIGHTS` and the package of the `inception` extra are searched.

    Raises MissingWeights (a ValueError) with every place searched.
    """
    network, about = load_inception(weights, classifier="logits" in taps)
    return of_inception(network, taps, protocol=protocol, device=device, weights=about)


def of_inception(
    network: FIDInception, taps: Sequence[str], *, protocol: str, device: str | torch.device, weights: dict
) -> Extractor:
    """Extractor of a network in hand; `weights` says where they come from."""
    prepare(torch.zeros(0, 3, 8, 8, dtype=torch.uint8), protocol, 8)  # an unknown protocol is named now
    network.check(torch.zeros(1, 3, INPUT_SIZE, INPUT_SIZE), tuple(taps))
    network = network.to(usable(device)).eval()
    return Extractor(
        lambda pictures: network(prepare(pictures, protocol, INPUT_SIZE), tuple(taps)),
        {tap: TAPS[tap] for tap in taps},
        {
            "network": "inception-2015-12-05",
            "protocol": protocol,
            **DESCRIPTIONS[protocol],
            "weights": weights,
        },
        usable(device),
    )


def efficientnet(
    weights: str | os.PathLike | None = None, *, device: str | torch.device = "auto"
) -> Extractor:
    """EfficientNet-Lite0 with ImageNet weights, both from packages of the `eval` extra; tap "pool", 1280 features.

    Args:
        weights: a state dict in place of the package's.

    Raises ValueError as `efficientnet_lite0`.
    """
    from ..features import INPUT_SIZE as SIDE
    from ..features import efficientnet_lite0, image_features

    found = find_weights("efficientnet-lite0", weights)
    network = efficientnet_lite0(usable(device), found.path)
    return Extractor(
        lambda pictures: {
            "pool": image_features(network, pictures, max(1, len(pictures))).to(usable(device))
        },
        {"pool": 1280},
        {
            "network": "efficientnet-lite0",
            "protocol": f"bicubic_{SIDE}",
            "resize": f"torch bicubic to {SIDE}, no antialias",
            "scaling": "(x - 127) / 128",
            "weights": about_weights("efficientnet-lite0", found),
        },
        usable(device),
    )


def random_network(width: int = 64, *, seed: int = 0, device: str | torch.device = "auto") -> Extractor:
    """A small convolutional network of random weights that `seed` fixes: tries programs out without any weights.

    Its distances say whether two sets differ, not how people see them; never print them as FID.
    """
    draw = torch.Generator().manual_seed(seed)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 5, stride=2),
        torch.nn.GELU(),
        torch.nn.Conv2d(16, width, 5, stride=2),
        torch.nn.GELU(),
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=draw) / max(1, parameter[0].numel()) ** 0.5
            )
    network = network.eval().to(usable(device))
    return Extractor(
        lambda pictures: {"pool": network(prepare(pictures, "fid_pytorch", 32)).mean((2, 3))},
        {"pool": width},
        {"network": f"random-{width}-seed{seed}", "protocol": "random features, not FID", "weights": None},
        usable(device),
    )


COLOURS = {  # mean and standard deviation of the pictures that the networks were trained with
    "dinov2": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip-image": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}


def transformers_vision(
    role: str, weights: str | os.PathLike | None = None, *, device: str | torch.device = "auto"
) -> Extractor:
    """DINOv2 (role "dinov2": class token, 224 px) or CLIP's image side (role "clip-image": projected embedding).

    Pictures are resized to the square by Pillow's bicubic, whatever their shape; tap "pool".

    Args:
        weights: a folder in transformers' layout; without it `$MHLA_WEIGHTS/<role>/` is searched. Never the network.

    Raises MissingWeights with every place searched; ValueError for another kind of model.
    """
    found = find_weights(role, weights)
    from transformers import CLIPVisionModelWithProjection, Dinov2Model

    cls = Dinov2Model if role == "dinov2" else CLIPVisionModelWithProjection
    where = usable(device)
    kind = {"dinov2": "dinov2", "clip-image": "clip, clip_vision_model"}[role]
    network = load_model(cls, found.path, kind).to(where)
    vision = getattr(network.config, "vision_config", network.config)
    side = 224 if role == "dinov2" else vision.image_size
    mean, std = (torch.tensor(values, device=where).reshape(3, 1, 1) for values in COLOURS[role])

    def run(pictures: Tensor) -> dict[str, Tensor]:
        output = network((pil_bicubic(pictures, side) / 255 - mean) / std)
        return {"pool": output.last_hidden_state[:, 0] if role == "dinov2" else output.image_embeds}

    width = network.config.hidden_size if role == "dinov2" else network.visual_projection.out_features
    about = {
        "network": role,
        "protocol": f"{role}_{side}",
        "resize": f"Pillow bicubic to {side}, antialias",
        "scaling": "mean and deviation of the training pictures",
        "weights": about_weights(role, found),
    }
    return Extractor(run, {"pool": width}, about, where)
