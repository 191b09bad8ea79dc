"""Named ways to compare two sets of pictures: network, resize, metrics. A number without its name says little."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .faults import MissingWeights
from .networks.weight_files import find_weights

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

    names = tuple(dict.fromkeys((*PROTOCOLS, *more)))
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(f"no protocol is called {name!r}{hint}; they are {', '.join(names)}")


def with_weights(
    protocol: ImageProtocol, metrics: tuple[str, ...], weights: Mapping[str, str], skip_missing: bool
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The metrics whose weights are there, and why the others are not computed.

    Raises MissingWeights, unless `skip_missing` and one remains.
    """
    others = tuple(metric for metric in metrics if metric != "inception_score")
    if "inception_score" not in metrics or not others:
        return metrics, {}
    role = "inception-classifier"  # the only metric with weights that the others of its protocol do not need
    try:
        find_weights(role, weights.get(role))
    except MissingWeights as error:
        if not skip_missing:
            raise MissingWeights(
                f"inception_score: {error}. The other {len(others)} metrics of {protocol.name} can run: "
                "add --skip-missing"
            ) from None
        return others, {"inception_score": str(error)}
    return metrics, {}


def check_roles(protocol: ImageProtocol, weights: Mapping[str, str]) -> None:
    """Raise ValueError for weights that the protocol does not use."""
    foreign = sorted(weights.keys() - set(protocol.roles))
    if foreign:
        raise ValueError(
            f"protocol {protocol.name} uses no weights {foreign[0]!r}: it uses {', '.join(protocol.roles) or 'none'}"
        )


def check_weights(
    protocol: ImageProtocol, metrics: tuple[str, ...] | None, weights: Mapping[str, str], skip_missing: bool
) -> None:
    """Raise MissingWeights, before torch is imported, unless what these metrics need is there."""
    check_roles(protocol, weights)
    metrics, _ = with_weights(protocol, metrics or protocol.metrics, weights, skip_missing)
    if protocol.features == "inception":
        role = "inception-classifier" if "inception_score" in metrics else "inception"
        # The classifier's file has all that the other has.
        find_weights(role, weights.get(role) or weights.get("inception-classifier"))
    elif protocol.roles:
        find_weights(protocol.roles[0], weights.get(protocol.roles[0]))
