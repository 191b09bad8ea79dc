"""Compile the kernels for GPUs that need not be there: `python tests/ops/compile_kernels.py --arch 80 90 [--all]`.

Operator calls run on CPU tensors, forward and backward; only the launch is replaced, by Triton's compilation ahead of
time, so that signatures and specialisations are exactly those of a run on the GPU. Prints what does not compile or
takes more shared memory than the GPU has, or whose machine code is faulty, and exits with 1 then.
`--all`, every dtype, head dim and option, takes many minutes; `--dual`, every configuration of the dual form.
"""

import argparse
import itertools
import os
import re
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from mhla_diffusion.blocks import block_table
from mhla_diffusion.ops import triton_launch
from mhla_diffusion.ops.depthwise import gated_depthwise_op
from mhla_diffusion.ops.local_convolution import local_convolution_op
from mhla_diffusion.ops.machine_code import LostDescriptor, disassembled, lost_descriptors
from mhla_diffusion.ops.partition import grid_partition, table_partition
from mhla_diffusion.ops.registration import triton_core
from mhla_diffusion.ops.rotation import three_axes
from mhla_diffusion.ops.triton_configs import dual_configs, head_parts, override

SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}  # bytes that one program may take
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
SHORT, MIDDLE, LONG = (
    (16, 16),
    (32, 32),
    (64, 64),
)  # tokens; in 4 x 4 blocks 16 or 64 in one tile, 256 in several


class Target:
    """What Triton asks its driver for when it only compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


LINEAR = re.compile(r"^(#\w+) = #ttg\.linear<\{.*?lane = \[((?:\[[\d, ]*\](?:, )?)*)\]", re.M)
REDUCED = re.compile(r'"tt\.reduce".*?<\{axis = (\d+) : i32\}>.*?\}\) : \(tensor<[\w]+, (#\w+)>', re.S)


def scattered_reductions(ttgir: str) -> list[str]:
    """Reductions over lanes that are no neighbours. Triton 3.6 takes them for neighbours and sums up the wrong ones."""
    lanes = {name: re.findall(r"\[([\d, ]*)\]", vectors) for name, vectors in LINEAR.findall(ttgir)}
    found = []
    for axis, layout in REDUCED.findall(ttgir):
        vectors = [vector.split(", ") for vector in lanes.get(layout, [])]
        along = [bit for bit, vector in enumerate(vectors) if vector[int(axis)] != "0"]
        if along and along[-1] - along[0] >= len(along):
            found.append(f"axis {axis} of {layout}, lane bits {along}")
    return found


class Compiler:
    """Takes the place of `triton_launch.launch`."""

    def __init__(self) -> None:
        self.arch = 0
        self.compiled: set[tuple] = set()
        self.faults: set[str] = set()
        self.lost: set[str] = set()

    def aim(self, arch: int) -> None:
        self.arch = arch
        driver.set_active(Target(arch))
        triton_launch._generation = lambda x: arch // 10

    def launch(self, kernel, grid, config, *args, **constants) -> None:
        dtypes = [str(x.dtype).removeprefix("torch.") for x in args if isinstance(x, torch.Tensor)]
        name = f"sm_{self.arch} {kernel.__name__} {config} {constants} {dtypes}"
        overlap = {}
        if "PDL" in kernel.arg_names:
            constants["PDL"] = self.arch >= 90
            overlap = {"launch_pdl": self.arch >= 90}
        try:
            binary = kernel.warmup(*args, grid=grid, **config._asdict(), **overlap, **constants)
        except Exception as error:
            self.faults.add(f"{name}: {type(error).__name__} {error}")
            return
        self.compiled.add((self.arch, binary.hash))
        if binary.metadata.shared > SHARED[self.arch]:
            self.faults.add(f"{name}: {binary.metadata.shared} bytes of shared memory")
        scattered = scattered_reductions(binary.asm["ttgir"])
        if scattered:
            self.faults.add(f"{name}: reduces over lanes apart, {scattered[0]}")
        lost = lost_descriptors(disassembled(binary.asm["cubin"]))
        if lost:
            self.lost.add(f"{name}: lost descriptor in {lost[0]}")
            raise LostDescriptor(lost[0])  # the next configuration's turn


def attend(
    dtype, tokens, dim, value_dim=None, *, heads=2, rope=False, normalizer="paper", fused=False, form="states"
) -> None:
    """One call, forward and backward. fused: norm, gate or local branch follow, so the core's output is float32."""
    count = tokens[0] * tokens[1]
    q, k = (torch.zeros(1, count, heads, dim, dtype=dtype, requires_grad=True) for _ in range(2))
    v = torch.zeros(1, count, heads, value_dim or dim, dtype=dtype, requires_grad=True)
    part = grid_partition(tokens, (4, 4), count, q.device)
    turns = (torch.zeros(count, dim // 2),) * 2 if rope else None
    out = triton_core(
        q, k, v, torch.zeros(16, 16), part, part, rope=turns, key_rope=turns, normalizer=normalizer,
        out_dtype=FLOAT32 if fused else None, form=form,
    )  # fmt: skip
    out.backward(torch.zeros_like(out))


def attend_in_video(dtype, dim, normalizer) -> None:
    """Wan's blocks, with the angles computed from the tokens' places, forward and backward."""
    grid, heads = (21, 30, 52), 2
    count = grid[0] * grid[1] * grid[2]
    q, k, v = (torch.zeros(1, count, heads, dim, dtype=dtype, requires_grad=True) for _ in range(3))
    part = grid_partition(grid, (3, 5, 10), count, q.device)
    turns = (three_axes(torch.zeros(3, dim // 2)), None)
    out = triton_core(
        q, k, v, torch.zeros(150, 150), part, part, rope=turns, key_rope=turns, normalizer=normalizer
    )
    out.backward(torch.zeros_like(out))


def attend_with_steps(dtype, tokens, dim) -> None:
    """One forward call with every step fused, and blocks given as a table."""
    count, heads = tokens[0] * tokens[1], 2
    q, k, v, gate, local = (torch.zeros(1, count, heads, dim, dtype=dtype) for _ in range(5))
    part = table_partition("table", block_table(tokens, (4, 4)), count, q.device)
    turns = (torch.zeros(count, dim // 2),) * 2
    triton_core(
        q, k, v, torch.zeros(16, 16), part, part, rope=turns, key_rope=turns, gate=gate, gate_bias=1.0, local=local,
        query_norm=torch.ones(heads, dim), query_norm_eps=1e-6, key_norm=torch.ones(dim), key_norm_eps=1e-6,
        norm_weight=torch.ones(dim), norm_eps=1e-6,
    )  # fmt: skip


def convolve(dtype, depth) -> None:
    """The local branch over 3 x 32 x 32 tokens, forward and backward."""
    x = torch.zeros(1, 3, 32, 32, 128, dtype=dtype, requires_grad=True)
    weight = torch.zeros(128, 1, depth, 3, 3, requires_grad=True)
    local_convolution_op(x, weight, torch.zeros(128), False).backward(x.detach())


def a_few(arch: int) -> None:
    """What models run, and one of each kind besides; before Hopper only what differs there."""
    x, weight = torch.zeros(2, 32, 32, 128, dtype=BFLOAT16), torch.zeros(128, 1, 3, 3, dtype=BFLOAT16)
    gated_depthwise_op(x, weight, weight[:, 0, 0, 0].contiguous())
    convolve(BFLOAT16, 3)
    attend(BFLOAT16, SHORT, 72, form="dual")
    attend(BFLOAT16, LONG, 128, rope=True)
    if arch < 90:
        return
    attend(FLOAT32, LONG, 64, rope=True)
    attend(FLOAT32, SHORT, 32, form="dual")
    attend(BFLOAT16, MIDDLE, 64)
    attend(BFLOAT16, LONG, 72)
    attend_with_steps(BFLOAT16, LONG, 128)
    attend(BFLOAT16, LONG, 32, heads=8, fused=True)
    attend_in_video(BFLOAT16, 128, "none")


def every_option(dims: list[int]) -> None:
    options = itertools.product((BFLOAT16, FLOAT16, FLOAT32), ("paper", "none"), (False, True), (False, True))
    for dtype, normalizer, rope, fused in options:
        if fused and dtype == FLOAT32:
            continue
        for dim, tokens in itertools.product(dims, (SHORT, MIDDLE, LONG)):
            attend(dtype, tokens, dim, rope=rope, normalizer=normalizer, fused=fused)
            if (
                dim in (8, 12) and tokens == LONG
            ):  # rows of one head start at addresses no vector load may take
                attend(dtype, tokens, dim, heads=1, rope=rope, normalizer=normalizer, fused=fused)
            if tokens == SHORT and dim <= 128 and not (rope and normalizer == "paper"):
                attend(dtype, tokens, dim, rope=rope, normalizer=normalizer, fused=fused, form="dual")
    for dtype in (BFLOAT16, FLOAT16, FLOAT32):
        attend_with_steps(dtype, LONG, 72)
        for dim, value_dim in ((64, 128), (128, 32), (32, 256)):
            attend(dtype, LONG, dim, value_dim, rope=True, fused=True)


def every_dual_configuration(dims: list[int]) -> None:
    """All that may be chosen or fallen back to, on grids of 16 and 64 tokens in a block, given as a grid or a table."""
    names = ("dual_forward", "dual_query", "dual_key")
    for dtype, dim, side in itertools.product((BFLOAT16, FLOAT16, FLOAT32), dims, (16, 32)):
        count = side * side
        bits, width = 16 if dtype == BFLOAT16 else 32, sum(head_parts(dim))
        parts = [grid_partition((side, side), (4, 4), count, torch.device("cpu"))]
        parts += [table_partition("table", block_table((side, side), (4, 4)), count, torch.device("cpu"))]
        for part, normalizer in itertools.product(parts, ("paper", "none")):
            for chosen in itertools.zip_longest(*(dual_configs(name, 9, bits, width) for name in names)):
                q, k, v = (torch.zeros(1, count, 2, dim, dtype=dtype, requires_grad=True) for _ in range(3))
                with override(**{name: one for name, one in zip(names, chosen, strict=True) if one}):
                    out = triton_core(
                        q, k, v, torch.zeros(16, 16), part, part, normalizer=normalizer, form="dual"
                    )
                    if part.layout is not None:
                        out.backward(torch.zeros_like(out))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[90], choices=sorted(SHARED))
    parser.add_argument("--all", action="store_true", help="every dtype, head dim and option")
    parser.add_argument(
        "--dims", type=int, nargs="+", default=[8, 12, 32, 64, 72, 128, 256], help="for --all"
    )
    parser.add_argument("--dual", action="store_true", help="every configuration of the dual form")
    arguments = parser.parse_args()
    compiler = Compiler()
    triton_launch.launch = compiler.launch
    for arch in arguments.arch:
        compiler.aim(arch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if arguments.dual:
                every_dual_configuration([dim for dim in arguments.dims if dim <= 128])
            else:
                every_option(arguments.dims) if arguments.all else a_few(arch)
        compiler.faults |= {str(found.message) for found in caught if "plain torch" in str(found.message)}
    if not (arguments.all or arguments.dual):
        compiler.faults |= compiler.lost  # at the models' shapes, the preferred configuration has to do
    print(
        f"Triton {triton.__version__}: {len(compiler.compiled)} kernels compile, {len(compiler.lost)} are given up for "
        f"another configuration, {len(compiler.faults)} faults"
    )
    print(*sorted(compiler.faults), sep="\n", file=sys.stderr)
    return 1 if compiler.faults else 0


if __name__ == "__main__":
    sys.exit(main())
