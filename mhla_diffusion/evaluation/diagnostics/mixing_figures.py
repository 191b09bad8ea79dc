"""What has become of mixing matrices: clip occupancy, spectrum, locality; and heat maps of their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from ...attention import MHLASelfAttention
from ...blocks import block_distances
from ...mixing import BlockMixing, initial_mixing
from .spectrum import of_singular_values

RANK_THRESHOLD = 1e-3
# Dark to light, readable in grey: positions in [0, 1] and colours.
COLOURS = (
    (0.0, (0, 0, 4)),
    (0.25, (87, 16, 110)),
    (0.5, (188, 55, 84)),
    (0.75, (249, 142, 9)),
    (1.0, (252, 255, 164)),
)


def mixings_of(model: nn.Module) -> dict[str, BlockMixing]:
    """Name of the self-attention -> its mixing, of layers with more than one block."""
    return {
        name: module.mixing
        for name, module in model.named_modules()
        if isinstance(module, MHLASelfAttention) and module.mixing.num_blocks > 1
    }


@torch.no_grad()
def mixing_figures(mixing: BlockMixing) -> list[dict]:
    """A row of figures for each matrix: one, or one per head.

    at_zero, at_one: share of coefficients on a bound, which together are the clip's occupancy.
    singular_values, rank (threshold `RANK_THRESHOLD` of the largest), effective_rank: of the matrix. MHLA's rank is at
    most this rank times D.
    diagonal: mean share of a row that its own block has. reach: mean distance of a row's weight in blocks, beside
    `initial_reach`. moved: Frobenius distance from the documented start, relative to it.
    """
    distance = block_distances(mixing.block_grid)
    start = initial_mixing(
        mixing.block_grid, init=mixing.init, normalization=mixing.normalization, dtype=torch.float64
    )
    weights = mixing.weight.detach().double().cpu()
    rows = []
    for matrix in weights if weights.ndim == 3 else weights[None]:
        s = torch.linalg.svdvals(matrix)
        spectrum = of_singular_values(s, RANK_THRESHOLD)
        sums = matrix.sum(dim=1)
        rows.append(
            {
                "at_zero": float((matrix <= 0).double().mean()),
                "at_one": float((matrix >= 1).double().mean()),
                "singular_values": s.tolist(),
                "rank": spectrum.rank,
                "rank_threshold": RANK_THRESHOLD,
                "effective_rank": spectrum.effective_rank,
                "row_sum_smallest": float(sums.min()),
                "row_sum_largest": float(sums.max()),
                "diagonal": float((matrix.diagonal() / sums).mean()),
                "reach": reach(matrix, distance),
                "initial_reach": reach(start, distance),
                "moved": float((matrix - start).norm() / start.norm()),
            }
        )
    return rows


def reach(matrix: Tensor, distance: Tensor) -> float:
    return float(((matrix * distance).sum(dim=1) / matrix.sum(dim=1)).mean())


def coloured(values: Tensor) -> Image.Image:
    """A picture, one pixel a number, of `(rows, columns)` in [0, 1]; NaN is white."""
    stops = torch.tensor([position for position, _ in COLOURS], dtype=torch.float64)
    colours = torch.tensor([colour for _, colour in COLOURS], dtype=torch.float64)
    x = values.double().cpu().clamp(0, 1)
    right = torch.searchsorted(stops, x).clamp(1, len(stops) - 1)
    share = ((x - stops[right - 1]) / (stops[right] - stops[right - 1]))[..., None]
    mixed = (colours[right - 1] * (1 - share) + colours[right] * share).nan_to_num(255.0)
    return Image.fromarray(mixed.round().to(torch.uint8).numpy())


def on_grid(values: Tensor, grid: Sequence[int]) -> Tensor:
    """One number for each place of a grid of up to three axes as `(rows, columns)`: frames stand side by side."""
    frames, height, width = (1,) * (3 - len(grid)) + tuple(grid)
    return values.reshape(frames, height, width).transpose(0, 1).reshape(height, frames * width)


def heat_map(matrix: Tensor, block_grid: Sequence[int]) -> Tensor:
    """Rows of `(M, M)` as small maps over the block grid, each where its own block lies; `(height, width)` in [0, 1].

    Each row is scaled by its largest entry. The maps stand apart by one place of NaN.
    """
    frames, height, width = (1,) * (3 - len(block_grid)) + tuple(block_grid)
    maps = [on_grid(row / row.max().clamp(min=1e-30), block_grid) for row in matrix.double().cpu()]
    inner = maps[0].shape
    size = (height * (inner[0] + 1) - 1, frames * width * (inner[1] + 1) - 1)
    out = torch.full(size, math.nan, dtype=torch.float64)
    for index, small in enumerate(maps):
        frame, place = divmod(index, height * width)
        row, column = divmod(place, width)
        top, left = row * (inner[0] + 1), (frame * width + column) * (inner[1] + 1)
        out[top : top + inner[0], left : left + inner[1]] = small
    return out


def sheet(
    maps: Sequence[Tensor], captions: Sequence[str], *, columns: int = 4, side: int = 240
) -> Image.Image:
    """Maps `(height, width)` in [0, 1] with a caption under each, enlarged by whole numbers where they are small.

    Raises ValueError for no maps, or another number of captions.
    """
    if not maps or len(maps) != len(captions):
        raise ValueError(f"{len(maps)} maps and {len(captions)} captions: give at least one, and as many")
    pictures = []
    for values in maps:
        scale = max(1, side // max(values.shape))
        picture = coloured(values)
        pictures.append(
            picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
        )
    columns = min(columns, len(pictures))
    font = ImageFont.load_default(size=12)
    width, height = (max(getattr(p, name) for p in pictures) for name in ("width", "height"))
    step = (max(width, 200) + 36, height + 36)  # wider apart than the maps of one picture
    whole = Image.new(
        "RGB", (columns * step[0] - 12, math.ceil(len(pictures) / columns) * step[1] + 12), "white"
    )
    draw = ImageDraw.Draw(whole)
    for index, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left, top = 12 + index % columns * step[0], 12 + index // columns * step[1]
        whole.paste(picture, (left, top))
        draw.text((left, top + height + 3), caption, fill="black", font=font)
    return whole
