"""State dicts carried over by the rules of a layout, there and back: tests make files in original layouts with it."""

from collections.abc import Mapping

import torch

from mhla_diffusion.attention import GATE_SHIFT
from mhla_diffusion.models.checkpoints import CONVOLUTION_TO_MATRIX, Change, Layout, expand, filled, pattern
from mhla_diffusion.models.wan_layouts import SHIFTED

BACK = {
    CONVOLUTION_TO_MATRIX: lambda matrix: matrix[:, :, None, None],
    SHIFTED: lambda bias: (bias.float() + GATE_SHIFT).to(bias.dtype),
}


def to_ours(state: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
    """A state dict in `layout` under our keys, as `mhla convert` gives them."""
    moves, _, unexpected = expand(layout, state)
    assert not unexpected
    return {move.target: move.take(state[move.source]) for move in moves}


def to_original(state: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
    """The inverse of `to_ours`, without what the layout leaves out; copies in several layers must agree."""
    places = [(pattern(target), rule, n) for rule in layout.rules for n, target in enumerate(rule.targets)]
    found: dict[str, tuple[Change | None, dict[int, torch.Tensor]]] = {}
    for key, tensor in state.items():
        (rule, part, match), *_ = [
            (r, n, m) for expression, r, n in places if (m := expression.fullmatch(key))
        ]
        change, parts = found.setdefault(filled(rule.source, match.groupdict()), (rule.change, {}))
        first = parts.setdefault(part, tensor)
        assert first is tensor or torch.equal(first, tensor), f"{key} differs from its copy"
    result = {}
    for original, (change, parts) in found.items():
        whole = torch.cat([parts[n] for n in sorted(parts)]) if len(parts) > 1 else parts[0]
        result[original] = whole if change is None else BACK[change](whole)
    return result
