"""The steps that the executor has been given and whose results have not been taken in."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.core.executor import Executor
from penstock_enginecore.core.scheduler.base import Scheduler
from penstock_enginecore.core.scheduler.output import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.step_recovery import EngineDeadError, StepRecovery
from penstock_enginecore.structured_output.core.grammar_requests import GrammarIntake

DrainAborts = Callable[[], None]
"""Called between a step's sampling and its update, to end what was cancelled meanwhile."""
StepDone = Callable[[SchedulerOutput, ModelRunnerOutput], None]
"""Called with each step that has not failed, once its results are taken in."""


class StepsInFlight:
    """The oldest first: results are taken in in the order of the steps. At most ``max_steps``.

    A step may have no requests: the workers get it all the same, in its turn, and its results are empty.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        grammars: GrammarIntake,
        recovery: StepRecovery,
        *,
        max_steps: int,
        on_done: StepDone,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._grammars = grammars
        self._recovery = recovery
        self._max_steps = max_steps
        self._on_done = on_done
        self._steps: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._drafting: deque[tuple[SchedulerOutput, Future[DraftTokenIds]]] = deque()
        """Of steps in flight, and of those that are over and whose drafts have not been taken in."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        """Whether another step may be started before one is finished."""
        return len(self._steps) < self._max_steps

    @property
    def oldest_is_done(self) -> bool:
        """Whether the results of the oldest step can be taken in without waiting. There must be one."""
        return self._steps[0][1].done()

    def start(self, scheduled: SchedulerOutput, drain_aborts: DrainAborts) -> bool:
        """Hand a step to the executor. One that fails at once is recovered from, one that lost its peers is taken back. Returns
        False when it, or one before it, has failed. Raises EngineDeadError and CollectiveBroken.
        """
        try:
            self._grammars.begin_drafts(scheduled)
            self._executor.execute_model(scheduled)
            # The forward pass runs; which tokens a grammar allows depends on the tokens of the steps before.
            if self._steps and self._scheduler.constrained(scheduled) and not self.finish_all(drain_aborts):
                return False
            future = self._executor.sample_tokens(self._grammars.bitmask(scheduled))
            if scheduled.num_drafts_wanted:
                self._drafting.append((scheduled, self._executor.take_draft_token_ids()))
        except EngineDeadError:
            raise
        except CollectiveBroken:
            self._roll_back(scheduled)
            raise
        except Exception as e:
            if self.finish_all(drain_aborts):  # those before it are not concerned
                self._recovery.recover(scheduled, e)
            return False
        self._steps.append((scheduled, future))
        return True

    def finish_oldest(self, drain_aborts: DrainAborts) -> bool:
        """Wait for the oldest step and take its results in. Returns False when it failed; no step is in flight then.

        Raises EngineDeadError, and CollectiveBroken where it lost its peers: it is taken back then.
        """
        scheduled, future = self._steps.popleft()
        try:
            results = future.result()
        except CollectiveBroken:
            self._roll_back(scheduled)
            raise
        except Exception as e:
            del future  # it knows the error, which knows this frame
            behind = [later for _, later in self._steps]
            self._steps.clear()
            wait(behind)
            self._drafting.clear()
            self._recovery.recover(scheduled, e)
            return False
        drain_aborts()
        self._scheduler.update_from_output(scheduled, results)
        self._on_done(scheduled, results)
        return True

    def take_drafts(self, *, wait: bool) -> None:
        """Take in what was drafted behind the steps that are over: what is there, or all of it."""
        while self._drafting:
            scheduled, future = self._drafting[0]
            if any(step is scheduled for step, _ in self._steps) or not (wait or future.done()):
                return
            self._drafting.popleft()
            self._scheduler.update_draft_token_ids(scheduled, future.result())

    def _roll_back(self, scheduled: SchedulerOutput) -> None:
        """Nothing of the step stays, and every request keeps what was computed before it. Ranks have one step in flight."""
        self._executor.roll_back()
        self._scheduler.roll_back(scheduled)
        self._drafting.clear()

    def finish_all(self, drain_aborts: DrainAborts) -> bool:
        """Take in the results of every step. Returns False when one failed: those behind it are lost. Raises EngineDeadError."""
        while self._steps:
            if not self.finish_oldest(drain_aborts):
                return False
        self.take_drafts(wait=True)
        return True
