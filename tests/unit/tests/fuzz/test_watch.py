"""Log lines of a service that count as a defect caused by a request."""

from tests.fuzz.watch import _notable


def test_a_loop_that_is_late_by_the_clock_is_no_defect_and_other_errors_are() -> None:
    lines = [
        "12:31:06 [error] liveness check fails: the event loop is blocked seconds=13.5",
        "12:31:07 [error] liveness check fails: essential tasks have ended tasks=['beat']",
        "12:31:08 [info] engine lost engine=engine-0",
        "12:31:09 [info] liveness check passes again: the event loop is no longer blocked",
    ]
    assert [*_notable("\n".join(lines))] == lines[1:3]
