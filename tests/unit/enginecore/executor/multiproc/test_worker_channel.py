"""Times at which workers report their state."""

from penstock_enginecore.core.worker_stats import WorkerStats
from penstock_enginecore.executor.multiproc.worker_channel import WorkerReports


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_due_until_something_has_changed() -> None:
    clock = Clock()
    reports = WorkerReports(clock)
    assert reports.due_in() is None
    reports.changed()
    assert reports.due_in() == 0
    reports.report(WorkerStats())
    assert reports.due_in() is None


def test_reports_are_a_second_apart() -> None:
    clock = Clock()
    reports = WorkerReports(clock)
    reports.changed()
    reports.report(WorkerStats())
    clock.now += 0.25
    reports.changed()
    assert reports.due_in() == 0.75
    clock.now += 2
    assert reports.due_in() == 0


def test_a_steps_way_does_not_count_what_the_worker_had_to_do_before() -> None:
    clock = Clock()
    reports = WorkerReports(clock)
    reports.waits()
    clock.now += 10
    reports.received(sent=clock.now - 0.0625)
    clock.now += 1  # the worker computes while the next step is sent
    sent = clock.now - 0.5
    reports.waits()
    clock.now += 0.0078125
    reports.received(sent)
    found = reports.report(WorkerStats(rank=1))
    assert found.rank == 1
    assert found.step_broadcast is not None
    assert found.step_broadcast.sum == 0.0625 + 0.0078125
    assert sum(found.step_broadcast.counts) == 2


def test_a_stage_is_idle_while_it_waits_for_others_and_for_steps() -> None:
    clock = Clock()
    reports = WorkerReports(clock)
    for _ in range(
        2
    ):  # each step: half a second of computing, of which a quarter waits for another stage, and half a second idle
        began = reports.received(clock.now)
        clock.now += 0.5
        reports.computed(began)
        clock.now += 0.5
    clock.now -= 0.5
    assert reports.report(WorkerStats(stage=1, waited_for_stages=0.25)).stage_idle == 1 - (1.0 - 0.25) / 1.5
    assert reports.report(WorkerStats(stage=1, waited_for_stages=0.25)).stage_idle == 0
    assert reports.report(WorkerStats()).stage_idle is None
