"""Rank and its soft relatives from singular values s_1 >= s_2 >= ... of an attention matrix.

    rank                 number of s_i > threshold * s_1; says nothing without its threshold
    effective_rank       exp of the entropy of s / sum(s)              (Roy and Vetterli, EUSIPCO 2007)
    participation_ratio  (sum s^2)^2 / sum s^4
    stable_rank          sum s^2 / s_1^2

Small matrices, and large ones with a small core, get all singular values. For the others sums over the spectrum are
estimated by stochastic Lanczos quadrature (Ubaru, Chen, Saad, SIAM J. Matrix Anal. Appl. 2017), with standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .matrices import AttentionMatrix

EXACT_LIMIT = 4096  # side of the largest matrix whose singular values are all computed
SMALLEST_THRESHOLD = 1e-7  # rounding of float32 queries and keys already reaches this far
SINGLE = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Spectrum:
    """Figures of one matrix. `errors`: standard errors of estimated figures, by the same names; none of exact ones."""

    rank: int | float
    threshold: float
    ranks: dict[float, int | float]
    effective_rank: float
    participation_ratio: float
    stable_rank: float
    largest: float
    errors: dict[str, float]
    method: str


def default_threshold(tokens: int) -> float:
    """N times float32's epsilon: what `torch.linalg.matrix_rank` takes for a float32 matrix of N x N."""
    return tokens * SINGLE


def check_thresholds(thresholds: Sequence[float]) -> None:
    """Raises ValueError for one that the precision of queries and keys cannot tell, or that every value passes."""
    for value in thresholds:
        if not SMALLEST_THRESHOLD <= value < 1:
            raise ValueError(
                f"rank threshold {value:g}: give a share of the largest singular value between "
                f"{SMALLEST_THRESHOLD:g} and 1, such as 1e-3"
            )


def spectrum(
    matrix: AttentionMatrix,
    *,
    threshold: float | None = None,
    thresholds: Sequence[float] = (1e-3, 1e-2),
    exact_limit: int = EXACT_LIMIT,
    probes: int = 16,
    steps: int = 64,
    seed: int = 0,
) -> Spectrum:
    """Figures of `matrix`.

    Args:
        threshold: of `rank`, relative to the largest singular value (default: `default_threshold`).
        thresholds: further ones, for `ranks`.
        exact_limit: cores up to this side are decomposed, larger ones estimated.
        probes, steps, seed: random vectors, Lanczos steps of each, and what the vectors are drawn from.

    Raises ValueError as `check_thresholds`, and for a matrix that is not finite.
    """
    threshold = default_threshold(matrix.tokens) if threshold is None else threshold
    check_thresholds([threshold, *thresholds])
    if matrix.core_size <= exact_limit:
        return of_singular_values(singular_values(matrix.core()), threshold, thresholds)
    return estimated(matrix, threshold, thresholds, probes, steps, seed)


def singular_values(core: Tensor) -> Tensor:
    if not torch.isfinite(core).all():
        raise ValueError(
            "attention is not finite here: the model computes NaN or infinities, try --dtype float32"
        )
    return torch.linalg.svdvals(core)


def of_singular_values(s: Tensor, threshold: float, thresholds: Sequence[float] = ()) -> Spectrum:
    """Figures of all singular values (zeros may be left out), in any order. A zero matrix has rank 0 throughout."""
    s = s.double()
    largest = float(s.max())
    if largest == 0:
        ranks = dict.fromkeys(thresholds, 0)
        return Spectrum(0, threshold, ranks, 0.0, 0.0, 0.0, 0.0, {}, "singular values")
    s = s / largest
    shares = s / s.sum()
    squares = s.square()
    return Spectrum(
        rank=int((s > threshold).sum()),
        threshold=threshold,
        ranks={value: int((s > value).sum()) for value in thresholds},
        effective_rank=math.exp(-float(torch.special.xlogy(shares, shares).sum())),
        participation_ratio=float(squares.sum() ** 2 / squares.square().sum()),
        stable_rank=float(squares.sum()),
        largest=largest,
        errors={},
        method="singular values",
    )


def bidiagonals(
    matrix: AttentionMatrix, probes: int, steps: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Golub-Kahan bidiagonalisation from `probes` random sign vectors, each orthogonalised twice against all before.

    Returns the diagonals `(probes, steps)` and superdiagonals `(probes, steps - 1)`.
    """
    shape = (matrix.tokens, probes)
    signs = torch.randint(0, 2, shape, generator=generator).to(matrix.device, torch.float64) * 2 - 1
    v = signs / matrix.tokens**0.5
    rights, lefts = v[None], v.new_empty(0, *shape)
    diagonal, above = [], []

    def fresh(x: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
        """x without the basis (B, N, probes), its length, and zeros where nothing but rounding is left."""
        before = x.norm(dim=0)
        for _ in range(2):
            x = x - torch.einsum("bnp,bp->np", basis, torch.einsum("bnp,np->bp", basis, x))
        length = x.norm(dim=0)
        length = torch.where(length > 1e-13 * before, length, 0.0)
        return torch.where(length > 0, x / length.clamp(min=torch.finfo(x.dtype).tiny), 0.0), length

    for step in range(steps):
        u, length = fresh(matrix.times(v), lefts)
        lefts = torch.cat((lefts, u[None]))
        diagonal.append(length)
        if step + 1 < steps:
            v, length = fresh(matrix.transposed_times(u), rights)
            rights = torch.cat((rights, v[None]))
            above.append(length)
    none = v.new_empty(0, probes)
    return torch.stack(diagonal).T, (torch.stack(above) if above else none).T


def estimated(
    matrix: AttentionMatrix,
    threshold: float,
    thresholds: Sequence[float],
    probes: int,
    steps: int,
    seed: int,
) -> Spectrum:
    """Figures by quadrature: `tr f(A^T A) = N mean_p sum_i w_pi f(s_pi^2)` with nodes s and weights w of each probe.

    The sum of squares is exact, and that of fourth powers where the matrix can give it.
    """
    if probes < 2 or steps < 2:
        raise ValueError(f"probes={probes}, steps={steps}: give at least 2 of both, 16 and 64 are usual")
    steps = min(steps, matrix.tokens)
    diagonal, above = bidiagonals(matrix, probes, steps, torch.Generator().manual_seed(seed))
    small = torch.diag_embed(diagonal) + torch.diag_embed(above, offset=1)
    if not torch.isfinite(small).all():
        raise ValueError(
            "attention is not finite here: the model computes NaN or infinities, try --dtype float32"
        )
    _, nodes, right = torch.linalg.svd(small.cpu())
    weights = right[:, :, 0].square()  # (probes, steps): how much of each probe lies in the node's direction
    largest = float(nodes.max())
    s = nodes / largest

    def traced(values: Tensor) -> tuple[float, float]:
        """Sum over the spectrum and its standard error, from values at the nodes."""
        each = matrix.tokens * (weights * values).sum(dim=1)
        return float(each.mean()), float(each.std() / probes**0.5)

    counts = {value: traced((s > value).double()) for value in (threshold, *thresholds)}
    squares = matrix.squares() / largest**2
    exact_fourth = matrix.fourth_powers()
    fourth, fourth_error = traced(s**4) if exact_fourth is None else (exact_fourth / largest**4, 0.0)
    # exp(H(s / S)) = S exp(-T / S) with S = sum s, T = sum s log s: the error follows from both sums of each probe.
    sums = matrix.tokens * (weights * s).sum(dim=1)
    logs = matrix.tokens * (weights * torch.special.xlogy(s, s)).sum(dim=1)
    total, slope = sums.mean(), logs.mean()
    effective = float(total * torch.exp(-slope / total))
    influence = effective * ((1 + slope / total) * (sums - total) - (logs - slope)) / total
    participation = squares**2 / fourth
    return Spectrum(
        rank=counts[threshold][0],
        threshold=threshold,
        ranks={value: counts[value][0] for value in thresholds},
        effective_rank=effective,
        participation_ratio=participation,
        stable_rank=squares,
        largest=largest,
        errors={
            "rank": counts[threshold][1],
            "effective_rank": float(influence.std() / probes**0.5),
            "participation_ratio": participation * fourth_error / fourth,
        },
        method=f"Lanczos quadrature, {probes} probes of {steps} steps, seed {seed}",
    )
