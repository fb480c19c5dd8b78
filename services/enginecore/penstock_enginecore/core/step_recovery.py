"""How an engine goes on after a step that failed."""

import logging
from collections.abc import Callable

from penstock_common.errors import PenstockError
from penstock_common.observability.incidents import STEP_FAILED
from penstock_common.types.outputs import SchedulerStats
from penstock_enginecore.core.executor import Executor
from penstock_enginecore.core.request_log import log_incident
from penstock_enginecore.core.scheduler.base import Scheduler
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.step_summary import summarize

logger = logging.getLogger(__name__)

MAX_UNEXPLAINED_FAILURES = 3
"""So often in a row a step may fail although each of its requests passes alone; then the engine ends."""

KeepFailedStep = Callable[[SchedulerOutput, Exception, SchedulerStats], None]
"""Keeps what a failed step was told to do, why it failed, and the load at that time, for whoever looks into it later."""


class EngineDeadError(PenstockError):
    """A step failed in a way the engine cannot go on from. The message is for operators and frontends."""


class StepRecovery:
    """Has every request computed again after a failed step, and finds the one that the step failed of.

    ``keep``: gets the steps that a request failed alone in, and the one that ended the engine.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, keep: KeepFailedStep) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._keep = keep

    def recover(self, scheduled: SchedulerOutput, error: Exception) -> None:
        """Go on after a failed step, the oldest in flight, without the request that failed it. No step may run behind it.

        Every request is computed again, and the scheduler tries those of the step in ever smaller groups until one fails alone:
        that one ends. Raises EngineDeadError when a step that computes nothing failed, when the executor cannot compute any more,
        and when a step fails again and again of no single request.
        """
        if not (scheduled.num_scheduled_tokens or scheduled.encoder_budget or scheduled.encoder_starts):
            raise self._dead(scheduled, error) from error
        try:
            self._executor.recover()
        except Exception as e:
            logger.warning("the executor does not compute any more: %s: %s", type(e).__name__, e)
            raise self._dead(scheduled, error) from error
        stats = self._scheduler.stats()
        culprit = self._scheduler.step_failed(scheduled)
        if culprit is not None:
            self._keep(scheduled, error, stats)
            doing = "a step with this request alone"
            self._scheduler.fail(culprit, log_incident(culprit, error, doing=doing, reason=STEP_FAILED))
        elif self._scheduler.num_unexplained_failures >= MAX_UNEXPLAINED_FAILURES:
            raise self._dead(scheduled, error) from error
        else:
            num_requests, name = len(scheduled.num_scheduled_tokens), type(error).__name__
            logger.warning("a step of %d requests failed (%s); they are tried in smaller groups", num_requests, name)

    def _dead(self, scheduled: SchedulerOutput, error: Exception) -> EngineDeadError:
        logger.error("the step failed; scheduler output, without its tokens: %s", summarize(scheduled), exc_info=error)
        self._keep(scheduled, error, self._scheduler.stats())
        return EngineDeadError(f"a step failed: {type(error).__name__}: {error}")
