"""The reader of machine code that `compile_kernels.py` uses; compiling itself needs no GPU, but minutes."""

from mhla_diffusion.evaluation.machine_code import undefined_reads

GOOD = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/                   LDG.E.128 R16, desc[UR4][R16.64] ;
        /*0020*/                   UIADD3 UR10, UP0, UR4, 0x20, URZ ;
        /*0030*/                   UMOV UR11, 0x40000040 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR8].tnspB, R56 ;
        /*0050*/              @!P0 BRA `(.L_x_0) ;
"""


def test_registers_that_are_written_first_are_fine():
    assert undefined_reads(GOOD) == []


def test_a_register_that_was_never_written_is_found():
    lines = GOOD.splitlines()
    assert undefined_reads("\n".join(lines[:3] + lines[4:])) == [
        "HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR8].tnspB, R56 "
    ]
    assert undefined_reads("/*0010*/   UIADD3 UR38, UP0, UR38, 0x20, URZ ;") == [
        "UIADD3 UR38, UP0, UR38, 0x20, URZ "
    ]
    both = "/*0010*/   HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8], R56 ;"
    assert undefined_reads(GOOD + both) == [
        "HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8], R56 "
    ]  # UR8 and UR9 too
