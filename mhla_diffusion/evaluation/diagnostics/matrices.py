"""Attention matrices of one head as factors. A matrix of 31,500 x 31,500 numbers never exists; its rows do, in tiles.

A layer's output is `A V`. Softmax: `A = softmax(q k^T scale)`. Linear attention and MHLA (arXiv 2601.07832, Sec. 3):

    A_ij = m[b(i), b(j)] phi(q_i) . phi(k_j) / D_i

with blocks b, mixing coefficients m (one block: plain linear attention) and denominators D. All is computed in float64.

Shape names: N tokens, D channels of a head, M blocks, n tokens of the largest block, p = min(n, D).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

TILE_NUMBERS = 1 << 23  # numbers of A in memory at a time (64 MiB)


class AttentionMatrix(ABC):
    """`(N, N)`, float64. `kind`: softmax, linear or mhla. `rank_bound`: no choice of weights exceeds it."""

    kind: str
    tokens: int
    rank_bound: int

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` `(R,)` -> `(R, N)`."""

    @abstractmethod
    def times(self, x: Tensor) -> Tensor:
        """`A x`: `(N, r)` -> `(N, r)`."""

    @abstractmethod
    def transposed_times(self, x: Tensor) -> Tensor:
        """`A^T x`: `(N, r)` -> `(N, r)`."""

    @property
    @abstractmethod
    def core_size(self) -> int:
        """Side of `core()`."""

    @abstractmethod
    def core(self) -> Tensor:
        """A smaller matrix with the same non-zero singular values, to rounding."""

    @abstractmethod
    def squares(self) -> float:
        """Sum of the squared singular values, `||A||_F^2`."""

    def fourth_powers(self) -> float | None:
        """Sum of their fourth powers; None where that needs a pass that costs more than all else."""
        return None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it is computed."""

    def tiles(self) -> Iterator[Tensor]:
        """Ids of rows that are worth computing at a time."""
        step = max(1, TILE_NUMBERS // self.tokens)
        return iter(torch.arange(self.tokens, device=self.device).split(step))


class SoftmaxMatrix(AttentionMatrix):
    """`softmax(q k^T scale)` of q and k `(N, D)`, after their norms and rotations."""

    kind = "softmax"

    def __init__(self, q: Tensor, k: Tensor, scale: float):
        self.q, self.k = q.double() * scale, k.double()
        self.tokens = self.rank_bound = len(q)

    @property
    def device(self) -> torch.device:
        return self.q.device

    def rows(self, ids: Tensor) -> Tensor:
        return torch.softmax(self.q[ids] @ self.k.T, dim=1)

    def times(self, x: Tensor) -> Tensor:
        return torch.cat([self.rows(ids) @ x for ids in self.tiles()])

    def transposed_times(self, x: Tensor) -> Tensor:
        return sum((self.rows(ids).T @ x[ids] for ids in self.tiles()), torch.zeros_like(x))

    @property
    def core_size(self) -> int:
        return self.tokens

    def core(self) -> Tensor:
        return torch.cat([self.rows(ids) for ids in self.tiles()])

    def squares(self) -> float:
        return sum(float(self.rows(ids).square().sum()) for ids in self.tiles())


class MixedMatrix(AttentionMatrix):
    """Linear attention (M = 1) or MHLA.

    Args:
        q, k: features `(N, D)` of the numerator: behind the feature map, and rotated if the layer rotates.
        mixing: `(M, M)`, query blocks in rows.
        table: `(M, n)` token ids of each block, -1 = padding; each token once.
        denominator: `(N,)` D_i, what each row is divided by.
    """

    def __init__(self, q: Tensor, k: Tensor, mixing: Tensor, table: Tensor, denominator: Tensor):
        self.tokens, self.width = q.shape
        self.k = k.double()
        self.q = q.double() / denominator.double()[:, None]
        self.mixing, self.table = mixing.to(self.q), table
        self.blocks, self.block_size = table.shape
        self.kind = "linear" if self.blocks == 1 else "mhla"
        self.padding = (table < 0)[..., None]
        self.block_of = torch.empty(self.tokens, dtype=torch.int64, device=q.device)
        owner = torch.arange(self.blocks, device=q.device)[:, None].expand_as(table)
        self.block_of[table[table >= 0]] = owner[table >= 0]
        sizes = (table >= 0).sum(dim=1)
        self.rank_bound = min(self.tokens, int(sizes.clamp(max=self.width).sum()))

    @property
    def device(self) -> torch.device:
        return self.q.device

    def by_block(self, x: Tensor) -> Tensor:
        """`(N, r)` -> `(M, n, r)`, zeros as padding."""
        return x[self.table.clamp(min=0)].masked_fill(self.padding, 0.0)

    def by_token(self, x: Tensor) -> Tensor:
        """`(M, n, r)` -> `(N, r)`."""
        out = x.new_empty(self.tokens, x.shape[-1])
        out[self.table[~self.padding[..., 0]]] = x[~self.padding[..., 0]]
        return out

    def rows(self, ids: Tensor) -> Tensor:
        coefficients = self.mixing[self.block_of[ids]][:, self.block_of]
        return coefficients * (self.q[ids] @ self.k.T)

    def times(self, x: Tensor) -> Tensor:
        summaries = self.by_block(self.k).mT @ self.by_block(x)  # (M, D, r)
        mixed = torch.einsum("ij,jdr->idr", self.mixing, summaries)
        return self.by_token(self.by_block(self.q) @ mixed)

    def transposed_times(self, x: Tensor) -> Tensor:
        summaries = self.by_block(self.q).mT @ self.by_block(x)
        mixed = torch.einsum("ij,idr->jdr", self.mixing, summaries)
        return self.by_token(self.by_block(self.k) @ mixed)

    @property
    def core_size(self) -> int:
        return self.blocks * min(self.block_size, self.width)

    def core(self) -> Tensor:
        """`(M p, M p)`: with `q = P S` and `k = O T` block by block (QR), A is `P [m_ij S_i T_j^T] O^T`."""
        s, t = (torch.linalg.qr(self.by_block(x), mode="r").R for x in (self.q, self.k))  # (M, p, D)
        core = torch.einsum("ij,ipd,jqd->ipjq", self.mixing, s, t)
        return core.reshape(self.core_size, self.core_size)

    def grams(self) -> tuple[Tensor, Tensor]:
        """`(M, D, D)` each: sum of q q^T and of k k^T of every block."""
        return tuple(x.mT @ x for x in (self.by_block(self.q), self.by_block(self.k)))

    def squares(self) -> float:
        queries, keys = self.grams()
        return float(torch.einsum("ij,iab,jab->", self.mixing.square(), queries, keys))

    def fourth_powers(self) -> float:
        """`||A^T A||_F^2`: block (b, c) of `A^T A` is `K_b X K_c^T` with `X = sum_i m_ib m_ic Q_i^T Q_i`."""
        queries, keys = self.grams()
        total = self.q.new_zeros(())
        for b in range(self.blocks):
            weights = self.mixing[:, b, None] * self.mixing  # (i, c)
            x = torch.einsum("ic,iad->cad", weights, queries)  # (c, D, D)
            total += torch.einsum("cad,cad->", keys[b] @ x, x @ keys)
        return float(total)

    def mixing_rank_bound(self) -> int:
        """The same bound for a mixing matrix of this rank: `min(N, rank(m) D)`; below `rank_bound` it has collapsed.

        Coefficients are float32: what rounding alone puts among the singular values counts for nothing.
        """
        rounding = max(self.mixing.shape) * torch.finfo(torch.float32).eps
        return min(self.rank_bound, int(torch.linalg.matrix_rank(self.mixing, rtol=rounding)) * self.width)
