"""What happens when a GPU cannot launch a configuration."""

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from mhla_diffusion.ops import triton_launch
from mhla_diffusion.ops.triton_configs import launch_configs, smaller


@pytest.fixture(autouse=True)
def no_memory_of_earlier_launches(monkeypatch):
    monkeypatch.setattr(triton_launch, "_step", {})
    monkeypatch.setattr(triton_launch, "_warned", set())


@pytest.fixture
def call(make_call):
    return make_call((3, 3), (2, 2), 8, 12, batch=1, rope=True)


def test_a_smaller_configuration_is_taken_with_one_warning(call, monkeypatch, recwarn):
    launch, failures = triton_launch.launch, []

    def too_large_at_first(kernel, grid, config, *args, **constants):
        if getattr(config, "BN", 16) > 16:
            failures.append(config)
            raise OutOfResources(300_000, 232_448, "shared memory")
        launch(kernel, grid, config, *args, **constants)

    monkeypatch.setattr(triton_launch, "launch", too_large_at_first)
    result = call.run("triton")
    call.check(result, 1e-5)
    (message,) = [str(w.message) for w in recwarn.list if "MHLA" in str(w.message)]
    assert "smaller launch configuration" in message and f"Triton {triton.__version__}" in message
    assert "shared memory" in message and "\n" not in message
    # What fits is remembered: the next call fails nowhere.
    failures.clear()
    call.run("triton")
    assert not failures


@pytest.mark.parametrize("normalizer", ["paper", "none", "official"])
@pytest.mark.parametrize("grid", [(3, 3), (4, 4)])
def test_plain_torch_takes_over_with_one_warning(make_call, monkeypatch, recwarn, grid, normalizer):
    if normalizer == "official":
        grid = (4, 4)

    def never_fits(*args, **constants):
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(triton_launch, "launch", never_fits)
    call = make_call(grid, (2, 2), 8, 12, rope=True, normalizer=normalizer, per_head=True)
    call.check(call.run("triton"), 1e-5)
    (message,) = [str(w.message) for w in recwarn.list if "MHLA" in str(w.message)]
    assert message.endswith("continuing with plain torch") and f"Triton {triton.__version__}" in message


def test_other_errors_are_not_swallowed(call, monkeypatch):
    def broken(*args, **constants):
        raise RuntimeError("misaligned address")

    monkeypatch.setattr(triton_launch, "launch", broken)
    with pytest.raises(RuntimeError, match="misaligned address"):
        call.run("triton")


@pytest.mark.parametrize("generation", [0, 7, 8, 9, 10, 12])
@pytest.mark.parametrize("dot_bits", [16, 32])
def test_every_gpu_dtype_and_head_dim_has_a_way_down(generation, dot_bits):
    for dim in (16, 32, 64, 128, 256):
        configs = launch_configs(generation, dot_bits, dim)
        assert len(set(configs)) == len(configs) and smaller(configs[-1]) is None
        assert all(c.BN >= 16 and c.BV >= 16 and c.num_warps in (4, 8) for c in configs)


@pytest.mark.gpu
def test_first_choice_fits_this_gpu(make_call, recwarn):
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (8, 32, 64, 128, 256):
            make_call((16, 16), (4, 4), dim, dtype=dtype, rope=True).run("triton")
    assert not [w for w in recwarn.list if "MHLA" in str(w.message)]
