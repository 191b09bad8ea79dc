"""MHLA in plain torch: batched matmuls over blocks, no N x N matrix, no Python loop over blocks, no host sync.

Everything is computed in float32 (float64 for float64 inputs), so half precision neither overflows nor loses the
denominator. Inside, blocks are laid out as `(B, H, M, n, D)`.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from .backends import has_tangent
from .partition import Partition, layout_partition

__all__ = [
    "divided",
    "eager_core",
    "epilogue",
    "from_blocks",
    "mix_states",
    "normalise",
    "read_out",
    "row_sums",
    "summarise",
    "to_blocks",
]


def slot_ids(part: Partition, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token id of every slot `(M, n)` and whether it is a real token; anything outside [0, N) counts as padding."""
    if part.layout is not None and not torch.compiler.is_compiling():
        return _layout_places(part.layout, str(device))[:2]
    return _slot_ids(part, device)


def _slot_ids(part: Partition, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    table = part.with_table(device).long()
    return table, (table >= 0) & (table < part.num_tokens)


@functools.lru_cache(maxsize=128)
def _layout_places(layout: tuple[int, ...], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`slot_ids` of blocks that follow from a grid, and the slot of every token `(N,)`."""
    part = layout_partition(layout)
    with torch.inference_mode(
        False
    ):  # what is made in inference mode cannot be saved for a later backward pass
        ids, valid = _slot_ids(part, torch.device("cpu"))  # the meta device has no values to sort them by
        slots = torch.empty(part.num_tokens, dtype=torch.int64, device="cpu")
        slots[ids[valid]] = valid.flatten().nonzero()[:, 0]
        return ids.to(device), valid.to(device), slots.to(device)


def block_view(x: torch.Tensor, part: Partition) -> torch.Tensor:
    """`(B, N, H, D)` -> `(B, H, *, D)` with the tokens of a block together: a view where blocks are even. The axes
    between are blocks, then slots, of one or more axes. Padding slots repeat token 0 and must be masked."""
    batch, _, heads, dim = x.shape
    if part.even:
        axes = len(part.grid)
        split = [s for g, b in zip(part.grid, part.block_grid, strict=True) for s in (b, g // b)]
        x = x.reshape(batch, *split, heads, dim)
        blocks, slots = [1 + 2 * a for a in range(axes)], [2 + 2 * a for a in range(axes)]
        return x.permute(0, 2 * axes + 1, *blocks, *slots, 2 * axes + 2)
    ids, valid = slot_ids(part, x.device)
    if part.padded:
        ids = torch.where(valid, ids, 0)
    return x.index_select(1, ids.flatten()).transpose(1, 2)


def to_blocks(x: torch.Tensor, part: Partition) -> torch.Tensor:
    """`(B, N, H, D)` -> contiguous `(B, H, M, n, D)`. Padding slots repeat token 0 and must be masked."""
    return _in_slots(block_view(x, part).contiguous(), part)


def _in_slots(y: torch.Tensor, part: Partition) -> torch.Tensor:
    return y.view(*y.shape[:2], part.num_blocks, part.block_size, y.shape[-1])


def from_blocks(y: torch.Tensor, part: Partition) -> torch.Tensor:
    """`(B, H, M, n, D)` -> contiguous `(B, N, H, D)`; padding slots are dropped."""
    batch, heads, _, _, dim = y.shape
    if part.even:
        axes = len(part.grid)
        sizes = [g // b for g, b in zip(part.grid, part.block_grid, strict=True)]
        y = y.view(batch, heads, *part.block_grid, *sizes, dim)
        order = [a for axis in range(axes) for a in (2 + axis, 2 + axes + axis)]
        y = y.permute(0, *order, 1, 2 * axes + 2).contiguous()
        return y.view(batch, part.num_tokens, heads, dim)
    rows = y.permute(0, 2, 3, 1, 4).reshape(batch, part.num_blocks * part.block_size, heads, dim)
    ids, valid = slot_ids(part, y.device)
    if not part.padded:
        return torch.empty_like(rows).index_copy(1, ids.flatten(), rows)
    # One spare row takes what the padding slots computed.
    ids = torch.where(valid, ids, part.num_tokens).flatten()
    full = rows.new_zeros(batch, part.num_tokens + 1, heads, dim).index_copy(1, ids, rows)
    return full[:, : part.num_tokens].contiguous()


def _recorded(*tensors: torch.Tensor) -> bool:
    """Whether autograd or a compiler looks on: both want new tensors, not results written into buffers."""
    return (
        torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and any([x.requires_grad for x in tensors]))
        or has_tangent(*tensors)
    )


def _learning(*tensors: torch.Tensor) -> bool:
    """Whether backward passes of our own serve: a compiler makes its own, forward mode has none of them."""
    return _recorded(*tensors) and not torch.compiler.is_compiling() and not has_tangent(*tensors)


def features(x: torch.Tensor, part: Partition, feature_eps: float, dtype: torch.dtype) -> torch.Tensor:
    """phi of the blocked tokens."""
    if _recorded(x):
        # The same values and gradient as relu, but relu keeps its result for backward: eps could not be added in place.
        phi = F.threshold(to_blocks(x, part).to(dtype), 0.0, 0.0)
    else:
        view = block_view(x, part)
        phi = torch.empty(view.shape, dtype=dtype, device=x.device)
        if x.dtype == dtype:
            torch.clamp_min(view, 0.0, out=phi)
        else:
            phi.copy_(view).clamp_min_(0.0)
        phi = _in_slots(phi, part)
    return phi.add_(feature_eps) if feature_eps else phi


def mask_padding(phi: torch.Tensor, part: Partition) -> torch.Tensor:
    """Zero at padding, for keys: masked after the feature map, because phi(0) = eps. Queries need no mask: their
    padding slots are dropped at the end, and a zero there would be 0/0 with a NaN gradient."""
    return phi * slot_ids(part, phi.device)[1][..., None] if part.padded else phi


def rotate(phi: torch.Tensor, rope, part: Partition) -> torch.Tensor:
    """Turn the interleaved pairs of `phi` (B, H, M, n, D) by each token's angles."""
    if rope is None:
        return phi
    cos, sin = (to_blocks(angle.to(phi.dtype)[None, :, None, :], part) for angle in rope)  # (1, 1, M, n, D/2)
    even, odd = phi[..., 0::2], phi[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class _Summaries(torch.autograd.Function):
    """S = phi^T v. Its own backward pass, because autograd's would give phi a transposed gradient, and every step from
    there on would read memory across its rows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(phi: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return phi.transpose(-1, -2) @ value

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phi, value = ctx.saved_tensors
        return value @ grad.transpose(-1, -2), phi @ grad


def summarise(turned: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`(B, H, M, D * Dv)`: each block's summary S = sum phi v^T."""
    summary = (
        _Summaries.apply(turned, value) if _learning(turned, value) else turned.transpose(-1, -2) @ value
    )
    return summary.flatten(-2)


class _Quotient(torch.autograd.Function):
    """out / denominator. Its own backward pass, because autograd's of a product with the inverse would square it, which
    leaves float32 at denominators of 1e-19 and of 1e19, and autograd's of a quotient takes more passes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(out: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
        return out / denominator

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        denominator, out = ctx.saved_tensors
        grad = grad / denominator
        if not ctx.needs_input_grad[1]:
            return grad, None
        return grad, -(grad * out).sum(dim=-1, keepdim=True)


def divided(out: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """out (..., Dv) / denominator (..., 1)."""
    return _Quotient.apply(out, denominator) if _learning(out, denominator) else out / denominator


def mix_states(mixing: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Summaries or masses mixed: (Mq, Mk) or (H, Mq, Mk) times (B, H, Mk, K)."""
    # Expanded by hand: torch.matmul would fold a state that takes gradients into one matrix, which copies it.
    return mixing.expand(*state.shape[:2], *mixing.shape[-2:]) @ state


def read_out(turned: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    """`(B, H, M, n, Dv)`: the queries' features times their block's mixed summary."""
    return turned @ mixed.unflatten(-1, (turned.shape[-1], -1))


def row_sums(phi: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """`(B, H, M, n, 1)`: phi . z, with the mass z (B, H, M, D) of each block."""
    # A product and a sum: a matrix-vector product per block is slower on CPUs.
    return (phi * mass[..., None, :]).sum(dim=-1, keepdim=True)


def normalise(x: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
    """RMSNorm of x (B, N, H, D) in float32 at least: over a head for a weight (D,), over all heads for (H, D)."""
    if norm is None:
        return x
    weight, eps = norm
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(y, weight.shape, weight.to(y.dtype), eps)


def epilogue(out: torch.Tensor, norm_weight, norm_eps: float, gate, gate_bias, local) -> torch.Tensor:
    """Per-head RMSNorm, gate, local branch: in float32, before the one rounding to the model's dtype.

    `out` is the caller's to give away: without gradients it is written to.
    """
    free = not _recorded(out, *[x for x in (norm_weight, gate, local) if x is not None])
    if norm_weight is not None:
        weight = norm_weight.to(out.dtype)
        if free:
            out = out.mul_(torch.rsqrt(out.square().mean(dim=-1, keepdim=True) + norm_eps)).mul_(weight)
        else:
            out = F.rms_norm(out, weight.shape, weight, norm_eps)
    if gate is not None:
        gate = gate.to(out.dtype)
        if gate_bias is not None:
            gate = F.silu(gate + gate_bias, inplace=free)
        out = out.mul_(gate) if free else out * gate
    if local is not None:
        local = local.to(out.dtype)
        out = out.add_(local) if free else out + local
    return out


# Elements of q in a piece of the work, for each thread. With its few temporaries it stays in a core's cache, and the
# allocator hands the same memory out again, which fresh pages for temporaries of the whole size would not allow.
_PIECE = 1 << 17


def _pieces(q: torch.Tensor, v: torch.Tensor) -> list[tuple[slice, slice]]:
    """(items, heads) that are computed one after the other: every head of every item stands alone."""
    batch, tokens, heads, dim = q.shape
    size = _PIECE * torch.get_num_threads()
    lines = max(1, size // (max(tokens, v.shape[1]) * max(dim, v.shape[-1])))
    if lines >= heads:
        step = lines // heads
        return [(slice(b, b + step), slice(None)) for b in range(0, batch, step)]
    return [(slice(b, b + 1), slice(h, h + lines)) for b in range(batch) for h in range(0, heads, lines)]


def _fractions(
    q, k, v, mixing, query: Partition, key: Partition, *, rope, key_rope, feature_eps: float, normalizer: str,
    denominator_eps: float, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Numerators (B, H, M, n, Dv) and denominators (B, H, M, n, 1) of the output, in blocks."""
    phi_q = features(q, query, feature_eps, dtype)
    phi_k = mask_padding(features(k, key, feature_eps, dtype), key)
    state = summarise(rotate(phi_k, key_rope, key), to_blocks(v, key).to(dtype))
    out = read_out(rotate(phi_q, rope, query), mix_states(mixing, state))
    if normalizer == "none":
        return out, None
    mass = phi_k.sum(dim=-2)
    if normalizer == "paper":
        denominator = row_sums(phi_q, mix_states(mixing, mass))
    else:
        denominator = torch.matmul(mixing, row_sums(phi_q, mass)[..., 0])[..., None]
    return out, denominator + denominator_eps if denominator_eps else denominator


def eager_core(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mixing: torch.Tensor,
    query: Partition,
    key: Partition,
    *,
    rope=None,
    key_rope=None,
    feature_eps: float = 1e-6,
    normalizer: str = "paper",
    denominator_eps: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same function as `reference_core`; differentiable in q, k, v and mixing. Returns `out_dtype` (q's dtype)."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out_dtype = q.dtype if out_dtype is None else out_dtype
    options = {
        "rope": rope, "key_rope": key_rope, "feature_eps": feature_eps, "normalizer": normalizer,
        "denominator_eps": denominator_eps, "dtype": dtype,
    }  # fmt: skip
    # Sizes alone, on the meta device, know no autocast.
    with torch.autocast(device_type="cpu" if q.is_meta else q.device.type, enabled=False):
        mixing = mixing.to(dtype)
        if q.device.type != "cpu" or _recorded(q, k, v, mixing):
            out, denominator = _fractions(q, k, v, mixing, query, key, **options)
            out = out if denominator is None else divided(out, denominator)
            return from_blocks(out, query).to(out_dtype)
        whole = torch.empty(*q.shape[:3], v.shape[-1], dtype=out_dtype)
        for items, heads in _pieces(q, v):
            part = [x[items, :, heads] for x in (q, k, v)]
            out, denominator = _fractions(
                *part, mixing[heads] if mixing.ndim == 3 else mixing, query, key, **options
            )
            _store(out, denominator, query, whole[items, :, heads])
        return whole


def _store(
    out: torch.Tensor, denominator: torch.Tensor | None, part: Partition, target: torch.Tensor
) -> None:
    """Divide and put a piece of the blocks where it belongs."""
    if part.even:
        place = block_view(target, part)
        out = out.view(place.shape)
        if denominator is None:
            place.copy_(out)
        else:
            torch.div(out, denominator.view(*place.shape[:-1], 1), out=place)
        return
    if denominator is not None:
        out = out.div_(denominator)
    if part.layout is None:
        target.copy_(from_blocks(out, part))
    else:
        slots = _layout_places(part.layout, str(out.device))[2]
        target.copy_(out.flatten(2, 3).index_select(2, slots).transpose(1, 2))
