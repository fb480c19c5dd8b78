"""The log line about an engine's recent work: it covers whole intervals of work, without idle time."""

import logging

import pytest

from penstock_common.types.outputs import SchedulerStats
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.steps_in_flight import IterationLog


class Engine:
    """Makes steps at times that the test sets."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 1000.0
        self.log = IterationLog(10.0, lambda: self.now)
        self.preemptions = 0
        self._caplog = caplog
        caplog.set_level(logging.INFO)

    def step(self, seconds: float = 1.0) -> None:
        self.log.begin()
        self.now += seconds
        self.log.count(
            SchedulerOutput(num_scheduled_tokens={"r": 4}),
            ModelRunnerOutput(request_ids=["r"], sampled_token_ids=[[7]]),
        )
        self.log.tick(self.stats)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_preemptions=self.preemptions)

    def wait(self) -> None:
        """Do nothing until a line is due."""
        left = self.log.seconds_to_line
        assert left is not None
        self.now += left
        self.log.tick_idle(self.stats)

    @property
    def rates(self) -> list[str]:
        return [record.getMessage().split(",")[0] for record in self._caplog.records]

    @property
    def told_preemptions(self) -> list[str]:
        return [record.getMessage().rpartition(", ")[2] for record in self._caplog.records]


@pytest.fixture
def engine(caplog: pytest.LogCaptureFixture) -> Engine:
    return Engine(caplog)


def test_time_without_requests_is_not_averaged_over(engine: Engine) -> None:
    engine.now += 3600.0
    engine.step()
    assert engine.rates == []
    for _ in range(9):
        engine.step()
    assert engine.rates == ["1.0 steps/s"]


def test_a_short_burst_is_logged_one_interval_after_its_start(engine: Engine) -> None:
    for _ in range(4):
        engine.step(0.5)
    engine.wait()
    assert engine.now == 1010.0
    assert engine.rates == ["2.0 steps/s"]
    assert engine.log.seconds_to_line is None
    engine.now += 3600.0
    engine.step()
    assert engine.rates == ["2.0 steps/s"]
    engine.wait()
    assert engine.rates == ["2.0 steps/s", "1.0 steps/s"]


def test_preemptions_are_those_since_the_line_before(engine: Engine) -> None:
    engine.preemptions = 2
    engine.step()
    engine.wait()
    engine.step()
    engine.wait()
    engine.preemptions = 3
    engine.step()
    engine.wait()
    assert engine.told_preemptions == ["2 preemptions", "0 preemptions", "1 preemptions"]


def test_a_busy_engine_has_a_line_every_interval(engine: Engine) -> None:
    for _ in range(40):
        engine.step()
    assert engine.rates == ["1.0 steps/s"] * 4
