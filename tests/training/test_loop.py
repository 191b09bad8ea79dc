import json

import pytest
import torch
from safetensors.torch import load_file

from mhla_diffusion.training import run


def state_of(out, step):
    folder = out / "checkpoints" / f"step-{step:08d}"
    return {name: load_file(folder / f"{name}.safetensors") for name in ("weights", "ema", "optimizer")}


def assert_bit_equal(left, right):
    for kind in left:
        assert left[kind].keys() == right[kind].keys()
        for name in left[kind]:
            assert torch.equal(left[kind][name], right[kind][name]), (kind, name)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_three_steps_and_three_more_equal_six(recipe_file, tmp_path, schedule):
    common = [f"optimizer.schedule={schedule}"]
    whole = run(recipe_file("whole"), common)
    assert whole.step == 6 and whole.finished

    half = recipe_file("half")
    short = run(half, [*common, "run.max_minutes=0.0001"])  # over at the first look, which is after step 1
    assert short.step == 1 and not short.finished
    resumed = run(half, common, resume="auto")
    assert resumed.finished
    assert_bit_equal(state_of(whole.out, 6), state_of(resumed.out, 6))
    steps = [json.loads(line)["step"] for line in (resumed.out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 6]
