"""Do repeated calls hand compiled kernels what Triton's own launch hands them? Compiles for sm_90, launches nothing.

Operator calls on CPU tensors go through Triton's launch up to the point where the driver would take over.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from compile_kernels import BFLOAT16, SHORT, Target, attend, attend_with_steps
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

from mhla_diffusion.ops import replay, triton_launch
from mhla_diffusion.ops.triton_configs import override

LAUNCHED: list[tuple] = []


def launched(x, y, z, stream, function, packed_metadata, launch_metadata, enter, leave, *arguments) -> None:
    LAUNCHED.append(((x, y, z, stream, function, packed_metadata), arguments))


def launches(call) -> list[tuple]:
    LAUNCHED.clear()
    call()
    return list(LAUNCHED)


def check(got: list[tuple], expected: list[tuple], what: str) -> None:
    """The same launches; where the expected one has a tensor an aligned address will do."""
    assert len(got) == len(expected) and expected, what
    for (launch, arguments), (wanted, other) in zip(got, expected, strict=True):
        assert launch == wanted and len(arguments) == len(other), what
        for x, y in zip(arguments, other, strict=True):
            if not isinstance(y, torch.Tensor):
                assert type(x) is type(y) and x == y, what
            elif isinstance(x, torch.Tensor):
                assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride()), what
            else:
                assert type(x) is int and x % 16 == y.data_ptr() % 16, what


def data_flow(launched: list[tuple]) -> list[list[int]]:
    """Which kernels share which memory: each pointer by the number of the place where it was met first."""
    met: dict[int, int] = {}
    flow = []
    for _, arguments in launched:
        pointers = [x if type(x) is int else x.data_ptr() for x in arguments if is_pointer(x)]
        flow.append([met.setdefault(pointer, len(met)) for pointer in pointers])
    return flow


def is_pointer(x) -> bool:
    # Some builds of Python have their heap below 4 GiB; sizes and strides of these calls are under a million.
    return isinstance(x, torch.Tensor) or type(x) is int and x > 2**20


def keep_all_memory() -> list[torch.Tensor]:
    """From now on no memory that the list given back holds is used twice: equal addresses are equal buffers."""
    made: list[torch.Tensor] = []

    def keeping(function):
        return lambda *args, **options: made.append(function(*args, **options)) or made[-1]

    for name in ("empty", "zeros", "zeros_like"):
        setattr(torch, name, keeping(getattr(torch, name)))
    note = replay._Recording.made
    replay._Recording.made = lambda self, x, make, buffer: note(self, x, keeping(make), buffer)
    return made


def main() -> None:
    driver.set_active(Target(90))
    triton_launch._generation = lambda x: 9
    CompiledKernel._init_handles = lambda self: None
    CompiledKernel.run = property(lambda self: launched)
    calls = {
        "dual": lambda: attend(BFLOAT16, SHORT, 72, form="dual"),
        "states": lambda: attend(BFLOAT16, SHORT, 72, rope=True),
        "states, all steps": lambda: attend_with_steps(BFLOAT16, SHORT, 64),
    }
    prepare, prepared = triton_launch.launch, []
    made = keep_all_memory()

    def watched(*args, **constants) -> None:
        prepared.append(args[0])
        prepare(*args, **constants)

    triton_launch.launch = watched
    for name, call in calls.items():
        with override(replay=False):
            expected = launches(call)
        check(launches(call), expected, name)  # the call that is written down
        prepared.clear()
        again = launches(call)
        check(again, expected, name)
        assert not prepared, f"{name}: prepared again"
        assert data_flow(again) == data_flow(expected), name
        made.clear()
        print(f"Triton {triton.__version__}: {name}: {len(expected)} launches repeated")


if __name__ == "__main__":
    main()
