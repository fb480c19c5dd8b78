"""Instructions of an inner loop are counted in a disassembly."""

from tests.compiled.machine_code import Loop, inner_loop

TEXT = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;            /* 0x00000a00ff017624 */
        /*0010*/                   LDGSTS.E.128 [R2], [R4.64] ;      /* 0x0000000004027fae */
        /*0020*/                   IADD3 R6, P0, R6, 0x1, RZ ;       /* 0x0000000106067810 */
        /*0030*/              @P0  BRA 0x10 ;                        /* 0xffffffd000000947 */
        /*0040*/                   LOP3.LUT R8, R9, 0x87f087f0, R10, 0xf8, !PT ;
        /*0050*/                   HMMA.16816.F32.BF16 R12, R8, R20, R12 ;
        /*0060*/                   NOP ;
        /*0070*/             @!UP0 BRA 0xa0 ;
        /*0080*/              @!P1 BRA 0x40 ;
        /*0090*/                   BRA 0x90 ;
        /*00a0*/                   EXIT ;
"""


def test_the_smallest_loop_with_matrix_instructions_is_counted_without_padding() -> None:
    assert inner_loop(TEXT) == Loop(4, 1)


def test_code_without_matrix_instructions_has_no_such_loop() -> None:
    assert inner_loop(TEXT.replace("HMMA.16816.F32.BF16", "FFMA")) is None
