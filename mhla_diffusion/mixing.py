"""The coefficient matrix that mixes block summaries: `S~_i = sum_j m_ij S_j` (MHLA, arXiv 2601.07832, Sec. 3).

Rows are query blocks, columns key blocks. The matrix starts locality biased, is learned, and is clipped to [0, 1]
after every optimizer step. It is kept in float32 whatever the dtype of the model.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from .blocks import block_distances, positive_ints

__all__ = [
    "BlockMixing",
    "INITS",
    "NORMALIZATIONS",
    "clip_mixings",
    "handed_out",
    "initial_mixing",
    "interpolate_mixing",
    "learnable_mixings",
    "mean_occupancy",
]

INITS = ("linear", "cos", "exp", "gaussian", "local", "uniform")
NORMALIZATIONS = ("row", "column", "none")


def initial_mixing(
    block_grid: Sequence[int],
    *,
    init: str = "linear",
    normalization: str = "row",
    exp_sigma: float = 3.0,
    local_radius: float = 1.5,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Locality-biased initial coefficients `(M, M)`, a function of the distance d between block centres.

    Args:
        block_grid: blocks per axis, M is their product.
        init: `linear` 1 - d/d_max · `cos` cos(pi/4 d/d_max) · `exp` exp(-d/exp_sigma) ·
            `gaussian` exp(-d^2 / (2 (d_max/3)^2)) · `local` 1 where d <= local_radius, else 0 · `uniform` 1.
        normalization: `row` is the paper's: d_max is the row's largest distance and rows sum to 1.
            `column` is the released code's: d_max is the largest distance of all and columns sum to 1.
            `none`: d_max as in `column`, not normalised (the released code does this for `gaussian` alone).
        dtype: of the result, which is on torch's default device; it is computed in float64 on the CPU.

    With a single block the result is [[1.0]]. Raises ValueError on an unknown name.
    """
    if init not in INITS:
        raise ValueError(f"init={init!r}: choose one of {', '.join(INITS)}")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization={normalization!r}: choose one of {', '.join(NORMALIZATIONS)}")
    distance = block_distances(block_grid)
    furthest = distance.amax(dim=1, keepdim=True) if normalization == "row" else distance.max()
    # One block has d_max = 0: its relative distance is 0, not 0/0.
    relative = distance / torch.where(furthest > 0, furthest, 1.0)
    if init == "linear":
        matrix = 1.0 - relative
    elif init == "cos":
        matrix = torch.cos(math.pi / 4 * relative)
    elif init == "exp":
        matrix = torch.exp(-distance / exp_sigma)
    elif init == "gaussian":
        matrix = torch.exp(-4.5 * relative.square())
    elif init == "local":
        matrix = (distance <= local_radius).to(torch.float64)
    else:
        matrix = torch.ones_like(distance)
    if normalization == "row":
        matrix = matrix / matrix.sum(dim=1, keepdim=True)
    elif normalization == "column":
        matrix = matrix / matrix.sum(dim=0, keepdim=True)
    return matrix.to(dtype).to(torch.get_default_device())


def _axis_weights(source: int, target: int) -> torch.Tensor:
    """Linear interpolation on one axis: `(target, source)`, each row sums to 1, clamped beyond the outer centres."""
    position = (torch.arange(target, dtype=torch.float64, device="cpu") + 0.5) * source / target - 0.5
    position = position.clamp(0, source - 1)
    left = position.floor().clamp(max=max(source - 2, 0)).long()
    right = (left + 1).clamp(max=source - 1)
    fraction = position - left
    weights = torch.zeros(target, source, dtype=torch.float64, device="cpu")
    weights.scatter_add_(1, left[:, None], (1 - fraction)[:, None])
    weights.scatter_add_(1, right[:, None], fraction[:, None])
    return weights


def _axis_spread(source: int, target: int) -> torch.Tensor:
    """Where an old key block's share goes on one axis: `(source, target)`, each row sums to 1."""
    if target <= source:
        return _axis_weights(target, source)  # each old centre lies between new ones: share out linearly
    spread = _axis_weights(source, target).T  # more blocks than before: sample between the old ones
    return (spread / spread.sum(dim=1, keepdim=True)).contiguous()


@torch.compiler.assume_constant_result  # compiled code holds the finished matrices
def _interpolation(
    source: tuple[int, ...], target: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return _cached_interpolation(source, target, dtype, device)


@functools.lru_cache(maxsize=64)
def _cached_interpolation(source, target, dtype, device):
    with torch.inference_mode(False):  # they are saved for backward
        # On the CPU whatever torch's default device is: some accelerators have no float64.
        rows = spread = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        for old, new in zip(source, target, strict=True):
            rows = torch.kron(rows, _axis_weights(old, new))
            spread = torch.kron(spread, _axis_spread(old, new))
        return rows.to(dtype).to(device), spread.to(dtype).to(device)


def interpolate_mixing(
    matrix: torch.Tensor, from_block_grid: Sequence[int], to_block_grid: Sequence[int]
) -> torch.Tensor:
    """Carry a mixing matrix over to another block grid, linearly on each axis between block centres.

    Query rows are interpolated, and each row's shares are carried to the new key blocks so that the sum of a row is
    kept. The same grid gives the same matrix back, untouched. Differentiable.

    Args:
        matrix: `(M, M)` or `(H, M, M)`, M = product of `from_block_grid`.

    Raises ValueError when a grid is none or the shapes do not fit.
    """
    source = tuple([operator.index(count) for count in positive_ints("from_block_grid", from_block_grid)])
    target = tuple([operator.index(count) for count in positive_ints("to_block_grid", to_block_grid)])
    blocks = math.prod(source)
    if len(source) != len(target):
        raise ValueError(
            f"block grids {source} and {target} differ in their number of axes: give {len(source)} entries"
        )
    if matrix.ndim not in (2, 3) or tuple(matrix.shape[-2:]) != (blocks, blocks):
        raise ValueError(
            f"mixing of shape {tuple(matrix.shape)} does not belong to block_grid {source}: "
            f"expected ({blocks}, {blocks}) or (heads, {blocks}, {blocks})"
        )
    if source == target:
        return matrix
    rows, spread = _interpolation(source, target, matrix.dtype, str(matrix.device))
    # Sizes alone, on the meta device, know no autocast.
    with torch.autocast(device_type="cpu" if matrix.is_meta else matrix.device.type, enabled=False):
        return rows @ matrix @ spread


def handed_out(owner: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or buffer that `owner.forward` returns for others to read.

    Offloading by leaves takes its data away when `forward` returns, and with a stream hands the memory to the next
    weights while kernels that read it still wait: under such hooks this is a copy.
    """
    return tensor.clone() if hasattr(owner, "_diffusers_hook") else tensor


class BlockMixing(nn.Module):
    """Learned coefficients between blocks.

    Args:
        block_grid: blocks per axis.
        num_heads: None for one `(M, M)` matrix shared by all heads, else one matrix per head `(num_heads, M, M)`.
        init, normalization: see `initial_mixing`.
        learnable: False freezes the matrix at its initial (or loaded) value.

    `weight` stays float32 when the model is cast to a lower precision. Gradient checkpointing, offloading and the like
    work because the parameter is read in this module's own `forward` only.
    """

    def __init__(
        self,
        block_grid: Sequence[int],
        *,
        num_heads: int | None = None,
        init: str = "linear",
        normalization: str = "row",
        learnable: bool = True,
    ):
        super().__init__()
        self.block_grid = positive_ints("block_grid", block_grid)
        self.num_heads = num_heads
        self.init = init
        self.normalization = normalization
        blocks = math.prod(self.block_grid)
        shape = (blocks, blocks) if num_heads is None else (num_heads, blocks, blocks)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=learnable)
        self._told_smaller = False
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Write the initial coefficients into `weight`."""
        matrix = initial_mixing(self.block_grid, init=self.init, normalization=self.normalization)
        self.weight.copy_(matrix.expand_as(self.weight))

    @property
    def num_blocks(self) -> int:
        return self.weight.shape[-1]

    def forward(self, block_grid: Sequence[int] | None = None) -> torch.Tensor:
        """The float32 matrix `(M, M)` or `(H, M, M)`; interpolated when the grid at hand holds fewer blocks."""
        matrix = handed_out(self, self.weight).float()
        if block_grid is None or tuple(block_grid) == self.block_grid:
            return matrix
        if not self._told_smaller and not torch.compiler.is_compiling():
            self._told_smaller = True
            warnings.warn(
                f"the token grid holds only {tuple(block_grid)} of the {self.block_grid} blocks: "
                "the mixing matrix is interpolated over the block centres",
                stacklevel=2,
            )
        return interpolate_mixing(matrix, self.block_grid, block_grid)

    @torch.no_grad()
    def clip_(self) -> BlockMixing:
        """Clamp the coefficients to [0, 1] in place; call it after each optimizer step.

        A row that would become empty keeps its largest entry at 1/M: an empty row has no output and no denominator.
        Never waits for the device.
        """
        self.weight.copy_(_clipped(self.weight))
        return self

    @torch.no_grad()
    def occupancy(self) -> torch.Tensor:
        """Share of the coefficients that sit on a bound (0 or 1), a 0-dim float32 tensor on the weight's device."""
        return ((self.weight <= 0) | (self.weight >= 1)).float().mean()

    def _apply(self, fn, recurse: bool = True):
        # `model.to(torch.bfloat16)` must not round the coefficients: they are of order 1/M and their differences
        # are the locality bias. Moves between devices go through.
        def keep_precision(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            if moved.dtype in (torch.float16, torch.bfloat16) and tensor.dtype in (
                torch.float32,
                torch.float64,
            ):
                return tensor.to(moved.device)
            return moved

        return super()._apply(keep_precision, recurse)

    def extra_repr(self) -> str:
        heads = "" if self.num_heads is None else f", num_heads={self.num_heads}"
        frozen = "" if self.weight.requires_grad else ", frozen"
        return f"block_grid={self.block_grid}{heads}, init={self.init!r}{frozen}"


def _clipped(weight: torch.Tensor) -> torch.Tensor:
    """`(..., M, M)` coefficients in [0, 1]; a row that would be empty keeps its largest entry at 1/M."""
    clipped = weight.clamp(0.0, 1.0)
    columns = torch.arange(weight.shape[-1], device=weight.device)
    largest = (columns == weight.argmax(dim=-1, keepdim=True)).to(weight.dtype)
    empty = clipped.sum(dim=-1, keepdim=True) <= 0
    return torch.where(empty, largest / weight.shape[-1], clipped)


def learnable_mixings(module: nn.Module) -> list[BlockMixing]:
    """Every `BlockMixing` inside a module that trains."""
    return [m for m in module.modules() if isinstance(m, BlockMixing) and m.weight.requires_grad]


@torch.no_grad()
def clip_mixings(mixings: Sequence[BlockMixing]) -> None:
    """`clip_` for all of them; matrices of one shape go together, which is a few launches instead of some per layer."""
    same_shape: dict[tuple, list[torch.Tensor]] = {}
    for mixing in mixings:
        same_shape.setdefault((mixing.weight.shape, mixing.weight.device), []).append(mixing.weight)
    for weights in same_shape.values():
        torch._foreach_copy_(weights, list(_clipped(torch.stack(weights)).unbind()))


def mean_occupancy(mixings: Sequence[BlockMixing]) -> torch.Tensor | None:
    """Mean `occupancy` (0-dim tensor, no wait for the device) over those with more than one block.

    None when there are none: a single block's coefficient is 1 from the start, which says nothing.
    """
    occupancies = [mixing.occupancy() for mixing in mixings if mixing.num_blocks > 1]
    return torch.stack(occupancies).mean() if occupancies else None
