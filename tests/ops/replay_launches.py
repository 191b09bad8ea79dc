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

from mhla_diffusion.ops import triton_launch
from mhla_diffusion.ops.triton_configs import override

LAUNCHED: list[tuple] = []


def launched(x, y, z, stream, function, packed_metadata, launch_metadata, enter, leave, *arguments) -> None:
    seen = [
        ("tensor", x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else (type(x), x)
        for x in arguments
    ]
    LAUNCHED.append((x, y, z, stream, function, packed_metadata, seen))


def launches(call) -> list[tuple]:
    LAUNCHED.clear()
    call()
    return list(LAUNCHED)


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

    def watched(*args, **constants) -> None:
        prepared.append(args[0])
        prepare(*args, **constants)

    triton_launch.launch = watched
    for name, call in calls.items():
        with override(replay=False):
            expected = launches(call)
        assert launches(call) == expected, name  # the call that is written down
        prepared.clear()
        assert launches(call) == expected, name
        assert expected and not prepared, f"{name}: prepared again"
        print(f"Triton {triton.__version__}: {name}: {len(expected)} launches repeated")


if __name__ == "__main__":
    main()
