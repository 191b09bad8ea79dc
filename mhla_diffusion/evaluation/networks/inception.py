"""The Inception network of FID: the TensorFlow graph of 2015-12-05, in torch, with the taps that metrics read.

It differs from the network of the classifier in four places: average pools leave the padding out of the mean, the last
block pools by the maximum, there are 1008 classes, and nothing normalises colours. Modules carry the names of the
checkpoint files in use (pytorch-fid's and torch-fidelity's .pth), which therefore load as they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUT_SIZE = 299
CLASSES = 1008
# Tap -> number of features. "spatial": 7 channels of the 17 x 17 map that sFID reads, in the order of the TensorFlow
# graph (row, column, channel). "logits": the classifier without its bias, as the Inception Score takes it.
TAPS = {"64": 64, "192": 192, "768": 768, "pool": 2048, "spatial": 2023, "logits": CLASSES}

# A convolution: name, channels, kernel, stride. A pair of lists at a path's end: side by side on the same input.
Path = list


class Convolution(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, pad: bool = True
    ):
        super().__init__()
        kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = tuple(side // 2 for side in kernel) if pad and stride == 1 else 0
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Mixed(nn.Module):
    """Paths over one input, their outputs concatenated; the last path begins with a pool."""

    def __init__(self, inputs: int, paths: list[Path], pool: str):
        super().__init__()
        self.pool, self.paths, self.width = pool, [], 0
        for path in paths:
            channels, names = inputs, []
            for step in path:
                if isinstance(step, list):  # a fork
                    for name, outputs, kernel in step:
                        self.add_module(name, Convolution(channels, outputs, kernel))
                    channels = sum(outputs for _, outputs, _ in step)
                    names.append([name for name, *_ in step])
                else:
                    name, outputs, *how = step
                    self.add_module(name, Convolution(channels, outputs, *how))
                    channels = outputs
                    names.append(name)
            self.paths.append(names)
            self.width += channels

    def pooled(self, x: Tensor) -> Tensor:
        if self.pool == "average":
            return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        return (
            F.max_pool2d(x, 3, stride=1, padding=1)
            if self.pool == "maximum"
            else F.max_pool2d(x, 3, stride=2)
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for number, names in enumerate(self.paths):
            y = self.pooled(x) if number == len(self.paths) - 1 else x
            for name in names:
                if isinstance(name, list):
                    y = torch.cat([self.get_submodule(part)(y) for part in name], 1)
                else:
                    y = self.get_submodule(name)(y)
            outputs.append(y)
        return torch.cat(outputs, 1)


def blocks() -> list[tuple[str, list[Path], str]]:
    """Name, paths and pool of the mixed blocks."""

    def chain(prefix: str, *steps: tuple) -> Path:
        return [(f"{prefix}_{number}", *step) for number, step in enumerate(steps, 1)]

    def double(width: int, stride: int = 1) -> Path:
        return chain("branch3x3dbl", (64, 1), (width, 3), (width, 3, stride))

    found = []
    for name, width in (("Mixed_5b", 32), ("Mixed_5c", 64), ("Mixed_5d", 64)):
        paths = [
            [("branch1x1", 64, 1)],
            chain("branch5x5", (48, 1), (64, 5)),
            double(96),
            [("branch_pool", width, 1)],
        ]
        found.append((name, paths, "average"))
    found.append(("Mixed_6a", [[("branch3x3", 384, 3, 2)], double(96, 2), []], "halving"))
    for name, w in (("Mixed_6b", 128), ("Mixed_6c", 160), ("Mixed_6d", 160), ("Mixed_6e", 192)):
        paths = [
            [("branch1x1", 192, 1)],
            chain("branch7x7", (w, 1), (w, (1, 7)), (192, (7, 1))),
            chain("branch7x7dbl", (w, 1), (w, (7, 1)), (w, (1, 7)), (w, (7, 1)), (192, (1, 7))),
            [("branch_pool", 192, 1)],
        ]
        found.append((name, paths, "average"))
    tall = chain("branch7x7x3", (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2))
    found.append(("Mixed_7a", [chain("branch3x3", (192, 1), (320, 3, 2)), tall, []], "halving"))
    for name, pool in (("Mixed_7b", "average"), ("Mixed_7c", "maximum")):

        def fork(prefix: str, number: int) -> list:
            return [(f"{prefix}_{number}a", 384, (1, 3)), (f"{prefix}_{number}b", 384, (3, 1))]

        paths = [
            [("branch1x1", 320, 1)],
            [*chain("branch3x3", (384, 1)), fork("branch3x3", 2)],
            [*chain("branch3x3dbl", (448, 1), (384, 3)), fork("branch3x3dbl", 3)],
            [("branch_pool", 192, 1)],
        ]
        found.append((name, paths, pool))
    return found


class FIDInception(nn.Module):
    """Taps of the network for `(N, 3, 299, 299)` float inputs, scaled to about [-1, 1].

    Args:
        classifier: with the layer behind the tap "logits", whose weights not every file holds.
    """

    def __init__(self, classifier: bool = False):
        super().__init__()
        stem = (
            ("Conv2d_1a_3x3", 32, 3, 2, False),
            ("Conv2d_2a_3x3", 32, 3, 1, False),
            ("Conv2d_2b_3x3", 64, 3, 1, True),
            ("Conv2d_3b_1x1", 80, 1, 1, False),
            ("Conv2d_4a_3x3", 192, 3, 1, False),
        )
        channels = 3
        for name, outputs, kernel, stride, pad in stem:
            self.add_module(name, Convolution(channels, outputs, kernel, stride, pad))
            channels = outputs
        self.block_names = []
        for name, paths, pool in blocks():
            self.add_module(name, block := Mixed(channels, paths, pool))
            channels = block.width
            self.block_names.append(name)
        if classifier:
            self.fc = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor, taps: tuple[str, ...] = ("pool",)) -> dict[str, Tensor]:
        """Features of the taps, `(N, features)`; nothing behind the last one asked for is computed.

        Raises ValueError for an unknown tap, for "logits" without a classifier, or for another size of picture.
        """
        self.check(x, taps)
        found: dict[str, Tensor] = {}
        left = set(taps)

        def tap(name: str, value: Tensor) -> bool:
            if name in left:
                found[name] = value if value.ndim == 2 else value.mean((2, 3))
                left.discard(name)
            return not left

        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = F.max_pool2d(x, 3, stride=2)
        if tap("64", x):
            return found
        x = F.max_pool2d(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)), 3, stride=2)
        if tap("192", x):
            return found
        for name in self.block_names:
            block = self.get_submodule(name)
            if name == "Mixed_6d" and "spatial" in left:
                channels = block.branch1x1(x)[:, :7]  # (N, 7, 17, 17)
                if tap("spatial", channels.permute(0, 2, 3, 1).flatten(1)):
                    return found
            x = block(x)
            if name == "Mixed_6e" and tap("768", x):
                return found
        x = x.mean((2, 3))
        if not tap("pool", x):
            tap("logits", F.linear(x, self.fc.weight))
        return found

    def check(self, x: Tensor, taps: tuple[str, ...]) -> None:
        unknown = [name for name in taps if name not in TAPS]
        if unknown or not taps:
            raise ValueError(
                f"Inception has no features {', '.join(unknown) or '(none given)'}: give {', '.join(TAPS)}"
            )
        if "logits" in taps and not hasattr(self, "fc"):
            raise ValueError(
                "these Inception weights have no classifier (fc): the Inception Score needs a file with one"
            )
        if x.ndim != 4 or tuple(x.shape[1:]) != (3, INPUT_SIZE, INPUT_SIZE):
            raise ValueError(
                f"Inception takes (N, 3, {INPUT_SIZE}, {INPUT_SIZE}), got {tuple(x.shape)}: resize first"
            )
