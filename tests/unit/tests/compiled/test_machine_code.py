"""Instructions of a disassembly are counted: those of an inner loop, and those before a dependent launch."""

from tests.compiled.machine_code import Before, Loop, before_wait, inner_loop

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


DEPENDENT = """
        /*0000*/                   LDG.E R2, [R2.64] ;
        /*0010*/              @!P0 LDG.E.128 R4, [R4.64] ;
        /*0020*/                   ACQBULK ;
        /*0030*/                   PREEXIT ;
        /*0040*/                   LDG.E R6, [R6.64] ;
        /*0050*/                   STG.E [R8.64], R6 ;
        /*0060*/                   EXIT ;
"""


def test_loads_before_the_wait_of_a_dependent_launch_are_counted() -> None:
    assert before_wait(DEPENDENT) == Before(2, ())


def test_programs_that_may_not_wait_or_write_before_are_faults() -> None:
    exits = DEPENDENT.replace("ACQBULK", "EXIT", 1).replace("PREEXIT", "ACQBULK").replace("LDG.E R6", "PREEXIT")
    assert before_wait(exits) == Before(2, ("has EXIT before ACQBULK",))
    assert before_wait(DEPENDENT.replace("LDG.E R2", "STG.E R2")).faults == ("has STG before ACQBULK",)
    assert before_wait(DEPENDENT.replace("PREEXIT", "NOP")).faults == ("has 1 ACQBULK and 0 PREEXIT",)
