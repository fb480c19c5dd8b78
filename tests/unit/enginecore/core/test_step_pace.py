"""How long steps take, one behind the other."""

from penstock_enginecore.core.step_pace import StepPace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def at(self, seconds: float) -> None:
        self.now = 100.0 + seconds


def test_a_step_waits_and_computes_from_the_end_of_the_one_before_or_from_its_beginning() -> None:
    clock = Clock()
    pace = StepPace(clock)
    first = pace.begin()
    clock.at(0.5)
    second = pace.begin()  # while the first runs
    clock.at(2.5)
    assert pace.over(first) == (None, 2.5)
    clock.at(5.5)
    assert pace.over(second) == (0.0, 3.0)
    clock.at(5.75)  # the host has had something to do
    third = pace.begin()
    clock.at(7.0)
    assert pace.over(third) == (0.25, 1.25)


def test_an_idle_engine_waits_for_nothing() -> None:
    clock = Clock()
    pace = StepPace(clock)
    pace.over(pace.begin())
    pace.idle()
    clock.at(60.0)
    began = pace.begin()
    clock.at(61.5)
    assert pace.over(began) == (None, 1.5)
