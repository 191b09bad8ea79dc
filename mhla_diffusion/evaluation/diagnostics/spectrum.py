"""Rank and its soft relatives from singular values s_1 >= s_2 >= ... of an attention matrix.

    rank                 number of s_i > threshold * s_1; says nothing without its threshold
    effective_rank       exp of the entropy of s / sum(s)              (Roy and Vetterli, EUSIPCO 2007)
    participation_ratio  (sum s^2)^2 / sum s^4
    stable_rank          sum s^2 / s_1^2

Small matrices, and large ones with a small core, get all singular values. For the others sums over the spectrum are
estimated by stochastic Lanczos quadrature (Ubaru, Chen, Saad, SIAM J. Matrix Anal. Appl. 2017) behind the leading
singular values, which are computed (the idea of Hutch++, Meyer et al., SOSA 2021), with standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .matrices import AttentionMatrix

EXACT_LIMIT = 4096  # side of the largest matrix whose singular values are all computed
SMALLEST_THRESHOLD = 1e-7  # rounding of float32 queries and keys already reaches this far
LEADING = 32  # singular values that an estimate computes by themselves
LEADING_PASSES = 6
NOT_FINITE = "attention is not finite here: the model computes NaN or infinities, try --dtype float32"
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
        raise ValueError(NOT_FINITE)
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


def leading(matrix: AttentionMatrix, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The largest singular values `(count,)` and right singular vectors `(N, count)`, by subspace iteration.

    They carry most of a matrix that is nearly of rank one, as attention often is: probes that still held them would
    scatter by their size, and what is small would drown.
    """
    shape = (matrix.tokens, min(count + 8, matrix.tokens))
    basis = torch.randn(shape, generator=generator, dtype=torch.float64).to(matrix.device)
    for _ in range(LEADING_PASSES):
        basis = torch.linalg.qr(matrix.transposed_times(matrix.times(basis))).Q
    _, s, rows = torch.linalg.svd(matrix.times(basis), full_matrices=False)
    return s[:count], (basis @ rows.mT)[:, :count]


def bidiagonals(matrix: AttentionMatrix, starts: Tensor, known: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Golub-Kahan bidiagonalisation from unit vectors `starts` `(N, probes)`, orthogonal to `known` `(N, r)`.

    Each vector is orthogonalised twice against all before. Returns the diagonals `(probes, steps)` and superdiagonals
    `(probes, steps - 1)`.
    """
    rights, lefts = (starts.new_empty(steps, *starts.shape) for _ in range(2))  # rows are filled one by one
    rights[0] = starts
    diagonal, above = [], []

    def fresh(x: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
        """x without the basis (B, N, probes), its length, and zeros where nothing but rounding is left."""
        before = x.norm(dim=0)
        for _ in range(2):
            x = x - torch.einsum("bnp,bp->np", basis, torch.einsum("bnp,np->bp", basis, x))
        length = x.norm(dim=0)
        length = torch.where(length > 1e-13 * before, length, 0.0)
        return torch.where(length > 0, x / length.clamp(min=torch.finfo(x.dtype).tiny), 0.0), length

    v = starts
    for step in range(steps):
        u, length = fresh(matrix.times(v), lefts[:step])
        lefts[step] = u
        diagonal.append(length)
        if step + 1 < steps:
            v = matrix.transposed_times(u)
            v, length = fresh(v - known @ (known.T @ v), rights[: step + 1])
            rights[step + 1] = v
            above.append(length)
    return torch.stack(diagonal).T, torch.stack(above).T


def estimated(
    matrix: AttentionMatrix,
    threshold: float,
    thresholds: Sequence[float],
    probes: int,
    steps: int,
    seed: int,
) -> Spectrum:
    """Figures by the leading values V, and quadrature of the rest: with P = 1 - V V^T and random signs z_p,

        tr f(A^T A) = sum_leading f(s^2) + mean_p |P z_p|^2 sum_i w_pi f(s_pi^2)

    with nodes s and weights w of each probe. The sum of squares is exact, and that of fourth powers where the matrix
    can give it.
    """
    if probes < 2 or steps < 2:
        raise ValueError(f"probes={probes}, steps={steps}: give at least 2 of both, 16 and 64 are usual")
    draw = torch.Generator().manual_seed(seed)
    try:
        first, known = leading(matrix, min(LEADING, matrix.tokens // 4), draw)
        signs = torch.randint(0, 2, (matrix.tokens, probes), generator=draw).to(known) * 2 - 1
        signs = signs - known @ (known.T @ signs)
        size = signs.square().sum(dim=0).cpu()  # |P z_p|^2
        diagonal, above = bidiagonals(matrix, signs / signs.norm(dim=0), known, min(steps, matrix.tokens))
        small = torch.diag_embed(diagonal) + torch.diag_embed(above, offset=1)
        _, nodes, right = torch.linalg.svd(small.cpu())
    except torch.linalg.LinAlgError:
        raise ValueError(NOT_FINITE) from None
    if not (torch.isfinite(nodes).all() and torch.isfinite(first).all()):
        raise ValueError(NOT_FINITE)
    weights = size[:, None] * right[:, :, 0].square()  # (probes, steps)
    largest = max(float(first.max()), float(nodes.max())) if len(first) else float(nodes.max())
    if largest == 0:
        return of_singular_values(first, threshold, thresholds)
    s, first = nodes / largest, first.cpu() / largest

    def traced(f: Callable[[Tensor], Tensor]) -> Tensor:
        """`(probes,)`: each probe's estimate of the sum of f over all singular values."""
        return f(first).sum() + (weights * f(s)).sum(dim=1)

    def mean_and_error(each: Tensor) -> tuple[float, float]:
        return float(each.mean()), float(each.std() / probes**0.5)

    counts = {v: mean_and_error(traced(lambda x, v=v: (x > v).double())) for v in (threshold, *thresholds)}
    squares = matrix.squares() / largest**2
    exact_fourth = matrix.fourth_powers()
    fourth = mean_and_error(traced(lambda x: x**4))
    fourth = fourth if exact_fourth is None else (exact_fourth / largest**4, 0.0)
    # exp(H(s / S)) = S exp(-T / S) with S = sum s, T = sum s log s: the error follows from both sums of each probe.
    sums, logs = traced(lambda x: x), traced(lambda x: torch.special.xlogy(x, x))
    total, slope = sums.mean(), logs.mean()
    effective = float(total * torch.exp(-slope / total))
    influence = effective * ((1 + slope / total) * (sums - total) - (logs - slope)) / total
    participation = squares**2 / fourth[0]
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
            "participation_ratio": participation * fourth[1] / fourth[0],
        },
        method=f"{len(first)} leading values, Lanczos quadrature of the rest ({probes} probes of {steps} steps, seed "
        f"{seed})",
    )
