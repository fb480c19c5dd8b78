"""Whom a step has: running requests, then waiting ones; in turns while the failure of a step is looked into."""

from collections.abc import Callable

from penstock_enginecore.core.hold import Hold
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.drafting import DraftPlanner
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.scheduler.preemption import Preemption
from penstock_enginecore.core.scheduler.requests import RequestTable
from penstock_enginecore.core.scheduler.running import RunningRequests
from penstock_enginecore.core.scheduler.schedule_running import RunningScheduler
from penstock_enginecore.core.scheduler.schedule_waiting import WaitingScheduler
from penstock_enginecore.core.scheduler.trial import StepTrial


class StepScheduler:
    """Fills a step: running requests first, waiting ones only if nobody had to give up blocks."""

    def __init__(
        self,
        *,
        requests: RequestTable,
        running: RunningRequests,
        trial: StepTrial,
        preemption: Preemption,
        continue_running: RunningScheduler,
        start_waiting: WaitingScheduler,
        drafting: DraftPlanner | None = None,
    ) -> None:
        self._requests = requests
        self._running = running
        self._trial = trial
        self._preemption = preemption
        self._continue_running = continue_running
        self._start_waiting = start_waiting
        self._drafting = drafting

    def schedule(self, output: SchedulerOutput, *, begin: bool = True) -> None:
        """Add what the step computes. Without ``begin`` waiting requests wait for another one, unless there are suspects."""
        self._start_waiting.begin_step(self._requests.by_key)
        if self._trial:
            self._schedule_in_turns(output)
        else:
            start_waiting = self._start_waiting.schedule if begin else _start_none
            self._schedule_requests(output, self._running.requests.copy(), start_waiting)

    def _schedule_requests(
        self, output: SchedulerOutput, running: list[Request], start_waiting: Callable[[SchedulerOutput], None]
    ) -> None:
        had_preempted = self._preemption.num_preemptions
        if self._drafting is not None:
            self._drafting.plan(running)
        left_out = self._continue_running.schedule(output, running)
        if self._preemption.num_preemptions == had_preempted:
            start_waiting(output)
        if left_out and not output.num_scheduled_tokens:
            self._continue_running.schedule(output, running, early=True)

    def _schedule_in_turns(self, output: SchedulerOutput) -> None:
        """A step of the suspects that are tried, then one of all others."""
        self._trial.settle(self._requests.by_key)
        suspects = self._trial.subset
        suspects_turn = self._trial.next_turn()
        for of_suspects in (suspects_turn, not suspects_turn):
            running = [request for request in self._running if (request.key in suspects) is of_suspects]
            self._schedule_requests(output, running, self._start_suspects if of_suspects else self._start_others)
            if output.num_scheduled_tokens:
                return

    def _start_suspects(self, output: SchedulerOutput) -> None:
        for request in self._waiting_suspects():
            if not self._start_waiting.has_room(output) or not self._start_waiting.try_start(request, output):
                return

    def _start_others(self, output: SchedulerOutput) -> None:
        if not self._waiting_suspects():  # or they might wait for ever
            self._start_waiting.schedule(output)

    def _waiting_suspects(self) -> list[Request]:
        requests = self._requests.by_key
        return [requests[key] for key in self._trial.subset if key in requests and requests[key].hold == Hold.TRIAL]


def _start_none(output: SchedulerOutput) -> None:
    """Waiting requests wait for another step."""
