"""Named ways to compare two sets of pictures: network, resize, metrics. A number without its name says little."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Metric -> tap of the network it reads, and whether more is better (None: neither).
METRICS = {
    "fd": ("pool", False),  # Fréchet distance; with Inception this is FID
    "sfd": ("spatial", False),  # the same on the spatial features; sFID
    "kid": ("pool", False),
    "precision": ("pool", True),
    "recall": ("pool", True),
    "inception_score": ("logits", True),
    "cmmd": ("pool", False),
    # Median distance to the nearest reference, beside that between references: far below it, pictures were memorised.
    "nearest": ("pool", None),
}


@dataclass(frozen=True)
class ImageProtocol:
    """What `mhla eval run NAME` computes. `features`: inception, efficientnet, dinov2, clip-image or random."""

    name: str
    features: str
    metrics: tuple[str, ...]
    summary: str
    resize: str | None = None  # of Inception: fid_adm, fid_pytorch, fid_clean
    arithmetic: str = "float64"  # of the distances behind precision and recall
    split_size: int | None = None  # of the Inception Score; None: 10 splits

    @property
    def roles(self) -> tuple[str, ...]:
        """The weights it needs."""
        if self.features == "inception":
            return ("inception", "inception-classifier")[: 1 + ("inception_score" in self.metrics)]
        return {"efficientnet": ("efficientnet-lite0",), "random": ()}.get(self.features, (self.features,))


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        ImageProtocol(
            "fid_adm",
            "inception",
            ("fd", "sfd", "kid", "precision", "recall"),
            "FID, sFID, KID, precision and recall as in ADM and DiT: TensorFlow's resize",
            resize="fid_adm",
            arithmetic="float16",
        ),
        ImageProtocol(
            "fid_adm_full",
            "inception",
            ("fd", "sfd", "kid", "precision", "recall", "inception_score"),
            "the same with the Inception Score, whose classifier needs a file of yours",
            resize="fid_adm",
            arithmetic="float16",
            split_size=5000,
        ),
        ImageProtocol("fid_pytorch", "inception", ("fd", "kid"), "FID as pytorch-fid (SANA, MJHQ)", "fid_pytorch"),
        ImageProtocol("fid_clean", "inception", ("fd", "kid"), "FID as clean-fid: Pillow's bicubic", "fid_clean"),
        ImageProtocol(
            "fd_efficientnet",
            "efficientnet",
            ("fd", "kid", "precision", "recall", "nearest"),
            "the same distances on EfficientNet-Lite0, whose weights come in a package; not FID",
        ),
        ImageProtocol(
            "fd_dinov2", "dinov2", ("fd", "kid", "precision", "recall", "nearest"), "on DINOv2; your weights"
        ),
        ImageProtocol("cmmd", "clip-image", ("cmmd",), "discrepancy of CLIP's embeddings; your weights"),
        ImageProtocol(
            "smoke", "random", ("fd", "kid", "precision", "recall"), "random weights: tries things out"
        ),
    )
}  # fmt: skip


def find_protocol(name: str, more: Iterable[str] = ()) -> ImageProtocol:
    """Raises ValueError, naming the nearest of these and `more`, for an unknown one."""
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    import difflib

    names = (*PROTOCOLS, *more)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    raise ValueError(f"no protocol is called {name!r}{hint} They are {', '.join(names)}")
