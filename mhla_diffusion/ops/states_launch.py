"""Launches the states form's kernels: what each step of the forward and the backward pass takes and returns."""

from __future__ import annotations

import torch
from triton.runtime.errors import OutOfResources

from . import fallback, replay, triton_launch
from .eager import epilogue, normalise
from .mixing_launch import mix, mix_gradient
from .partition import Partition
from .rotation import angle_tables
from .states_backward import pull_back_kernel
from .states_forward import read_out_kernel, rstd_kernel, summarise_kernel
from .triton_configs import Config, Warps, chunk_count, head_group, head_parts
from .triton_launch import (
    DOT,
    ceil_div,
    contiguous,
    new_rows,
    start_first_fitting,
    states_configs,
    strides_of,
    turning_angles,
    unit_stride,
)

__all__ = ["Epilogue", "key_gradients", "mix", "mix_gradient", "query_gradients", "read_out", "summarise"]


def _channels(dim: int, value_dim: int, config: Config) -> tuple[Config, dict[str, int]]:
    """The configuration with the value tile that the head dims take, and the parts of the head dims."""
    (bd, td), (bv, tv) = head_parts(dim), head_parts(value_dim)
    if bv > config.BV or (tv and config.BV < 64):
        bv, tv = config.BV, 0  # value channels in several tiles
    return config._replace(BV=bv), {"D": dim, "DV": value_dim, "BD": bd, "TD": td, "TV": tv}


def _value_tiles(value_dim: int, config: Config) -> int:
    config, parts = _channels(16, value_dim, config)
    return ceil_div(value_dim, config.BV + parts["TV"])


class _Blocks:
    """What every kernel over a block's tokens is told about them."""

    def __init__(self, part: Partition, x: torch.Tensor, *wide: int, whole_state: int):
        batch, _, heads, _ = x.shape
        self.table = x if part.layout is not None else part.table  # never read where there is a layout
        chunks = chunk_count(batch * heads * part.num_blocks, part.block_size)
        self.rows = part.num_blocks * chunks
        self.programs = batch * heads * self.rows
        self.numbers = (
            part.num_tokens, part.num_blocks, part.block_size, chunks, ceil_div(part.block_size, chunks),
            heads, head_group(heads, whole_state * part.num_blocks), *(part.layout or (1,) * 6),
        )  # fmt: skip
        self.constants = {
            "TABLE": part.layout is None,
            "WIDE": part.num_tokens * max(x.stride(1), *wide) >= 2**31,
            "REVERSE": False,
        }
        self.key = tuple(self.constants.values())

    def fit(self, dim: int, value_dim: int, config: Config, spare: bool = False) -> tuple[Config, dict]:
        """The configuration and the constants of a launch over these blocks.

        spare: a value channel more than there are would serve; a part of 16 is added where that is cheap.
        """
        config, parts = _channels(dim, value_dim, config)
        # Not at 64 channels: there ptxas 12.8 leaves a descriptor of one of the products undefined.
        if spare and config.BV == value_dim <= 32:
            parts["TV"] = 16
        return config, {**parts, **self.constants, "ONE_TILE": self.numbers[4] <= config.BN}


def _rope(rope, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(what the kernels read, ROPE) of a rotation: angles in a table, or frequencies of three axes."""
    if rope is None:
        return x, 0  # never read
    return (turning_angles(rope, x.dtype), 1) if rope[1] is not None else (rope[0], 2)


def _norm(norm, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float, int]:
    """(rstd, weight, eps, NORM) of the RMSNorm before the feature map."""
    if norm is None:
        return x, x, 0.0, 0
    weight, eps = norm
    if weight.ndim == 1:
        return x, contiguous(weight), eps, 2
    batch, tokens, heads, dim = x.shape
    rows = x if x.stride(2) == dim else contiguous(x)
    rstd = replay.empty((batch, tokens), torch.float32, x.device)

    def start(config: Warps) -> None:
        triton_launch.launch(
            rstd_kernel, (ceil_div(tokens, 4), batch), config,
            rows, rstd, rows.stride(0), rows.stride(1), tokens, eps, WIDTH=heads * dim, BN=4, BW=512,
        )  # fmt: skip

    what = "kernels of a norm over all heads"
    if not start_first_fitting("rstd", x, dim, (Warps(4),), (heads,), start, what):
        rstd = torch.rsqrt(x.float().square().mean(dim=(2, 3)) + eps)
    return rstd, contiguous(weight), eps, 1


def summarise(
    x,
    y,
    part: Partition,
    rope,
    feature_eps: float,
    *,
    mass: bool,
    rows=None,
    norm=None,
    state_dtype=torch.float32,
) -> torch.Tensor:
    """States `(B, H, M * chunks, D * Dv [+ D])` of x (B, N, H, D) and y (B, N, H, Dv); chunks of a block side by side.

    mass: append z. rows: (scale of y, weight in z), float32 `(B, N, H)` each. norm: (weight, eps), RMSNorm of x.
    """
    x, y = unit_stride(x), unit_stride(y)
    batch, _, heads, dim = x.shape
    value_dim = y.shape[-1]
    size = dim * value_dim + (dim if mass else 0)
    blocks = _Blocks(part, x, y.stride(1), whole_state=size * state_dtype.itemsize)
    state = replay.empty((batch, heads, blocks.rows, size), state_dtype, x.device)
    scale, weight = (x, x) if rows is None else rows
    rstd, norm_weight, norm_eps, kind = _norm(norm, x)
    angles, turned = _rope(rope, x)
    strides, step = strides_of(x, y)

    def start(config: Config) -> None:
        tiles = _value_tiles(value_dim, config)
        config, constants = blocks.fit(dim, value_dim, config, spare=mass and not turned)
        triton_launch.launch(
            summarise_kernel, (blocks.programs, tiles), config,
            x, y, blocks.table, angles, rstd, norm_weight, scale, weight, state,
            *strides, *blocks.numbers, feature_eps, norm_eps,
            ROPE=turned, NORM=kind, MASS=mass, ROWS=rows is not None, STEP=step, DOT=DOT[x.dtype],
            **constants,
        )  # fmt: skip

    options = (y.dtype, state_dtype, turned, kind, mass, rows is None, blocks.key)
    if not start_first_fitting(
        "summarise", x, value_dim, states_configs("summarise", x, value_dim, part), options, start
    ):
        x = normalise(x, norm)
        rope = angle_tables(rope, part)
        return fallback.summarise(x, y, part, rope, feature_eps, mass=mass, rows=rows).to(state_dtype)
    return state


class Epilogue:
    """What follows the read-out: RMSNorm of each head, gate (SiLU(gate + gate_bias) with a bias), local branch."""

    def __init__(self, norm_weight=None, norm_eps: float = 1e-6, gate=None, gate_bias=None, local=None):
        self.norm_weight, self.norm_eps, self.local = norm_weight, norm_eps, local
        self.gate, self.gate_bias = gate, gate_bias
        self.key = (norm_weight is None, gate is None, gate_bias is None, local is None)

    def __call__(self, out: torch.Tensor) -> torch.Tensor:
        return epilogue(out, self.norm_weight, self.norm_eps, self.gate, self.gate_bias, self.local)

    def computed(self, out: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """The same in out_dtype, computed again, on the new call's tensors, where a call is repeated."""
        tensors = {"norm_weight": self.norm_weight, "gate": self.gate, "local": self.local}
        names = [name for name, x in tensors.items() if x is not None]
        norm_eps, gate_bias = self.norm_eps, self.gate_bias

        def compute(out: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
            steps = dict(zip(names, given, strict=True))
            return Epilogue(norm_eps=norm_eps, gate_bias=gate_bias, **steps)(out).to(out_dtype)

        return replay.computed(compute, out, *[tensors[name] for name in names])


def read_out(
    x, state, value_dim: int, part: Partition, rope, feature_eps: float, *, divide: bool, mass: bool,
    denominator_eps: float, out_dtype: torch.dtype, norm=None, after: Epilogue | None = None,
) -> torch.Tensor:  # fmt: skip
    """`(B, N, H, Dv)` contiguous in out_dtype: phi(x) S, divided by phi(x) . z + denominator_eps if `divide`.

    state `(B, H, M, D * Dv [+ D])`; mass: it ends in z. norm: (weight, eps), RMSNorm of x.
    """
    x = unit_stride(x)
    batch, tokens, heads, dim = x.shape
    after = Epilogue() if after is None else after
    configs = states_configs("read_out", x, value_dim, part)
    if after.norm_weight is not None and _value_tiles(value_dim, configs[0]) > 1:
        # A head's output norm needs all of its channels, which several programs hold here.
        out = read_out(
            x, state, value_dim, part, rope, feature_eps, divide=divide, mass=mass,
            denominator_eps=denominator_eps, out_dtype=torch.float32, norm=norm,
        )  # fmt: skip
        return after.computed(out, out_dtype)
    out = new_rows(part, (batch, tokens, heads, value_dim), out_dtype, x.device)
    gate, local = (x if y is None else unit_stride(y) for y in (after.gate, after.local))
    row_bytes = state.shape[-1] * state.element_size()
    blocks = _Blocks(part, x, heads * value_dim, gate.stride(1), local.stride(1), whole_state=row_bytes)
    rstd, norm_weight, norm_eps, kind = _norm(norm, x)
    out_weight = x if after.norm_weight is None else contiguous(after.norm_weight)
    angles, turned = _rope(rope, x)
    strides, step = strides_of(x, gate, local)

    def start(config: Config) -> None:
        tiles = _value_tiles(value_dim, config)
        if after.norm_weight is not None and tiles > 1:
            raise OutOfResources(value_dim, config.BV, "value channels in one tile")
        config, constants = blocks.fit(dim, value_dim, config, spare=divide and not turned)
        triton_launch.launch(
            read_out_kernel, (blocks.programs, tiles), config,
            x, blocks.table, angles, rstd, norm_weight, state, out_weight, gate, local, out,
            *strides, *blocks.numbers,
            feature_eps, norm_eps, denominator_eps, after.norm_eps, after.gate_bias or 0.0,
            ROPE=turned, NORM=kind, DIVIDE=divide, MASS=mass,
            OUT_NORM=after.norm_weight is not None,
            GATE=0 if after.gate is None else 1 if after.gate_bias is None else 2,
            LOCAL=after.local is not None, STEP=step, DOT=_state_dot(x, state), **constants,
        )  # fmt: skip

    options = (out_dtype, state.dtype, turned, kind, divide, after.key, blocks.key)
    if not start_first_fitting("read_out", x, value_dim, configs, options, start):
        out = fallback.read_out(
            normalise(x, norm), state.float(), value_dim, part, angle_tables(rope, part), feature_eps,
            divide=divide, denominator_eps=denominator_eps, out_dtype=torch.float32,
        )  # fmt: skip
        return after(out).to(out_dtype)
    return out


def _state_dot(x: torch.Tensor, state: torch.Tensor) -> str:
    """bf16 inputs keep float32 states when asked to: their products are then taken as tf32."""
    return "tf32" if x.dtype == torch.bfloat16 and state.dtype == torch.float32 else DOT[x.dtype]


def _pull_back(
    name, x, y, state, part, rope, feature_eps, *, mass, denominator_eps=0.0, state_dtype=torch.float32
):
    """(dx, second result of a fused kernel or None, row weights or None), or None when no configuration fits."""
    x, y = unit_stride(x), unit_stride(y)
    batch, tokens, heads, dim = x.shape
    value_dim = y.shape[-1]
    keys = name == "key_gradients"
    blocks = _Blocks(part, x, y.stride(1), heads * dim, whole_state=state.shape[-1] * state.element_size())
    dx = new_rows(part, (batch, tokens, heads, dim), x.dtype, x.device)
    angles, turned = _rope(rope, x)
    strides, step = strides_of(x, y)
    results: list = [dx, None, None]

    def start(config: Config) -> None:
        whole = _value_tiles(value_dim, config) == 1
        # Accumulating the states' gradient beside a denominator's, or in four parts, takes too many registers.
        simple = not mass and head_parts(dim)[1] == head_parts(value_dim)[1] == 0
        fused = whole and (keys or simple or max(dim, value_dim) <= 32)
        own = scale = weight = x
        results[1:] = None, None
        if fused and keys:
            own = results[1] = new_rows(part, (batch, tokens, heads, value_dim), y.dtype, x.device)
        elif fused:
            own = results[1] = replay.empty(
                (batch, heads, blocks.rows, state.shape[-1]), state_dtype, x.device
            )
        elif mass and not keys:
            results[2] = tuple(
                new_rows(part, (batch, tokens, heads), torch.float32, x.device) for _ in range(2)
            )
            scale, weight = results[2]
        config, constants = blocks.fit(dim, value_dim, config)
        triton_launch.launch(
            pull_back_kernel, (blocks.programs,), config,
            x, y, blocks.table, angles, state, dx, own, scale, weight,
            *strides, *blocks.numbers, feature_eps, denominator_eps,
            ROPE=turned, MASS=mass, KEYS=keys, WHOLE=whole, FUSED=fused, STEP=step,
            DOT=_state_dot(x, state), **constants,
        )  # fmt: skip

    options = (y.dtype, state.dtype, state_dtype, turned, mass, blocks.key)
    configs = states_configs(name, x, value_dim, part)
    return results if start_first_fitting(name, x, value_dim, configs, options, start) else None


def query_gradients(
    q,
    grad,
    mixed,
    part: Partition,
    rope,
    feature_eps: float,
    *,
    mass: bool,
    denominator_eps: float,
    state_dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dq (B, N, H, D) and the gradient of the mixed states, `(B, H, M * chunks, D * Dv [+ D])`."""
    options = {"mass": mass, "denominator_eps": denominator_eps}
    found = _pull_back(
        "query_gradients", q, grad, mixed, part, rope, feature_eps, state_dtype=state_dtype, **options
    )
    if found is None:
        role = "divide" if mass else "plain"
        dq, rows = fallback.pull_back(
            q, grad, mixed.float(), part, angle_tables(rope, part), feature_eps, role=role,
            denominator_eps=denominator_eps,
        )  # fmt: skip
        found = dq, None, rows
    dq, dmixed, rows = found
    if dmixed is None:
        dmixed = summarise(q, grad, part, rope, feature_eps, mass=mass, rows=rows, state_dtype=state_dtype)
    return dq, dmixed


def key_gradients(
    k, v, dstate, part: Partition, rope, feature_eps: float, *, mass: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """dk (B, N, H, D) and dv (B, N, H, Dv) from the gradient of the states, `(B, H, M, D * Dv [+ D])`."""
    found = _pull_back("key_gradients", k, v, dstate, part, rope, feature_eps, mass=mass)
    if found is None:
        role = "add_mass" if mass else "plain"
        dk, _ = fallback.pull_back(
            k, v, dstate.float(), part, angle_tables(rope, part), feature_eps, role=role
        )
        found = dk, None, None
    dk, dv, _ = found
    if dv is None:
        dv = read_out(
            k, dstate, v.shape[-1], part, rope, feature_eps,
            divide=False, mass=mass, denominator_eps=0.0, out_dtype=v.dtype,
        )  # fmt: skip
    return dk, dv
