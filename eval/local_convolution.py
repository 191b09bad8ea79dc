"""MHLA's local branch, a depthwise convolution over the token grid: the Triton kernels beside torch's convolution.

    python eval/local_convolution.py --out eval/results/local_convolution_h200.json

Each side takes tokens as the models have them, channels last in memory, and gives them back so. Forward without
gradients; then forward and backward, with gradients of x, weight and bias. `--tiles` also times other tiles.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch

from mhla_diffusion.evaluation.timing import about, milliseconds
from mhla_diffusion.ops import triton_configs
from mhla_diffusion.ops.local_convolution import local_convolution, local_convolution_reference
from mhla_diffusion.ops.local_kernels import GRADIENT_TILE, TILES, Tile

# batch, grid, channels
SHAPES = {
    "Wan 1.3B, 480x800x81": (1, (21, 30, 50), 1536),
    "moving emoji, 96 clips": (96, (5, 16, 16), 128),
    "DiT-XL/2, 512 px, 16 at once": (16, (32, 32), 1152),
    "SANA 4K, 2 at once": (2, (128, 128), 1152),
}
SMALL = {"a few tokens of a video": (1, (2, 3, 5), 8), "a few tokens of a picture": (2, (3, 4), 8)}
OTHER_TILES = [Tile(*sizes) for sizes in (
    (1, 16, 64, 4), (2, 16, 64, 4), (4, 16, 64, 4), (4, 16, 32, 4), (4, 8, 64, 4), (8, 8, 64, 4),
    (4, 16, 128, 8), (2, 16, 128, 4), (1, 32, 64, 4), (2, 32, 64, 8), (4, 32, 32, 4), (1, 64, 64, 4), (2, 8, 128, 4),
)]  # fmt: skip
OTHER_GRADIENT_TILES = [Tile(1, *sizes) for sizes in (
    (8, 64, 2), (16, 32, 4), (16, 64, 2), (16, 128, 4), (32, 32, 4), (32, 64, 4), (32, 64, 8), (8, 128, 4), (64, 32, 4),
)]  # fmt: skip


class Inputs:
    def __init__(self, shape: tuple[int, tuple[int, ...], int], device: torch.device, seed: int):
        batch, grid, channels = shape
        draw = torch.Generator().manual_seed(seed)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=draw).to(device, dtype)

        self.image = random(batch, math.prod(grid), channels).transpose(1, 2).unflatten(-1, grid)
        self.grad = random(batch, math.prod(grid), channels)
        self.weight, self.bias = random(channels, 1, *(3,) * len(grid)), random(channels)
        self.leaves = [x.detach().requires_grad_() for x in (self.image, self.weight, self.bias)]

    def forward(self, convolve: Callable) -> torch.Tensor:
        """Tokens `(B, N, C)`."""
        with torch.no_grad():
            return convolve(self.image, self.weight, self.bias).flatten(2).transpose(1, 2)

    def both(self, convolve: Callable) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(convolve(*self.leaves).flatten(2).transpose(1, 2), self.leaves, self.grad)


def errors(inputs: Inputs, convolve: Callable) -> dict[str, float]:
    """Relative, to float64 on the same numbers."""
    exact = [x.detach().double().requires_grad_() for x in inputs.leaves]
    out = local_convolution_reference(*exact).flatten(2).transpose(1, 2)
    truth = [out.detach(), *torch.autograd.grad(out, exact, inputs.grad.double())]
    found = [inputs.forward(convolve), *inputs.both(convolve)]
    names = ("output", "gradient_of_x", "gradient_of_weight", "gradient_of_bias")
    return {
        name: float((ours - true).norm() / true.norm())
        for name, ours, true in zip(names, found, truth, strict=True)
    }


def measured(name: str, shape: tuple, device: torch.device, repeats: int, tiles: bool) -> dict:
    batch, grid, channels = shape
    sets = [Inputs(shape, device, seed) for seed in range(3)]
    row: dict = {"name": name, "batch": batch, "grid": grid, "channels": channels}
    for side, convolve in (("torch", local_convolution_reference), ("ours", local_convolution)):
        row[f"{side}_error"] = errors(sets[0], convolve)
        row[f"{side}_forward_ms"] = milliseconds(
            [lambda x=x, c=convolve: x.forward(c) for x in sets], device, repeats
        )
        row[f"{side}_both_ms"] = milliseconds(
            [lambda x=x, c=convolve: x.both(c) for x in sets], device, repeats
        )
    if tiles:
        row["tiles_ms"] = {
            kernel: {
                str(tuple(tile)[:4]): timed(sets, kernel, tile, device, repeats) for tile in (chosen, *others)
            }
            for kernel, chosen, others in (
                ("local", TILES[1 if len(grid) == 2 else 3], OTHER_TILES),
                ("local_gradient", GRADIENT_TILE, OTHER_GRADIENT_TILES),
            )
        }
    return row


def timed(sets: list[Inputs], kernel: str, tile: Tile, device: torch.device, repeats: int) -> float:
    with triton_configs.override(**{kernel: tile}):
        call = Inputs.forward if kernel == "local" else Inputs.both
        return milliseconds([lambda x=x: call(x, local_convolution) for x in sets], device, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict = {**about(device), "what": "median milliseconds; bfloat16 on a GPU", "rows": []}
    for name, shape in (SHAPES if device.type == "cuda" else SMALL).items():
        row = measured(name, shape, device, args.repeats, args.tiles)
        result["rows"].append(row)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(
            f"{name}: forward {row['torch_forward_ms']:.3f} -> {row['ours_forward_ms']:.3f} ms, with gradients "
            f"{row['torch_both_ms']:.3f} -> {row['ours_both_ms']:.3f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
