"""Both forms of the operator beside each other, and how well the cost rule chooses between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from ..ops.dispatch import dual_obstacle, form_costs
from ..ops.partition import grid_partition
from .operator_cases import Case, Inputs, shape_of
from .timing import milliseconds

__all__ = ["chosen_form", "compare_forms", "judge_forms", "largest_regrets"]

# Of a form's times -> of its verdict; regret: the chosen form's time over the better one's, less 1.
DIRECTIONS = {
    "forward": ("expected_us", "chosen", "regret"),
    "both": ("expected_with_gradients", "chosen_with_gradients", "regret_with_gradients"),
}


def expected(case: Case, dtype: torch.dtype, backward: bool = False) -> dict[str, float]:
    """The rule's costs of the forms that can take a case; see `form_costs`."""
    tokens = math.prod(case.grid)
    x = torch.empty(case.batch, tokens, case.heads, case.dim, dtype=dtype, device="meta")
    part = grid_partition(case.grid, case.block_grid, tokens, None)
    costs = form_costs(x, x, part, part, 2 if dtype == torch.bfloat16 else 4, backward)
    if dual_obstacle(x, x, case.rope or None, case.normalizer, part, part):
        del costs["dual"]
    return costs


def chosen_form(case: Case, device: torch.device, dtype: torch.dtype, backward: bool = False) -> str:
    if device.type != "cuda":
        return "plain torch"
    costs = expected(case, dtype, backward)
    return min(costs, key=costs.get)


def compare_forms(case: Case, device: torch.device, dtype: torch.dtype, repeats: int) -> dict:
    """The times of both forms in both directions."""
    sets = [Inputs(case, device, dtype, seed) for seed in range(2)]
    times = {}
    for form in ("states", "dual"):
        for name in DIRECTIONS:
            calls = [lambda x=x, name=name, form=form: getattr(x, name)(form=form) for x in sets]
            times[f"{form}_{name}_ms"] = milliseconds(calls, device, repeats)
    return {"name": case.name, "shape": shape_of(case), **times}


def judge_forms(
    forms: Sequence[dict], cases: Iterable[Case], device: torch.device, dtype: torch.dtype
) -> None:
    """Say of every shape what today's rule would choose, and its regret; the times stay as they were measured."""
    known = {case.name: case for case in cases}
    for row in forms:
        if "error" in row or row["name"] not in known:
            continue
        case = known[row["name"]]
        for direction, (costs, choice, regret) in DIRECTIONS.items():
            backward = direction == "both"
            times = {form: row[f"{form}_{direction}_ms"] for form in ("states", "dual")}
            row[costs] = expected(case, dtype, backward)
            row[choice] = chosen_form(case, device, dtype, backward)
            row[regret] = times[row[choice]] / min(times.values()) - 1 if row[choice] in times else None


def largest_regrets(forms: Sequence[dict]) -> dict[str, float | None]:
    """By the names that they have in a result file."""
    return {
        f"largest_{name}": max([row[name] for row in forms if row.get(name) is not None], default=None)
        for *_, name in DIRECTIONS.values()
    }
