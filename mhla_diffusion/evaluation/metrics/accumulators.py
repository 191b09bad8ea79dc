"""`torchmetrics.Metric` classes of the distances: they gather in batches, on any number of processes.

All take `update(pictures, real=...)`, and pictures go through an `Extractor`, or are features already when it is None.
Metrics of a `MetricCollection` with one extractor share its pass. States never hold the network. On several processes
each must see other pictures: PyTorch's DistributedSampler repeats some to fill up, which shifts every number here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from ..networks.extractors import Extractor
from ..networks.image_text import ImageTextModel
from .clip_score import ClipEstimate, cosines, estimate
from .frechet import frechet_distance
from .inception_score import ScoreEstimate, inception_score
from .kernel import KernelEstimate, clip_discrepancy, kernel_distance
from .moments import Moments, checked_features, empty_state, merge, merge_two, moments_of_state, state_of
from .neighbours import Shares, precision_recall


class GatheredRows(Metric):
    """A metric whose lists hold at least an empty part before processes exchange them.

    Otherwise torchmetrics skips the list of a process without any picture, and the others wait for it or break off.
    """

    @abstractmethod
    def rows(self, name: str) -> Tensor:
        """No rows, in the shape and type of the parts of the list `name`."""

    def sync(self, *args: Any, **kwargs: Any) -> None:
        for name in self.metric_state:
            parts = getattr(self, name)
            if isinstance(parts, list) and not parts:
                parts.append(self.rows(name))
        super().sync(*args, **kwargs)

    def whole(self, name: str) -> Tensor:
        """All rows of a list, after gathering or before."""
        parts = getattr(self, name)
        return parts if isinstance(parts, Tensor) else torch.cat([self.rows(name), *parts])


class PictureSetMetric(GatheredRows):
    """What the metrics share.

    Args:
        extractor: network that pictures go through; None when `update` is given features `(N, width)`.
        tap: which of its features.
        width: number of features, needed without an extractor.
        reset_real_features: whether `reset` also forgets the real side.
    """

    is_differentiable = False
    full_state_update = False
    real_state: str | None = None

    def __init__(
        self,
        extractor: Extractor | None = None,
        *,
        tap: str = "pool",
        width: int | None = None,
        reset_real_features: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if extractor is not None and tap not in extractor.taps:
            raise ValueError(f"the extractor has no features {tap!r}: it gives {', '.join(extractor.taps)}")
        if extractor is None and width is None:
            raise ValueError("neither an extractor nor a width: give an extractor, or the number of features")
        self.extractor, self.tap = extractor, tap
        self.width = width if extractor is None else extractor.taps[tap]
        self.reset_real_features = reset_real_features

    def features_of(self, inputs: Tensor) -> Tensor:
        """Features on the metric's device. Raises ValueError for another number of them, or values not finite."""
        features = inputs if self.extractor is None else self.extractor(inputs)[self.tap]
        checked_features(features)
        if features.shape[1] != self.width:
            raise ValueError(
                f"{features.shape[1]} features where {self.width} were announced: give another width"
            )
        features = features.detach().to(self.device)
        return features.double() if self.extractor is None else features

    def rows(self, name: str) -> Tensor:
        dtype = torch.float64 if self.extractor is None else torch.float32
        return torch.zeros(0, self.width, dtype=dtype, device=self.device)

    def reset(self) -> None:
        if self.reset_real_features or self.real_state is None:
            super().reset()
            return
        kept = getattr(self, self.real_state)
        kept = list(kept) if isinstance(kept, list) else kept  # a list is emptied in place
        super().reset()
        setattr(self, self.real_state, kept)


class FrechetDistance(PictureSetMetric):
    """Fréchet distance of two sets: FID with Inception's tap "pool", sFID with "spatial".

    The state does not grow with the number of pictures. Compute gives float64, 0-dim. Raises InsufficientSamples when a
    side has fewer than two pictures.
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    real_state = "real_moments"

    def __init__(self, extractor: Extractor | None = None, **kwargs: Any):
        super().__init__(extractor, **kwargs)
        self.reference: Moments | None = None
        self.add_state("real_moments", empty_state(self.width), dist_reduce_fx=merge)
        self.add_state("fake_moments", empty_state(self.width), dist_reduce_fx=merge)

    def update(self, pictures: Tensor, real: bool) -> None:
        if real and self.reference is not None:
            raise ValueError("the reference is statistics: reset the metric before giving it real pictures")
        batch = state_of(self.features_of(pictures))
        name = "real_moments" if real else "fake_moments"
        setattr(self, name, merge_two(getattr(self, name), batch.to(getattr(self, name).dtype)))

    def set_reference(self, moments: Moments) -> None:
        """Take the real side from statistics, on every process the same ones; their count may be unknown."""
        if len(moments.mean) != self.width:
            raise ValueError(f"statistics of {len(moments.mean)} features where {self.width} are compared")
        # Beside the states: those of several processes are merged, and copies would count as further pictures.
        self.reference = Moments(moments.mean.double(), moments.covariance.double(), moments.count)
        self._computed = None

    def reset(self) -> None:
        super().reset()
        if self.reset_real_features:
            self.reference = None

    def moments(self, real: bool) -> Moments:
        """What one side holds on this process."""
        if real and self.reference is not None:
            mean, covariance, count = self.reference
            return Moments(mean.to(self.device), covariance.to(self.device), count)
        state = self.real_moments if real else self.fake_moments
        return moments_of_state(state, "reference" if real else "sample set")

    def compute(self) -> Tensor:
        return frechet_distance(self.moments(real=True), self.moments(real=False))


class FeatureSetMetric(PictureSetMetric):
    """Keeps every feature, float32 from an extractor (8 kB a picture with Inception), float64 of given ones."""

    real_state = "real_features"

    def __init__(self, extractor: Extractor | None = None, **kwargs: Any):
        super().__init__(extractor, **kwargs)
        self.add_state("real_features", [], dist_reduce_fx="cat")
        self.add_state("fake_features", [], dist_reduce_fx="cat")

    def update(self, pictures: Tensor, real: bool) -> None:
        features = self.features_of(pictures)
        # Both lists get something, if only no rows: processes gather the same lists, of two dimensions each.
        self.real_features.append(features if real else features[:0])
        self.fake_features.append(features[:0] if real else features)

    def sides(self) -> tuple[Tensor, Tensor]:
        """Real and fake features, after gathering or before."""
        return self.whole("real_features"), self.whole("fake_features")


class KernelDistance(FeatureSetMetric):
    """KID: mean and standard deviation of the discrepancy over random subsets.

    Args:
        seed: of the subsets; None draws them from torch's global generator.
        others: as `kernel_distance`.
    """

    higher_is_better = False

    def __init__(
        self,
        extractor: Extractor | None = None,
        *,
        subsets: int = 100,
        subset_size: int = 1000,
        degree: int = 3,
        gamma: float | None = None,
        coef: float = 1.0,
        seed: int | None = 0,
        **kwargs: Any,
    ):
        super().__init__(extractor, **kwargs)
        self.settings = {
            "subsets": subsets,
            "subset_size": subset_size,
            "degree": degree,
            "gamma": gamma,
            "coef": coef,
        }
        self.seed = seed

    def compute(self) -> KernelEstimate:
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        return kernel_distance(*self.sides(), **self.settings, generator=generator)


class PrecisionRecall(FeatureSetMetric):
    """Improved precision and recall; `k` and `arithmetic` as in `precision_recall`."""

    higher_is_better = True
    plot_lower_bound, plot_upper_bound = 0.0, 1.0

    def __init__(
        self, extractor: Extractor | None = None, *, k: int = 3, arithmetic: str = "float64", **kwargs: Any
    ):
        super().__init__(extractor, **kwargs)
        self.settings = {"k": k, "arithmetic": arithmetic}

    def compute(self) -> Shares:
        return precision_recall(*self.sides(), **self.settings)


class ClipDiscrepancy(FeatureSetMetric):
    """CMMD of CLIP's image embeddings; `sigma` and `scale` as in `clip_discrepancy`."""

    higher_is_better = False

    def __init__(
        self, extractor: Extractor | None = None, *, sigma: float = 10.0, scale: float = 1000.0, **kwargs: Any
    ):
        super().__init__(extractor, **kwargs)
        self.settings = {"sigma": sigma, "scale": scale}

    def compute(self) -> Tensor:
        return clip_discrepancy(*self.sides(), **self.settings)


class InceptionScore(PictureSetMetric):
    """Inception Score of the pictures that are not real, in their order; `splits` as in `inception_score`.

    On several processes the order is that of the processes: splits differ, and with them the last digits.
    """

    higher_is_better = True
    plot_lower_bound = 1.0

    def __init__(
        self,
        extractor: Extractor | None = None,
        *,
        tap: str = "logits",
        splits: int | None = None,
        split_size: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(extractor, tap=tap, **kwargs)
        self.settings = {"splits": splits, "split_size": split_size}
        self.add_state("logits", [], dist_reduce_fx="cat")

    def update(self, pictures: Tensor, real: bool = False) -> None:
        logits = self.features_of(pictures)
        self.logits.append(logits[:0] if real else logits)

    def compute(self) -> ScoreEstimate:
        return inception_score(self.whole("logits"), **self.settings)


class ClipScore(GatheredRows):
    """CLIP score of pictures and their captions, `update(pictures, captions)`; `compute` gives a `ClipEstimate`.

    Args:
        model: what embeds them; None when `update` is given two sets of embeddings `(N, width)`.
        long_prompts: as `clip_score`.
    """

    is_differentiable = False
    full_state_update = False
    higher_is_better = True
    plot_lower_bound, plot_upper_bound = -100.0, 100.0

    def __init__(self, model: ImageTextModel | None = None, *, long_prompts: str = "truncate", **kwargs: Any):
        super().__init__(**kwargs)
        self.model, self.long_prompts = model, long_prompts
        self.add_state("cosines", [], dist_reduce_fx="cat")
        self.add_state("truncated", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, pictures: Tensor, captions: Sequence[str] | Tensor) -> None:
        if self.model is None:
            values = cosines(pictures, captions)
        else:
            if len(pictures) != len(captions):
                raise ValueError(f"{len(pictures)} pictures and {len(captions)} captions: give one for each")
            texts = self.model.encode_texts(captions, self.long_prompts)
            values = cosines(self.model.encode_images(pictures), texts.features)
            self.truncated += texts.truncated
        self.cosines.append(values.detach().to(self.device))

    def compute(self) -> ClipEstimate:
        return estimate(self.whole("cosines"), int(self.truncated))

    def rows(self, name: str) -> Tensor:
        return torch.zeros(0, dtype=torch.float64, device=self.device)
