"""The cost rule against what was measured: it chooses the better form, or one that is hardly worse."""

import json
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from mhla_diffusion.ops.dispatch import choose_form, form_costs
from mhla_diffusion.ops.partition import grid_partition
from mhla_diffusion.ops.registration import triton_core

RESULT = Path(__file__).resolve().parent.parent.parent / "eval" / "results" / "op_h200.json"
FORMS = [row for row in json.loads(RESULT.read_text())["forms"] if "error" not in row]


def inputs_of(shape: dict, grid: tuple[int, ...], block_grid: tuple[int, ...], dtype=torch.bfloat16):
    q = torch.empty(shape["B"], shape["N"], shape["H"], shape["D"], device="meta", dtype=dtype)
    return q, grid_partition(grid, block_grid, shape["N"], q.device)


def square_inputs(row: dict):
    """A form's shapes are squares: 24^2 tokens in 4^2 blocks."""
    shape = row["shape"]
    side, blocks = (round(shape[name] ** 0.5) for name in ("N", "M"))
    assert (side**2, blocks**2) == (shape["N"], shape["M"])
    return inputs_of(shape, (side, side), (blocks, blocks))


@pytest.mark.parametrize("direction", ["forward", "both"])
@pytest.mark.parametrize("row", FORMS, ids=lambda row: row["name"])
def test_the_chosen_form_is_hardly_worse_than_the_better_one(row, direction):
    q, part = square_inputs(row)
    chosen = choose_form("auto", q, q, None, "paper", part, part, 2, direction == "both")
    times = {form: row[f"{form}_{direction}_ms"] for form in ("states", "dual")}
    assert times[chosen] < 1.10 * min(times.values())
    # What the file says of the rule is said of this rule.
    suffix = "_with_gradients" if direction == "both" else ""
    assert row[f"chosen{suffix}"] == chosen
    assert row[f"regret{suffix}"] == pytest.approx(times[chosen] / min(times.values()) - 1)


def test_the_costs_are_near_the_times():
    """Of states within a third, over a range of a factor of 40; of dual where one tile does not hold all tokens."""
    for row in FORMS:
        q, part = square_inputs(row)
        costs = form_costs(q, q, part, part, 2)
        assert costs["states"] == pytest.approx(1e3 * row["states_forward_ms"], rel=0.34)
        if row["shape"]["N"] > 64:
            assert costs["dual"] == pytest.approx(1e3 * row["dual_forward_ms"], rel=0.34)


@pytest.mark.parametrize(
    ("shape", "grid", "block_grid", "form"),
    [
        ({"B": 32, "N": 256, "H": 16, "D": 72}, (16, 16), (4, 4), "dual"),
        ({"B": 16, "N": 1024, "H": 16, "D": 72}, (32, 32), (4, 4), "states"),
        ({"B": 1, "N": 31500, "H": 12, "D": 128}, (21, 30, 50), (3, 5, 10), "states"),
        ({"B": 2, "N": 16384, "H": 36, "D": 32}, (128, 128), (8, 8), "states"),
        ({"B": 2, "N": 1024, "H": 36, "D": 32}, (32, 32), (4, 4), "states"),
    ],
)
@pytest.mark.parametrize("trained", [False, True])
def test_the_models_shapes(shape, grid, block_grid, form, trained):
    q, part = inputs_of(shape, grid, block_grid)
    assert choose_form("auto", q, q, None, "paper", part, part, 2, trained) == form


class Called(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        self.names.append(call.name())
        return call(*args, **(kwargs or {}))


@pytest.mark.parametrize("trained", [None, "q", "k", "v", "mixing"])
def test_gradients_count_where_they_are_taken(trained):
    q, part = inputs_of({"B": 32, "N": 256, "H": 16, "D": 32}, (16, 16), (4, 4))
    tensors = {name: q.clone() for name in ("q", "k", "v")}
    tensors["mixing"] = torch.empty(16, 16, device="meta")
    if trained:
        tensors[trained].requires_grad_()

    def form() -> str:
        with Called() as called:
            triton_core(**tensors, query=part, key=part, form="auto")
        names = [name for name in called.names if name.startswith("mhla_diffusion::")]
        assert len(names) == 1
        return "dual" if "dual" in names[0] else "states"

    assert form() == ("states" if trained else "dual")
    with torch.no_grad():
        assert form() == "dual"


def test_blocks_without_runs_have_the_states_backward_pass_in_either_form():
    q, part = inputs_of({"B": 64, "N": 64, "H": 16, "D": 32}, (8, 8), (4, 4))  # 4 tokens in a block
    forward, both = (form_costs(q, q, part, part, 2, backward) for backward in (False, True))
    assert forward == both


def test_costs_grow_with_everything_that_grows():
    def costs(batch=4, side=16, blocks=4, dim=64, dtype=torch.bfloat16):
        shape = {"B": batch, "N": side**2, "H": 8, "D": dim}
        q, part = inputs_of(shape, (side, side), (blocks, blocks), dtype)
        return form_costs(q, q, part, part, q.element_size())

    small = costs()
    for larger in (costs(batch=8), costs(side=32), costs(dim=128), costs(dtype=torch.float32)):
        assert all(larger[form] > small[form] for form in small)
    assert costs(blocks=8)["states"] > small["states"]


def test_the_choice_is_the_same_under_compile_and_one_graph_serves_many_sizes():
    """Kinds of grids: either form; the first grid as constants; equal sides, which torch may take for one size."""
    torch.compiler.reset()
    grids = [(16, 16), (24, 16), (64, 64), (24, 24), (128, 96), (96, 64), (16, 24), (64, 128)]

    def call(q, grid):
        part = grid_partition(grid, (2, 2), q.shape[1], q.device)
        form = choose_form("auto", q, q, None, "paper", part, part, 2, False)
        return q.new_ones(1) * (2 if form == "dual" else 3)

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    found = set()
    for grid in grids:
        q = torch.empty(1, grid[0] * grid[1], 1, 128, dtype=torch.bfloat16)
        got = compiled(q, grid)
        assert torch.equal(got, call(q, grid))
        found.add(float(got))
    assert found == {2.0, 3.0} and counter.frame_count <= 4 < len(grids)
