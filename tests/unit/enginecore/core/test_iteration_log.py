"""The line on what an engine did lately: whole intervals of work, not time without requests."""

import logging

import pytest

from penstock_common.types.outputs import SchedulerStats
from penstock_enginecore.core.iteration_log import IterationLog
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput, SchedulerOutput


class Engine:
    """Steps at times that the test says."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 1000.0
        self.log = IterationLog(10.0, lambda: self.now)
        self._caplog = caplog
        caplog.set_level(logging.INFO)

    def step(self, seconds: float = 1.0) -> None:
        self.log.begin(SchedulerStats)
        self.now += seconds
        self.log.count(
            SchedulerOutput(num_scheduled_tokens={"r": 4}),
            ModelRunnerOutput(request_ids=["r"], sampled_token_ids=[[7]]),
        )
        self.log.tick(SchedulerStats)

    @property
    def rates(self) -> list[str]:
        return [record.getMessage().split(",")[0] for record in self._caplog.records]


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


def test_a_short_burst_is_told_when_the_next_one_begins(engine: Engine) -> None:
    for _ in range(4):
        engine.step(0.5)
    engine.now += 3600.0
    engine.step()
    assert engine.rates == ["2.0 steps/s"]


def test_a_busy_engine_has_a_line_every_interval(engine: Engine) -> None:
    for _ in range(40):
        engine.step()
    assert engine.rates == ["1.0 steps/s"] * 4
