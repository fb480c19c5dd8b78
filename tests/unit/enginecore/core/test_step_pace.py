"""How long steps take, one behind the other."""

from penstock_enginecore.core.step_pace import StepPace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_step_takes_from_the_end_of_the_one_before_or_from_its_start() -> None:
    clock = Clock()
    pace = StepPace(clock)
    taken = []
    for wait, call in (
        (1.0, pace.started),
        (0.5, pace.started),  # a second one in flight
        (2.0, pace.over),
        (3.0, pace.over),
        (0.25, pace.started),  # what the host did in between belongs to it
        (1.0, pace.over),
        (0.0, pace.idle),
        (60.0, pace.started),
        (1.5, pace.over),
    ):
        clock.now += wait
        taken.append(call())
    assert [each for each in taken if each is not None] == [2.5, 3.0, 1.25, 1.5]


def test_a_step_that_nobody_started_took_nothing() -> None:
    assert StepPace(Clock()).over() == 0.0
