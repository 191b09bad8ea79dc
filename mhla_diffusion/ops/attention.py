"""`mhla_attention`: checks a call once and hands it to a backend."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch

from .backends import (
    choose_backend,
    refuse_mapped_axes,
    refuse_rotation_gradients,
    refuse_tangents,
    refuse_transforms,
)
from .eager import eager_core, epilogue, normalise
from .partition import Partition, grid_partition, table_partition
from .reference import reference_attention
from .rotation import GridRope, angle_tables, three_axes

__all__ = ["FEATURE_MAPS", "FORMS", "NORMALIZERS", "mhla_attention"]

FEATURE_MAPS = ("relu",)
NORMALIZERS = ("paper", "none", "official")
FORMS = ("auto", "states", "dual")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_told: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _told and not torch.compiler.is_compiling():
        _told.add(message)
        warnings.warn(message, stacklevel=3)


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: give (batch, tokens, heads, head dim)")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}: "
                f"give q, k and v one dtype and device, e.g. {name}.to(q)"
            )
    if q.dtype not in _DTYPES:
        raise ValueError(f"q has dtype {q.dtype}: give float32, bfloat16, float16 or float64")
    if k.shape[0] != q.shape[0] or k.shape[2:] != q.shape[2:]:
        raise ValueError(
            f"k has shape {tuple(k.shape)} but q {tuple(q.shape)}: batch, heads and head dim must be the same"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v has shape {tuple(v.shape)} but k {tuple(k.shape)}: only the last axis may differ"
        )
    if 0 in q.shape[1:] or 0 in v.shape[1:]:
        raise ValueError(f"q has shape {tuple(q.shape)}, v {tuple(v.shape)}: only the batch may be empty")


def _check_mixing(mixing: torch.Tensor, q: torch.Tensor, query: Partition, key: Partition) -> None:
    wanted = (query.num_blocks, key.num_blocks)
    if not mixing.is_floating_point() or mixing.ndim not in (2, 3) or tuple(mixing.shape[-2:]) != wanted:
        raise ValueError(
            f"mixing has shape {tuple(mixing.shape)} and dtype {mixing.dtype}: this call has {wanted[0]} query and "
            f"{wanted[1]} key blocks, so give a float {wanted} or {(q.shape[2], *wanted)} matrix "
            "(interpolate_mixing carries one over to another block grid)"
        )
    if mixing.ndim == 3 and mixing.shape[0] != q.shape[2]:
        raise ValueError(
            f"mixing has {mixing.shape[0]} heads but q has {q.shape[2]}: give one matrix or {q.shape[2]}"
        )
    if mixing.device != q.device:
        raise ValueError(
            f"mixing is on {mixing.device} but q is on {q.device}: move it with mixing.to(q.device)"
        )


def _is_pair(x) -> bool:
    return isinstance(x, tuple | list) and len(x) == 2 and isinstance(x[0], torch.Tensor)


def _check_norm(name: str, norm, q: torch.Tensor) -> None:
    if norm is None:
        return
    if not _is_pair(norm) or not isinstance(norm[1], int | float):
        raise ValueError(
            f"{name} is no pair of a weight and a number: give (weight, eps), e.g. (weight, 1e-6)"
        )
    if tuple(norm[0].shape) not in (tuple(q.shape[3:]), tuple(q.shape[2:])):
        raise ValueError(
            f"{name} has a weight of shape {tuple(norm[0].shape)}: give {tuple(q.shape[3:])} for a norm over each "
            f"head or {tuple(q.shape[2:])} for one over all heads"
        )


def _checked_rope(name: str, rope, x: torch.Tensor, part: Partition, grid: Sequence[int] | None):
    """(cos, sin), or (frequencies of three axes, None) for a GridRope."""
    if rope is None:
        return None
    wanted = (x.shape[1], x.shape[3] // 2)
    if x.shape[3] % 2:
        raise ValueError(
            f"{name} turns pairs of channels, but the head dim {x.shape[3]} is odd: pass {name}=None"
        )
    if isinstance(rope, GridRope):
        frequencies = rope.frequencies
        if grid is None or part.layout is None:
            raise ValueError(
                f"{name} is a GridRope, which needs the tokens' places: pass grid= and block_grid= of at most three "
                f"axes instead of a table, or {name}=(cos, sin)"
            )
        if tuple(frequencies.shape) != (len(grid), wanted[1]) or frequencies.device != x.device:
            raise ValueError(
                f"{name} has frequencies of shape {tuple(frequencies.shape)} on {frequencies.device}: give "
                f"{(len(grid), wanted[1])} (axes, head dim / 2) on {x.device}"
            )
        return three_axes(frequencies), None
    if not _is_pair(rope) or not isinstance(rope[1], torch.Tensor):
        raise ValueError(
            f"{name} is no pair of tensors: give (cos, sin), each {wanted} (tokens, head dim / 2), or a GridRope"
        )
    for angles in rope:
        if tuple(angles.shape) != wanted or angles.device != x.device:
            raise ValueError(
                f"{name} has shape {tuple(angles.shape)} on {angles.device}: give (cos, sin), "
                f"each {wanted} (tokens, head dim / 2) on {x.device}"
            )
    cos, sin = rope
    return cos, sin


def _partitions(q, k, block_table, grid, block_grid, key_block_table) -> tuple[Partition, Partition]:
    tokens, key_tokens = q.shape[1], k.shape[1]
    if block_table is None:
        if grid is None or block_grid is None:
            raise ValueError(
                "no blocks given: pass block_table=block_table(grid, block_grid), or grid= and block_grid="
            )
        query = grid_partition(grid, block_grid, tokens, q.device)
    elif grid is not None or block_grid is not None:
        raise ValueError("both block_table and grid/block_grid given: pass one of them")
    else:
        query = table_partition("block_table", block_table, tokens, q.device)
    if key_block_table is not None:
        return query, table_partition("key_block_table", key_block_table, key_tokens, q.device)
    if key_tokens != tokens:
        raise ValueError(
            f"k has {key_tokens} tokens but q has {tokens}: pass key_block_table for the keys' blocks"
        )
    return query, query


def mhla_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mixing: torch.Tensor,
    block_table: torch.Tensor | None = None,
    *,
    grid: Sequence[int] | None = None,
    block_grid: Sequence[int] | None = None,
    key_block_table: torch.Tensor | None = None,
    feature_map: str = "relu",
    feature_eps: float = 1e-6,
    normalizer: str = "paper",
    denominator_eps: float | None = None,
    rope: GridRope | tuple[torch.Tensor, torch.Tensor] | None = None,
    key_rope: GridRope | tuple[torch.Tensor, torch.Tensor] | None = None,
    query_norm: tuple[torch.Tensor, float] | None = None,
    key_norm: tuple[torch.Tensor, float] | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    gate: torch.Tensor | None = None,
    gate_bias: float | None = None,
    local: torch.Tensor | None = None,
    summary_dtype: torch.dtype | None = None,
    form: str = "auto",
    backend: str = "auto",
) -> torch.Tensor:
    """Multi-head linear attention over blocks of tokens (MHLA, arXiv 2601.07832, Sec. 3).

    Keys and values of each block are summed into a summary and a mass; each query block reads a mixture of them,
    weighted by its row of `mixing`. The cost is linear in the number of tokens.

    Args:
        q: `(B, N, H, D)`, float32, bfloat16, float16 or float64.
        k: `(B, Nk, H, D)`, v: `(B, Nk, H, Dv)`, of q's dtype. D and Dv up to 256 in the Triton kernels.
        mixing: `(Mq, Mk)` or `(H, Mq, Mk)`, any float dtype, used in float32; query blocks in rows, keys' in columns.
        block_table: `(Mq, n_max)` token ids of each block, each token once, -1 = padding. A table on the CPU is
            checked once; on a GPU ids outside [0, N) act as padding and tokens in no block yield zeros.
        grid, block_grid: instead of a table: tokens and blocks on each axis.
        key_block_table: `(Mk, nk_max)`, blocks of the keys when they are not those of the queries (cross-attention).
        feature_map: `relu`, phi(x) = relu(x) + feature_eps.
        normalizer: `paper` divides by phi(q) . z~ + denominator_eps; `none` does not divide; `official` divides as
            the released DiT code does, by a sum over other blocks' queries (equal blocks, Mq = Mk), to run its weights.
        denominator_eps: 0 for `paper`, 1e-6 for `official` when None.
        rope: (cos, sin), float32 `(N, D / 2)` each; turns the channel pairs (0, 1), (2, 3), ... of phi(q) and phi(k) in
            the numerator only. Or a `GridRope`, where the angles follow from the places on `grid`: faster on a GPU.
            key_rope: the same for the keys, `(Nk, D / 2)`; `rope` when None.
        query_norm, key_norm: (weight, eps), RMSNorm of q or k before the feature map: over each head for a weight
            `(D,)`, over all heads together for `(H, D)`.
        norm_weight: `(Dv,)`, per-head RMSNorm of the output with norm_eps.
        gate: `(B, N, H, Dv)`, multiplied after the norm: already activated, or SiLU(gate + gate_bias) when a gate_bias
            is given. local: added last.
        summary_dtype: of the block summaries between the kernels, bfloat16 or float32; bfloat16 for bfloat16 inputs
            and float32 otherwise when None. Plain torch always takes float32.
        form: how the Triton kernels compute it: `states` (block summaries), `dual` (all pairs of tokens, for few of
            them), or `auto` for what a cost rule expects to be faster. Both are exact.
        backend: `auto` takes Triton on CUDA and plain torch elsewhere (`explain` says why); `triton`, `eager` and
            `reference` ask for one.

    Returns:
        `(B, N, H, Dv)` in q's dtype. Sums, denominators, norm, gate and local are computed in float32.

    Raises:
        ValueError: shapes, dtypes or options that do not fit, in one line that says what to pass.
    """
    _check_tensors(q, k, v)
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map={feature_map!r}: choose one of {', '.join(FEATURE_MAPS)}")
    if normalizer not in NORMALIZERS:
        raise ValueError(f"normalizer={normalizer!r}: choose one of {', '.join(NORMALIZERS)}")
    if denominator_eps is None:
        denominator_eps = 1e-6 if normalizer == "official" else 0.0
    if not all([0 <= eps < math.inf for eps in (feature_eps, denominator_eps)]):
        raise ValueError(
            f"feature_eps={feature_eps}, denominator_eps={denominator_eps}: both must be finite and >= 0"
        )
    if normalizer != "none" and feature_eps == 0 and denominator_eps == 0:
        raise ValueError(
            "feature_eps=0 with denominator_eps=0: a query without any active feature would be 0/0; "
            "pass denominator_eps=1e-15 (or a feature_eps)"
        )
    if normalizer == "none" and norm_weight is None and q.dtype == torch.float16:
        raise ValueError(
            "normalizer='none' in float16 overflows (sums over all tokens exceed 65504): "
            "pass norm_weight for an output norm, use normalizer='paper', or bfloat16"
        )
    query, key = _partitions(q, k, block_table, grid, block_grid, key_block_table)
    _check_mixing(mixing, q, query, key)
    if normalizer == "official" and not (query.equal and query.num_blocks == key.num_blocks):
        raise ValueError(
            f"normalizer='official' needs equal blocks and as many query as key blocks, here {query.num_blocks} and "
            f"{key.num_blocks} with up to {query.block_size} of {query.num_tokens} tokens: use normalizer='paper'"
        )
    if key_rope is None and rope is not None:
        key_rope = rope
    rope = _checked_rope("rope", rope, q, query, grid)
    key_rope = _checked_rope("key_rope", key_rope, k, key, grid if key_block_table is None else None)
    if (rope is None) != (key_rope is None):
        raise ValueError("key_rope given without rope: pass rope=(cos, sin) for the queries as well")
    out_shape = (*q.shape[:3], v.shape[-1])
    if norm_weight is not None and tuple(norm_weight.shape) != out_shape[-1:]:
        raise ValueError(
            f"norm_weight has shape {tuple(norm_weight.shape)}: give one weight per channel, {out_shape[-1:]}"
        )
    for name, x in (("gate", gate), ("local", local)):
        if x is not None and tuple(x.shape) != out_shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: give the output's shape {out_shape}")
    _check_norm("query_norm", query_norm, q)
    _check_norm("key_norm", key_norm, q)
    norms = {"query_norm": query_norm and query_norm[0], "key_norm": key_norm and key_norm[0]}
    for name, x in {**norms, "norm_weight": norm_weight, "gate": gate, "local": local}.items():
        if x is not None and x.device != q.device:  # a launch that is repeated takes any address
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}: move it with .to(q.device)")
    if gate_bias is not None and gate is None:
        raise ValueError(f"gate_bias={gate_bias} without a gate: pass gate=, or leave gate_bias out")
    if summary_dtype not in (None, torch.float32, torch.bfloat16):
        raise ValueError(f"summary_dtype={summary_dtype}: choose torch.float32 or torch.bfloat16")
    if form not in FORMS:
        raise ValueError(f"form={form!r}: choose one of {', '.join(FORMS)}")

    name, reason = choose_backend(backend, q.device, q.dtype, max(q.shape[-1], v.shape[-1]))
    if q.shape[0] == 0 and name == "triton":
        name = "eager"  # nothing to launch
    if backend == "auto" and name == "eager" and q.device.type == "cuda" and q.shape[0]:
        _warn_once(f"mhla_attention takes the plain torch path on {q.device}: {reason}")
    core = {
        "rope": rope,
        "key_rope": key_rope,
        "feature_eps": float(feature_eps),
        "normalizer": normalizer,
        "denominator_eps": float(denominator_eps),
    }
    after = {
        "norm_weight": norm_weight, "norm_eps": norm_eps, "gate": gate, "gate_bias": gate_bias, "local": local,
    }  # fmt: skip
    refuse_mapped_axes(
        (q, k, v, mixing, *(rope or ()), *(key_rope or ()), *norms.values(), norm_weight, gate, local)
    )
    if name == "triton":
        before = {"query_norm": query_norm, "key_norm": key_norm}
        return _triton(
            q, k, v, mixing, query, key, core, before, after, {"summary_dtype": summary_dtype, "form": form}
        )
    dtype = torch.promote_types(q.dtype, torch.float32)
    core["rope"], core["key_rope"] = angle_tables(rope, query, dtype), angle_tables(key_rope, key, dtype)
    if name == "reference":
        norm_weight, gate, local = (None if x is None else x.to(dtype) for x in (norm_weight, gate, local))
        out = reference_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), mixing, query.with_table(q.device), key.with_table(q.device),
            query_norm=query_norm, key_norm=key_norm, norm_weight=norm_weight, norm_eps=norm_eps, gate=gate,
            gate_bias=gate_bias, local=local, **core,
        )  # fmt: skip
        return out.to(q.dtype)
    fused = norm_weight is not None or gate is not None or local is not None
    out = eager_core(
        normalise(q, query_norm), normalise(k, key_norm), v, mixing, query, key,
        out_dtype=dtype if fused else q.dtype, **core,
    )  # fmt: skip
    return epilogue(out, **after).to(q.dtype) if fused else out


def _triton(q, k, v, mixing, query: Partition, key: Partition, core, before, after, choices) -> torch.Tensor:
    """The Triton path. The steps around the operator are part of its kernels when nothing needs a gradient."""
    from .registration import triton_core

    norms = [norm[0] for norm in before.values() if norm is not None]
    extras = [x for x in (after["norm_weight"], after["gate"], after["local"]) if x is not None]
    ropes = [x for rope in (core["rope"], core["key_rope"]) for x in rope or () if x is not None]
    inputs = (q, k, v, mixing, *ropes, *norms, *extras)
    refuse_tangents(inputs, "pass backend='eager'")
    refuse_rotation_gradients(ropes, "pass backend='eager'")
    refuse_transforms(inputs)
    if not norms and not extras:
        return triton_core(q, k, v, mixing, query, key, **core, **choices)
    learning = torch.is_grad_enabled() and any([x.requires_grad for x in (q, k, v, mixing, *norms, *extras)])
    if not learning and core["normalizer"] != "official":
        steps = {name: x for name, x in after.items() if x is not None}
        for name, norm in before.items():
            if norm is not None:
                steps[name], steps[f"{name}_eps"] = norm
        return triton_core(q, k, v, mixing, query, key, **core, **choices, **steps)
    q, k = (normalise(x, norm).to(v.dtype) for x, norm in zip((q, k), before.values(), strict=True))
    if not extras:
        return triton_core(q, k, v, mixing, query, key, **core, **choices)
    out = triton_core(q, k, v, mixing, query, key, out_dtype=torch.float32, **core, **choices)
    return epilogue(out, **after).to(v.dtype)
