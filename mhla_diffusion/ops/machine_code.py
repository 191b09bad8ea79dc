"""A check of compiled kernels before they run. Assemblers do go wrong: ptxas 12.8, which Triton 3.6 brings, leaves a
descriptor of one of Hopper's matrix instructions unset where two of their operands lie, one after the other, at one
shared address. The kernel then reads anywhere. ptxas 12.9 (Triton 3.8) does not.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path

__all__ = ["LostDescriptor", "check_when_loaded", "disassembled", "lost_descriptors"]

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
CONSTANT, ADDRESS, OTHER = "constant", "address", "other"
# Of a descriptor they make a descriptor.
MOVES = ("UMOV", "MOV", "R2UR", "UIADD3", "IADD3", "IMAD.MOV", "IMAD.U32", "ULOP3", "LOP3", "CS2R")


class LostDescriptor(RuntimeError):
    """The assembler made a faulty kernel; another configuration may do."""


@functools.cache
def check_when_loaded(kernel: str) -> None:
    """From now on no kernel of this name is loaded in this process that reads through a lost descriptor.

    Only where the assembler is the faulty one; each kernel is disassembled for it. Raises LostDescriptor at its launch.
    """
    import triton

    if assembler_version() >= (12, 9):
        return

    def check(module, function, name: str, files: dict, key: str) -> None:
        if name == kernel:
            lost = lost_descriptors(disassembled(Path(files[f"{name}.cubin"]).read_bytes()))
            if lost:
                raise LostDescriptor(f"ptxas lost a descriptor of {lost[0].strip()}")

    triton.knobs.runtime.kernel_load_start_hook.add(check)


@functools.cache
def assembler_version() -> tuple[int, ...]:
    """Of the ptxas that Triton runs for Hopper."""
    import triton

    said = triton.knobs.nvidia.ptxas.version
    return tuple(int(part) for part in said.split(".")[:2])


def disassembled(cubin: bytes) -> str:
    import triton.backends.nvidia

    program = Path(triton.backends.nvidia.__file__).parent / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=True).stdout


def lost_descriptors(text: str) -> list[str]:
    """Matrix instructions whose descriptor of an operand in shared memory does not come from a shared address.

    A descriptor's low word starts with a 14-bit address (Triton 3.8 takes 15), cut out by SGXT or a mask; steps along
    the operand add constants to it, and moves may take it through ordinary registers and the stack. Whatever else a
    register holds is no descriptor.
    Instructions are read in the text's order.
    """
    kinds: dict[str, str] = {"RZ": CONSTANT, "URZ": CONSTANT}
    faulty = []
    for line in text.splitlines():
        found = INSTRUCTION.match(line)
        if not found:
            continue
        name, _, rest = found.group(1).partition(" ")
        arguments = [part.strip().removesuffix(".reuse") for part in rest.split(",")]
        if name.startswith("HGMMA"):
            if any([kinds.get(low, OTHER) == OTHER for low in descriptors(arguments)]):
                faulty.append(found.group(1))
            continue
        width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
        slot = re.search(r"\[R1(?:\+0x([0-9a-f]+))?\]", rest)
        if slot and name.startswith(("STL", "LDL")):
            low, first = int(slot.group(1) or "0", 16), arguments[name.startswith("STL")]
            for step in range(width if first != "RZ" else 0):
                place, register = f"stack {low + 4 * step}", f"R{int(first[1:]) + step}"
                if name.startswith("STL"):
                    kinds[place] = kinds.get(register, OTHER)
                else:
                    kinds[register] = kinds.get(place, OTHER)
            continue
        target = re.fullmatch(r"(U?R)(\d+)", arguments[0])
        if not target or name.startswith(("ST", "RED")):
            continue
        register, first = target.group(1), int(target.group(2))
        value = kind(name, arguments[1:], kinds)
        kinds |= {f"{register}{number}": value for number in range(first, first + width)}
    return faulty


def descriptors(arguments: list[str]) -> list[str]:
    """The uniform registers that hold the low words of an instruction's descriptors."""
    lows = []
    for number in map(int, re.findall(r"gdesc\[UR(\d+)\]", ",".join(arguments))):
        in_registers = len(arguments) > 1 and re.match(r"R\d+", arguments[1]) is not None
        lows += [f"UR{number + 2}"] if in_registers else [f"UR{number}", f"UR{number + 2}"]
    return lows


def kind(name: str, sources: list[str], kinds: dict[str, str]) -> str:
    """What an instruction leaves in its target."""
    if name.startswith(("USGXT", "SGXT")):
        return ADDRESS if sources[-1] in ("0xe", "0xf") else OTHER
    if name.startswith(("ULOP3", "LOP3")) and not {"0x3fff", "0x7fff"}.isdisjoint(sources):
        return ADDRESS
    if not name.startswith(MOVES):
        return OTHER
    found = {
        kinds.get(register, OTHER) for source in sources for register in re.findall(r"\bU?R[\dZ]+", source)
    }
    return OTHER if OTHER in found else ADDRESS if ADDRESS in found else CONSTANT
