"""Does a generated picture show the concept it was asked for? Judged by its nearest real pictures.

For each picture the real concepts are ranked by the cosine similarity of their most similar real picture; the score is
the share of pictures whose own concept is among the first k. Real pictures of the same prompts, scored in the same
way, say how much of the remaining error is the judge's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def concept_ranks(
    queries: Tensor, query_concepts: Sequence[str], gallery: Tensor, gallery_concepts: Sequence[str]
) -> Tensor:
    """Rank (0 = nearest) of each query's own concept among all concepts of the gallery.

    Args:
        queries: ``(Q, F)`` features. gallery: ``(G, F)`` features of real pictures.
        query_concepts, gallery_concepts: Q and G names.

    Returns:
        ``(Q,)`` int64.

    Raises:
        ValueError: if a query's concept has no picture in the gallery, which no picture could then find.
    """
    names = sorted(set(gallery_concepts))
    index = {name: i for i, name in enumerate(names)}
    unknown = sorted(set(query_concepts) - set(names))
    if unknown:
        raise ValueError(f"{len(unknown)} concepts have no real picture to compare with, e.g. {unknown[0]!r}")
    # centring on the gallery's mean makes the cosine look at what differs between pictures
    mean = gallery.mean(0)
    queries, gallery = F.normalize(queries - mean, dim=1), F.normalize(gallery - mean, dim=1)
    owner = torch.tensor([index[name] for name in gallery_concepts])
    similarity = queries @ gallery.T  # (Q, G)
    best = similarity.new_full((len(queries), len(names)), -2.0)
    best.scatter_reduce_(1, owner.expand(len(queries), -1), similarity, "amax")  # (Q, concepts)
    own = torch.tensor([index[name] for name in query_concepts])
    own_score = best.gather(1, own[:, None])
    return (best > own_score).sum(1)


def top_k(ranks: Tensor, k: int) -> float:
    """Share of ranks below ``k``, a float in [0, 1]."""
    return (ranks < k).double().mean().item()


def chance(num_concepts: int, k: int) -> float:
    """Top-k share of a judge that guesses."""
    return min(1.0, k / num_concepts)
