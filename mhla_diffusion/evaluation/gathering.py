"""What a pass of a network over a set of pictures leaves: moments of some taps, the features themselves of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from torch import Tensor

from .faults import InsufficientSamples
from .kept import Kept
from .metrics.moments import Moments, empty_state, merge_two, moments_of_state, state_of
from .networks.extractors import Extractor
from .passes import Look, Reader, Rows, Scoring
from .picture_sets import PictureSet


class Gathered(Rows):
    """Moments, whose memory does not grow with the set, and features."""

    def __init__(self, extractor: Extractor, moments: Set[str], features: Set[str]):
        super().__init__(lambda batch, _: extractor(batch))
        self.states = {tap: empty_state(extractor.taps[tap]).to(extractor.device) for tap in sorted(moments)}
        self.taps, self.device = sorted(features), extractor.device

    def add(self, found: Mapping[str, Tensor]) -> None:
        for tap, state in self.states.items():
            self.states[tap] = merge_two(state, state_of(found[tap]))
        super().add({tap: found[tap] for tap in self.taps})

    def moments(self, tap: str, what: str) -> Moments:
        return moments_of_state(self.states[tap].cpu(), what)

    def features(self, tap: str) -> Tensor:
        """`(N, width)` on the network's device, which computes tables of distances much faster."""
        return self[tap].to(self.device)

    def state(self) -> dict:
        return super().state() | {"moments": {tap: state.cpu() for tap, state in self.states.items()}}

    def restore(self, state: dict) -> None:
        super().restore(state)
        self.states = {tap: moments.to(self.device) for tap, moments in state["moments"].items()}


def look_at(
    pictures: PictureSet, extractor: Extractor, moments: Set[str], features: Set[str], batch_size: int
) -> Look:
    """The look that a pass is made of. Raises InsufficientSamples for fewer than two pictures."""
    if len(pictures) < 2:
        raise InsufficientSamples(
            f"{pictures.source} has {len(pictures)} picture: give at least 2 images per side"
        )
    return Look(pictures, Gathered(extractor, moments, features), batch_size)


def gather(
    pictures: PictureSet,
    extractor: Extractor,
    *,
    moments: Set[str],
    features: Set[str] = frozenset(),
    batch_size: int = 50,
    workers: int = 0,
    progress: Callable[[int], object] = lambda count: None,
    kept: Kept | None = None,
) -> Gathered:
    """One pass. `progress(n)` is called with the number of pictures of each batch.

    Args:
        kept: where the pass is written, and taken up from.

    Raises InsufficientSamples for fewer than two pictures, ValueError for what `PictureSet.batches` refuses.
    """
    look = look_at(pictures, extractor, moments, features, batch_size)

    def scoring() -> Scoring:
        yield [look]
        return {}

    Reader(workers, progress, kept=kept).alone(scoring())
    return look.rows
