"""What happens when a launch configuration is too large for a GPU, or Triton cannot compile it."""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime.build import compile_module_from_src
from triton.runtime.errors import OutOfResources

from mhla_diffusion.ops import mhla_attention, triton_launch
from mhla_diffusion.ops.machine_code import LostDescriptor
from mhla_diffusion.ops.triton_configs import dual_configs, launch_configs, override, smaller


@pytest.fixture(autouse=True)
def no_memory_of_earlier_launches(monkeypatch):
    monkeypatch.setattr(triton_launch, "_step", {})
    monkeypatch.setattr(triton_launch, "_warned", set())
    with override(replay=False):
        yield


@pytest.fixture
def call(make_call):
    return make_call((3, 3), (2, 2), 8, 12, batch=1, rope=True)


def test_a_smaller_configuration_is_taken_with_one_warning(call, monkeypatch, recwarn):
    launch, failures = triton_launch.launch, []

    def too_large_at_first(kernel, grid, config, *args, **constants):
        if config.num_stages > 1:
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


def test_a_fault_of_the_assembler_is_passed_over_in_silence(call, monkeypatch, recwarn):
    launch, failures = triton_launch.launch, []

    def faulty_at_first(kernel, grid, config, *args, **constants):
        if config.num_stages > 1:
            failures.append(config)
            raise LostDescriptor("ptxas lost a descriptor")
        launch(kernel, grid, config, *args, **constants)

    monkeypatch.setattr(triton_launch, "launch", faulty_at_first)
    call.check(call.run("triton"), 1e-5)
    assert failures and not [w for w in recwarn.list if "MHLA" in str(w.message)]
    failures.clear()
    call.run("triton")
    assert not failures


@pytest.mark.gpu
def test_head_dims_for_which_an_assembler_goes_wrong_on_the_gpu(make_call):
    """ptxas 12.8 loses descriptors in the first configurations of these calls; what runs has to be right."""
    for dim, form in ((40, "dual"), (72, "dual")):
        call = make_call((12, 16), (3, 4), dim, heads=3, dtype=torch.bfloat16)
        for name in ("q", "k", "v"):
            x = call.tensors[name]
            call.tensors[name] = x.new_empty(*x.shape[:-1], dim + 1)[..., 1:].copy_(x)
        call.check(call.run("triton", form=form), 1e-2)


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


@torch.no_grad()
def test_plain_torch_takes_over_for_a_norm_over_all_heads(make_call, monkeypatch, recwarn):
    def never_fits(*args, **constants):
        raise OutOfResources(300_000, 232_448, "shared memory")

    call = make_call((3, 5), (2, 2), 8, 12, rope=True, normalizer="none", epilogue=True)
    weight = torch.rand(2, 8, generator=torch.Generator().manual_seed(1)).to(call.grad.device) + 0.5
    norms = {"query_norm": (weight, 1e-6), "key_norm": (weight + 1, 1e-6)}
    truth = mhla_attention(**call.tensors, **call.options, **norms, backend="reference")
    monkeypatch.setattr(triton_launch, "launch", never_fits)
    out = mhla_attention(**call.tensors, **call.options, **norms, backend="triton", form="states")
    assert (out - truth).norm() <= 1e-5 * truth.norm()
    messages = [str(w.message) for w in recwarn.list if "kernels" in str(w.message)]
    assert len(messages) == 2 and all(text.endswith("continuing with plain torch") for text in messages)


def broken_compiler(directory) -> Exception:
    """An error of Triton's compiler itself, as it arrives when one of its passes fails."""
    source = directory / "broken.ttir"
    source.write_text("module { tt.func }")
    with pytest.raises(RuntimeError) as caught:
        triton.compile(str(source), target=GPUTarget("cuda", 90, 32))
    return caught.value


def no_c_compiler() -> Exception:
    """The error of a machine without one, as it arrives when Triton builds what it launches kernels with."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="C compiler") as caught:
        patch.setenv("PATH", "")
        patch.delenv("CC", raising=False)
        compile_module_from_src("int built_by_no_test;", "nothing")
    return caught.value


def test_a_machine_without_a_c_compiler_takes_plain_torch_with_one_warning(call, monkeypatch, recwarn):
    error = no_c_compiler()

    def fails(*args, **constants):
        raise error

    monkeypatch.setattr(triton_launch, "launch", fails)
    call.check(call.run("triton"), 1e-5)
    (message,) = [str(w.message) for w in recwarn.list if "MHLA" in str(w.message)]
    assert "Failed to find C compiler" in message and message.endswith("continuing with plain torch")


@pytest.mark.parametrize("stage", ["front end", "passes"])
def test_a_kernel_that_does_not_compile_gives_way_with_one_warning(
    call, monkeypatch, recwarn, tmp_path, stage
):
    launch = triton_launch.launch
    source = "def kernel(x):\n    return x + y\n"
    error = CompilationError(source, None, "no y") if stage == "front end" else broken_compiler(tmp_path)

    def fails_when_pipelined(kernel, grid, config, *args, **constants):
        if config.num_stages > 1:
            raise error
        launch(kernel, grid, config, *args, **constants)

    monkeypatch.setattr(triton_launch, "launch", fails_when_pipelined)
    call.check(call.run("triton"), 1e-5)
    (message,) = [str(w.message) for w in recwarn.list if "MHLA" in str(w.message)]
    assert "do not compile" in message and message.endswith("continuing with a smaller launch configuration")
    assert "\n" not in message


def test_a_fallback_fails_every_test_that_does_not_expect_it(call, monkeypatch):
    def never_fits(*args, **constants):
        raise OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(triton_launch, "launch", never_fits)
    for _ in range(2):  # not only the first time
        with pytest.raises(UserWarning, match="continuing with plain torch"):
            call.run("triton")


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
        for block_size in (1, 16, 17, 40, 100, 5000):
            configs = launch_configs(generation, dot_bits, dim, block_size)
            assert len(set(configs)) == len(configs) and smaller(configs[-1]) is None
            assert all(c.BN >= 16 and c.BV >= 16 and c.num_warps in (1, 2, 4, 8) for c in configs)


def test_a_tile_is_not_longer_than_its_block_needs():
    sizes = {size: launch_configs(9, 16, 32, size)[0] for size in (1, 16, 17, 64, 65, 128, 4096)}
    assert [config.BN for config in sizes.values()] == [16, 16, 32, 64, 128, 128, 128]
    assert sizes[16].num_warps < sizes[4096].num_warps == 4


def test_two_warps_where_one_tile_holds_a_block():
    warps = {
        size: launch_configs(9, 16, 80, size, "summarise")[0].num_warps for size in (16, 36, 64, 65, 256)
    }
    assert list(warps.values()) == [2, 2, 2, 4, 4]


@pytest.mark.parametrize("kernel", ["dual_query", "dual_key"])
def test_wide_heads_take_what_narrow_ones_give_way_to(kernel):
    narrow, wide = (dual_configs(kernel, 9, 16, dim) for dim in (80, 96))
    assert narrow[1:] == wide and narrow[0].BN > wide[0].BN
    assert all(
        dual_configs(kernel, *place, 80) == dual_configs(kernel, *place, 96) for place in ((9, 32), (8, 16))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_choice_fits_this_gpu(make_call, dtype, dim):
    # Blocks of 256 tokens, so that the table's tiles are taken as they are. A fallback would be an error.
    make_call((32, 32), (2, 2), dim, dtype=dtype, rope=True).run("triton")


@pytest.mark.parametrize("far", [2**31, 2**31 + 8])
def test_strides_that_need_64_bits_are_not_divided(far):
    """A quotient that fits 32 bits would be multiplied in 32 bits."""
    x = torch.empty_strided((2, 16, 1, 16), (far, 16, 16, 1), device="meta")
    assert triton_launch.strides_of(x) == ((far, 16, 16), 1)
    near = torch.empty_strided((2, 16, 1, 16), (2**31 - 8, 16, 16, 1), device="meta")
    assert triton_launch.strides_of(near)[1] == 8
