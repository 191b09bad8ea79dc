"""What a compiled kernel's machine code must not do. Assemblers do go wrong: ptxas 12.8 reads a uniform register that
it never wrote where two operands of Hopper's matrix instructions lie, one after the other, at one shared address.
"""

import re
import subprocess
import tempfile
from pathlib import Path

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);")


def disassembled(cubin: bytes) -> str:
    import triton.backends.nvidia

    program = Path(triton.backends.nvidia.__file__).parent / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=True).stdout


def undefined_reads(text: str) -> list[str]:
    """Instructions that read a uniform register (UR0, UR1, ...) which none above them writes."""
    written: set[int] = set()
    faulty = []
    for line in text.splitlines():
        found = INSTRUCTION.match(line)
        if not found:
            continue
        name, _, rest = found.group(1).partition(" ")
        arguments = [part.strip() for part in rest.split(",")]
        width = 2 if ".64" in name or ".WIDE" in name else 1
        target = re.fullmatch(r"UR(\d+)", arguments[0])
        if name.startswith(("ST", "RED")):
            target = None
        sources = ",".join(arguments[1:]) if target else rest
        if read(sources, arguments) - written:
            faulty.append(found.group(1))
        if target:
            written |= set(range(int(target.group(1)), int(target.group(1)) + width))
    return faulty


def read(sources: str, arguments: list[str]) -> set[int]:
    """Numbers of the uniform registers in an instruction's sources."""
    registers: set[int] = set()
    for number in map(int, re.findall(r"gdesc\[UR(\d+)\]", sources)):
        # Descriptors of both operands; the first is not looked at where that operand lies in registers.
        in_registers = len(arguments) > 1 and re.match(r"R\d+$", arguments[1])
        registers |= set(range(number + 2 if in_registers else number, number + 4))
    sources = re.sub(r"gdesc\[UR\d+\]", "", sources)
    for number in map(int, re.findall(r"desc\[UR(\d+)\]", sources)):
        registers |= {number, number + 1}
    return registers | set(map(int, re.findall(r"UR(\d+)", re.sub(r"desc\[UR\d+\]", "", sources))))
