"""A call like an earlier one repeats its launches: the same result as a call made for the first time."""

import pytest
import torch

from mhla_diffusion.ops import mhla_attention, triton_launch
from mhla_diffusion.ops.replay import forget, kept
from mhla_diffusion.ops.rotation import GridRope
from mhla_diffusion.ops.triton_configs import override

# name: (grid, block_grid, how the inputs are made, options of the call)
CALLS = {
    "plain": ((5, 7), (2, 3), {}, {}),
    "rotated, two parts": ((5, 7), (2, 3), {"rope": True, "normalizer": "none"}, {}),
    "matrices per head": ((5, 7), (2, 3), {"per_head": True}, {}),
    "a table": ((5, 7), (2, 3), {"as_table": True}, {}),
    "other keys": ((5, 7), (2, 3), {"key_blocks": (23, 4)}, {}),
    "chunks": ((1201,), (1,), {"batch": 1}, {}),
    "dual": ((8, 8), (2, 2), {}, {"form": "dual"}),
    "dual, buffers of no size": ((8, 8), (2, 2), {}, {"form": "dual", "normalizer": "none"}),
    "dual, backward by states": ((7, 5), (2, 2), {}, {"form": "dual"}),
}


@pytest.fixture(autouse=True)
def nothing_kept():
    forget()


def preparing(*args, **constants):
    raise AssertionError("a repeated call prepared a launch")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_other_tensors_is_repeated(make_call, monkeypatch, poisoned_buffers, name):
    grid, block_grid, made, options = CALLS[name]
    first, second = (make_call(grid, block_grid, 16, seed=seed, **made) for seed in (0, 1))
    with override(replay=False):
        expected = second.run("triton", **options)
    assert kept() == 0
    first.run("triton", **options)
    assert kept() == 2  # forward and backward
    monkeypatch.setattr(triton_launch, "launch", preparing)
    again = second.run("triton", **options)
    assert all(torch.equal(again[key], expected[key]) for key in expected)


@torch.no_grad()
def test_every_fused_step_is_repeated(device, monkeypatch, poisoned_buffers):
    def inputs(seed: int) -> dict:
        draw = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw).to(device)

        return {
            **{name: random(2, 35, 3, 32) for name in ("q", "k", "v", "gate", "local")},
            "mixing": random(6, 6).abs(),
            "query_norm": (random(3, 32), 1e-6),
            "key_norm": (random(3, 32), 1e-6),
            "norm_weight": random(32),
            "rope": GridRope(torch.rand(2, 16, generator=draw).to(device)),
        }

    options = {
        "grid": (5, 7),
        "block_grid": (2, 3),
        "backend": "triton",
        "form": "states",
        "normalizer": "none",
    }
    options |= {"gate_bias": 1.0}
    with override(replay=False):
        expected = mhla_attention(**inputs(1), **options)
    mhla_attention(**inputs(0), **options)
    assert kept() == 1
    monkeypatch.setattr(triton_launch, "launch", preparing)
    assert torch.equal(mhla_attention(**inputs(1), **options), expected)


@torch.no_grad()
@pytest.mark.parametrize("steps", [["norm_weight"], ["norm_weight", "gate", "local"]], ids="+".join)
def test_an_output_norm_over_more_channels_than_a_tile_is_repeated(
    make_call, monkeypatch, poisoned_buffers, steps
):
    """Float32's tiles hold up to 32 value channels; the norm is then taken behind the kernels."""
    calls = [make_call((5, 7), (2, 3), 16, 72, epilogue=True, seed=seed) for seed in (0, 1)]
    options = {"backend": "triton", "form": "states", "gate_bias": 1.2 if "gate" in steps else None}
    for call in calls:
        for name in {"norm_weight", "gate", "local"}.difference(steps):
            del call.tensors[name]
    first, second = ({**call.tensors, **call.options, **options} for call in calls)
    truth = mhla_attention(**{**second, "backend": "reference"})
    mhla_attention(**first)
    assert kept() == 1
    monkeypatch.setattr(triton_launch, "launch", preparing)
    out = mhla_attention(**second)
    assert (out - truth).norm() <= 1e-5 * truth.norm()
    assert torch.equal(mhla_attention(**second), out)


def test_other_strides_sizes_and_numbers_are_other_calls(make_call):
    call = make_call((6, 6), (2, 2), 16)
    call.run("triton")
    before = kept()
    call.run("triton", feature_eps=1e-3)
    assert kept() == before + 2
    make_call((6, 6), (2, 2), 16, batch=1).run("triton")
    assert kept() == before + 4
    for name in ("q", "k", "v"):
        call.tensors[name] = call.tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    call.run("triton")
    assert kept() == before + 6


@torch.no_grad()
def test_one_tensor_in_two_places_is_not_taken_for_two(make_call):
    call = make_call((6, 6), (2, 2), 16)
    options = {"backend": "triton", "form": "states", "mixing": call.tensors["mixing"], **call.options}
    q, k, v = (call.tensors[name] for name in ("q", "k", "v"))
    mhla_attention(q, q, q, **options)
    out = mhla_attention(q, k, v, **options)
    assert kept() == 2
    with override(replay=False):
        assert torch.equal(out, mhla_attention(q, k, v, **options))


@torch.no_grad()
def test_what_fails_or_falls_back_is_not_kept(make_call, monkeypatch):
    from triton.runtime.errors import OutOfResources

    def never_fits(*args, **constants):
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(triton_launch, "_step", {})
    monkeypatch.setattr(triton_launch, "_warned", set())
    call = make_call((6, 6), (2, 2), 16)
    options = {"backend": "triton", "form": "states", **call.tensors, **call.options}
    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="continuing with plain torch"):
        patched.setattr(triton_launch, "launch", never_fits)
        mhla_attention(**options)
    assert kept() == 0


@torch.no_grad()
def test_a_plan_keeps_no_tensor_alive(make_call):
    import gc
    import weakref

    call = make_call((6, 6), (2, 2), 16, rope=True)
    options = {"backend": "triton", "form": "states", **call.tensors, **call.options}
    mhla_attention(**options)
    assert kept() == 1
    watched = [weakref.ref(x) for x in (*call.tensors.values(), *call.options["rope"])]
    del call, options
    gc.collect()
    assert not any(ref() is not None for ref in watched)


@pytest.mark.gpu
@torch.no_grad()
def test_the_host_is_done_sooner():
    import time

    q, k, v = (torch.randn(2, 1024, 36, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mixing = torch.rand(16, 16, device="cuda")

    def microseconds(calls: int = 200) -> float:
        for count in (20, calls):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                mhla_attention(q, k, v, mixing, grid=(32, 32), block_grid=(4, 4))
        return 1e6 * (time.perf_counter() - start) / calls

    repeated = microseconds()
    with override(replay=False):
        prepared = microseconds()
    assert repeated < 0.7 * prepared, f"{repeated:.0f} us repeated, {prepared:.0f} us prepared"
