"""Pictures before a network: what is accepted, and the resizes and scalings that published numbers differ by."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

BLACK = "no uint8 value is above 1"
HALF = 0.5 / 255  # so far outside [0, 1] floats become the same bytes: it is rounding, as of (x + 1) / 2


def as_uint8(pictures: Tensor) -> Tensor:
    """`(N, 3, H, W)` uint8 of uint8, or of floats in [0, 1], which are rounded.

    Raises ValueError for another shape, another type, values that are not finite, and floats outside [0, 1].
    """
    if pictures.ndim != 4 or pictures.shape[1] != 3:
        raise ValueError(
            f"pictures of shape {tuple(pictures.shape)}: give (N, 3, height, width), three colours first"
        )
    if pictures.dtype == torch.uint8:
        if len(pictures) > 1 and int(pictures.max()) == 1:
            warnings.warn(
                f"{BLACK}: were these floats in [0, 1], cast instead of multiplied by 255?", stacklevel=2
            )
        return pictures
    if not pictures.is_floating_point():
        raise ValueError(f"pictures are {pictures.dtype}: give uint8, or floats in [0, 1]")
    if not len(pictures):
        return pictures.to(torch.uint8)
    if not torch.isfinite(pictures).all():
        raise ValueError("pictures hold values that are not finite: look at what drew them")
    low, high = pictures.amin().item(), pictures.amax().item()
    if low < -HALF or high > 1 + HALF:
        advice = (
            "(x + 1) / 2 maps [-1, 1] there" if low >= -1 and high <= 1 else "x / 255 maps [0, 255] there"
        )
        raise ValueError(
            f"float pictures reach from {low:.4g} to {high:.4g}: give [0, 1] ({advice}), or uint8"
        )
    # Rounded, as the usual samplers do: cutting off would darken every picture by half a step.
    return (pictures.float() * 255).round().clamp(0, 255).to(torch.uint8)


def tensorflow_bilinear(pictures: Tensor, size: int) -> Tensor:
    """The resize of TensorFlow 1: output i reads input i * in / out, without a shift by half a pixel, no antialias."""

    def along(x: Tensor, dim: int) -> Tensor:
        length = x.shape[dim]
        place = torch.arange(size, device=x.device, dtype=torch.float32) * (length / size)
        low = place.floor().long().clamp(max=length - 1)
        weight = (place - low).reshape([-1 if axis == dim else 1 for axis in range(4)])
        first, second = x.index_select(dim, low), x.index_select(dim, (low + 1).clamp(max=length - 1))
        return first + (second - first) * weight

    pictures = pictures.float()
    if pictures.shape[-2:] == (size, size):
        return pictures
    return along(along(pictures, 3), 2)


def torch_bilinear(pictures: Tensor, size: int) -> Tensor:
    """Bilinear with the shift by half a pixel and without antialias."""
    pictures = pictures.float()
    if pictures.shape[-2:] == (size, size):
        return pictures
    return F.interpolate(pictures, (size, size), mode="bilinear", align_corners=False)


def pil_bicubic(pictures: Tensor, size: int) -> Tensor:
    """Pillow's bicubic with antialias, per channel in float, clipped to [0, 255], as clean-fid resizes. On the CPU."""
    out = np.empty((*pictures.shape[:2], size, size), np.float32)
    planes = pictures.cpu().numpy().astype(np.float32)  # once, from whatever device
    for index in np.ndindex(*planes.shape[:2]):
        plane = Image.fromarray(planes[index])
        out[index] = np.asarray(plane.resize((size, size), Image.Resampling.BICUBIC)).clip(0, 255)
    return torch.from_numpy(out).to(pictures.device)


# Name of a protocol -> its resize of [0, 255], and its scaling.
PROTOCOLS: dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor], Tensor]]] = {
    "fid_adm": (tensorflow_bilinear, lambda x: (x - 128) / 128),
    "fid_pytorch": (torch_bilinear, lambda x: x / 127.5 - 1),
    "fid_clean": (pil_bicubic, lambda x: (x - 128) / 128),
}
DESCRIPTIONS = {
    "fid_adm": {"resize": "TensorFlow 1 bilinear, no antialias", "scaling": "(x - 128) / 128"},
    "fid_pytorch": {"resize": "torch bilinear, no antialias", "scaling": "x / 127.5 - 1"},
    "fid_clean": {"resize": "Pillow bicubic, antialias", "scaling": "(x - 128) / 128"},
}


def prepare(pictures: Tensor, protocol: str, size: int) -> Tensor:
    """Float32 `(N, 3, size, size)` of uint8 pictures `(N, 3, H, W)`. Raises ValueError for an unknown protocol."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"no resize is called {protocol!r}: give {', '.join(PROTOCOLS)}")
    resize, scale = PROTOCOLS[protocol]
    return scale(resize(pictures, size))
