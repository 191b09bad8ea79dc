"""Attention matrices of a layer on inputs that it was given: our kinds, and the stock ones of DiT, SANA and Wan.

Shape names: B batch, N tokens, C channels, H heads, D channels of a head, M blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers.models.attention_processor import Attention, SanaLinearAttnProcessor2_0
from diffusers.models.transformers.transformer_sana_video import SanaLinearAttnProcessor3_0
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor, nn

from ...attention import GridSelfAttention, MHLASelfAttention, SoftmaxSelfAttention
from ...blocks import block_table, effective_block_grid
from ...ops.reference import feature, rms_norm, rotate
from ...wan_attention import MHLAWanAttention, SoftmaxWanAttention, WanPositions, rotated
from .matrices import AttentionMatrix, MixedMatrix, SoftmaxMatrix

SANA_EPS = 1e-15  # of the denominator in stock SANA's linear attention


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention on one input.

    matrix: (item of the batch, head) -> its matrix.
    rows: what the rows are divided by: "softmax", or a denominator.
    one_block: of MHLA, the matrix of the same queries and keys in a single block, which is linear attention.
    """

    kind: str
    items: int
    heads: int
    matrix: Callable[[int, int], AttentionMatrix]
    rows: str
    one_block: Callable[[int, int], AttentionMatrix] | None = None


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> self-attention of each transformer layer, in order.

    Raises ValueError for a model without any, and for one whose self-attention is of a kind that is not known here.
    """
    found = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] == "attn1"}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no self-attention called attn1: give a DiT, SANA or Wan"
        )
    for name, module in found.items():
        if not isinstance(module, (GridSelfAttention, WanAttention, Attention)):
            raise ValueError(f"{name} is a {type(module).__name__}, whose attention is not known here")
    return found


@torch.no_grad()
def layer_attention(module: nn.Module, items: slice, *args, **kwargs) -> LayerAttention:
    """The attention of a layer from the arguments of its forward pass: tokens `(B, N, C)` first.

    Args:
        items: which part of the batch.

    Raises ValueError for attention that perturbed-attention guidance has replaced, or that masks tokens.
    """
    hidden_states = args[0] if args else kwargs["hidden_states"]
    hidden_states = hidden_states[items]
    if isinstance(module, MHLASelfAttention):
        if isinstance(module, MHLAWanAttention):
            positions = WanPositions(*rotary(args, kwargs))
            return mixed_layer(module, hidden_states, positions.grid, grid_angles(positions))
        return mixed_layer(module, hidden_states, tuple(kwargs["grid"]), None)
    if isinstance(module, SoftmaxSelfAttention):
        q, k, _ = module.project(normed_in(module, hidden_states))
        if isinstance(module, SoftmaxWanAttention):
            positions = WanPositions(*rotary(args, kwargs))
            q, k = (
                rotated(
                    x if norm is None else norm(x.flatten(2)).unflatten(-1, (module.heads, -1)), positions
                )
                for norm, x in ((module.norm_q, q), (module.norm_k, k))
            )
        return softmax_layer(q, k)
    if isinstance(module, WanAttention):
        q, k = module.norm_q(module.to_q(hidden_states)), module.norm_k(module.to_k(hidden_states))
        q, k = (x.unflatten(-1, (module.heads, -1)) for x in (q, k))
        table = angles(*rotary(args, kwargs)[:2])
        return softmax_layer(rotate(q.double(), table), rotate(k.double(), table))
    return stock_layer(module, hidden_states, args, kwargs)


def rotary(args: tuple, kwargs: dict):
    """`rotary_emb` of an attention's call: its own keyword, or the fourth argument."""
    return kwargs.get("rotary_emb", args[3] if len(args) > 3 else None)


def grid_angles(positions: WanPositions) -> tuple[Tensor, Tensor]:
    """Cosines and sines `(N, D / 2)` from the tokens' places: a model of MHLA layers only makes no table."""
    frequencies = positions.frequencies.double()
    axes = (torch.arange(size, device=frequencies.device).double() for size in positions.grid)
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)  # (N, 3)
    turned = places @ frequencies
    return turned.cos(), turned.sin()


def angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Diffusers' table `(1, N, 1, D)` of interleaved pairs as `(N, D / 2)` each."""
    return cos[0, :, 0, 0::2].double(), sin[0, :, 0, 1::2].double()


def normed_in(module: GridSelfAttention, hidden_states: Tensor) -> Tensor:
    return hidden_states if module.norm_in is None else module.norm_in(hidden_states)


def stock_layer(module: Attention, hidden_states: Tensor, args: tuple, kwargs: dict) -> LayerAttention:
    """Stock SANA and SANA-Video (linear, one block) or stock DiT (softmax)."""
    masked = kwargs.get("attention_mask", args[2] if len(args) > 2 else None)
    if masked is not None:
        raise ValueError("a self-attention with a mask: its matrix is not known here, draw without one")
    q, k = module.to_q(hidden_states), module.to_k(hidden_states)
    q = q if module.norm_q is None else module.norm_q(q)
    k = k if module.norm_k is None else module.norm_k(k)
    q, k = (x.unflatten(-1, (module.heads, -1)) for x in (q, k))
    if "Sana" in type(module.processor).__name__:
        if not isinstance(module.processor, (SanaLinearAttnProcessor2_0, SanaLinearAttnProcessor3_0)):
            raise ValueError(
                f"{type(module.processor).__name__}: draw without perturbed-attention guidance, which replaces it"
            )
        table = block_table((q.shape[1],), (1,), q.device)
        ones = torch.ones(1, 1, 1, dtype=torch.float64, device=q.device)
        q, k = feature(q.double(), 0.0), feature(k.double(), 0.0)
        rope = None if rotary(args, kwargs) is None else angles(*rotary(args, kwargs)[:2])
        return of_features(q, k, rotate(q, rope), rotate(k, rope), ones, table, "paper", SANA_EPS)
    return softmax_layer(q, k)


def softmax_layer(q: Tensor, k: Tensor) -> LayerAttention:
    """From queries and keys `(B, N, H, D)` behind norms and rotations."""
    batch, _, heads, width = q.shape
    return LayerAttention(
        "softmax", batch, heads, lambda b, h: SoftmaxMatrix(q[b, :, h], k[b, :, h], width**-0.5), "softmax"
    )


def mixed_layer(
    module: MHLASelfAttention, hidden_states: Tensor, grid: tuple[int, ...], rope
) -> LayerAttention:
    """MHLA as `mhla_attention` computes it, in float64 from the model's own queries and keys."""
    q, k, _ = module.project(normed_in(module, hidden_states))
    q, k = q.double(), k.double()
    if isinstance(module, MHLAWanAttention):  # there the operator takes the norms, `project` does not
        q, k = (
            x if norm is None else rms_norm(x, (norm().unflatten(0, (module.heads, -1)), norm.eps))
            for norm, x in ((module.norm_q, q), (module.norm_k, k))
        )
    q, k = feature(q, module.feature_eps), feature(k, module.feature_eps)
    block_grid = effective_block_grid(grid, module.block_grid)
    mixing = module.mixing(block_grid).double()
    mixing = mixing.expand(module.heads, *mixing.shape[-2:])
    eps = module.denominator_eps
    if eps is None:
        eps = 1e-6 if module.normalizer == "official" else 0.0
    table = block_table(grid, block_grid, q.device)
    return of_features(q, k, rotate(q, rope), rotate(k, rope), mixing, table, module.normalizer, eps)


def of_features(
    q: Tensor, k: Tensor, turned_q: Tensor, turned_k: Tensor, mixing: Tensor, table: Tensor, normalizer, eps
) -> LayerAttention:
    """From features `(B, N, H, D)`, the same rotated, and mixing `(H or 1, M, M)`."""

    def matrix(b: int, h: int) -> MixedMatrix:
        coefficients = mixing[h if len(mixing) > 1 else 0]
        divided = denominator(q[b, :, h], k[b, :, h], coefficients, table, normalizer) + eps
        return MixedMatrix(turned_q[b, :, h], turned_k[b, :, h], coefficients, table, divided)

    def one_block(b: int, h: int) -> MixedMatrix:
        tokens, one = torch.arange(q.shape[1], device=q.device)[None], mixing.new_ones(1, 1)
        divided = denominator(q[b, :, h], k[b, :, h], one, tokens, "paper") + eps
        return MixedMatrix(turned_q[b, :, h], turned_k[b, :, h], one, tokens, divided)

    rows = {
        "paper": "phi(q) . z~",
        "none": "phi(q) . z~ (the operator does not divide; the output norm behind it takes the scale away)",
        "official": "other blocks' queries, as the released DiT code: rows do not sum to 1",
    }[normalizer]
    if len(table) == 1:
        return LayerAttention("linear", q.shape[0], q.shape[2], matrix, rows)
    return LayerAttention("mhla", q.shape[0], q.shape[2], matrix, rows, one_block)


def denominator(q: Tensor, k: Tensor, mixing: Tensor, table: Tensor, normalizer: str) -> Tensor:
    """`(N,)`: phi(q_i) . sum_j m_ij z_j, or the released DiT code's sum over other blocks' queries.

    Args:
        q, k: features `(N, D)`, not rotated. mixing: `(M, M)`. table: `(M, n)`.
    """
    padding = (table < 0)[..., None]
    masses = k[table.clamp(min=0)].masked_fill(padding, 0.0).sum(dim=1)  # (M, D)
    by_block = q[table.clamp(min=0)]  # (M, n, D)
    if normalizer == "official":
        values = mixing @ torch.einsum("jtd,jd->jt", by_block, masses)
    else:
        values = torch.einsum("itd,id->it", by_block, mixing @ masses)
    out = q.new_empty(len(q))
    out[table[~padding[..., 0]]] = values[~padding[..., 0]]
    return out
