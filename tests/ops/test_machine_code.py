"""The reader of machine code; the code is written out here as the disassembler prints it."""

import pytest

from mhla_diffusion.ops.machine_code import lost_descriptors

GOOD = """
        /*0000*/                   ULDC.64 UR6, c[0x0][0x208] ;
        /*0010*/                   LDG.E.128 R16, desc[UR6][R16.64] ;
        /*0020*/                   USHF.R.U32.HI UR4, URZ, 0x4, UR4 ;
        /*0030*/                   USGXT.U32 UR4, UR4, 0xe ;
        /*0040*/                   UIADD3 UR10, UP0, UR4, 0x20, URZ ;
        /*0050*/                   UMOV UR11, 0x40000040 ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR8].tnspB, R56 ;
        /*0070*/              @!P0 BRA `(.L_x_0) ;
"""
PRODUCT = "HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR8].tnspB, R56 "


def without(part: str) -> str:
    return "\n".join(line for line in GOOD.splitlines() if part not in line)


def test_a_descriptor_that_steps_along_an_operand_is_fine():
    assert lost_descriptors(GOOD) == []
    assert (
        lost_descriptors(GOOD.replace("USGXT.U32 UR4, UR4, 0xe", "ULOP3.LUT UR4, UR4, 0x3fff, URZ, 0xc0"))
        == []
    )
    assert (
        lost_descriptors(without("UIADD3").replace("UMOV UR11", "UMOV UR10")) == []
    )  # an address known beforehand


@pytest.mark.parametrize("part", ["UIADD3", "USGXT"])
def test_a_register_that_was_never_written_or_holds_something_else_is_found(part):
    assert lost_descriptors(without(part)) == [PRODUCT]
    assert lost_descriptors(GOOD.replace("UR4, 0x20", "UR6, 0x20")) == [PRODUCT]  # what lay there before


def test_a_descriptor_may_pass_through_ordinary_registers_and_the_stack():
    there = "MOV R87, UR10 ;\n /*0046*/ UMOV UR10, UR6 ;\n /*0047*/ R2UR UR10, R{} ;\n /*0050*/ UMOV UR11"
    assert lost_descriptors(GOOD.replace("UMOV UR11", there.format(87))) == []
    assert lost_descriptors(GOOD.replace("UMOV UR11", there.format(88))) == [PRODUCT]
    stacked = there.replace(
        ";\n", ";\n /*0041*/ STL.64 [R1+0x8], R86 ;\n /*0042*/ LDL R9, [R1+0x{:x}] ;\n", 1
    )
    assert lost_descriptors(GOOD.replace("UMOV UR11", stacked.format(12, 9))) == []
    assert lost_descriptors(GOOD.replace("UMOV UR11", stacked.format(8, 9))) == [PRODUCT]


def test_both_operands_may_lie_in_shared_memory():
    both = "/*0080*/   HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8], R56 ;"
    assert lost_descriptors(GOOD + both) == ["HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8], R56 "]
    assert lost_descriptors(GOOD + "/*0070*/   UMOV UR8, UR4 ;\n" + both) == []
