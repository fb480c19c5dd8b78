"""Steps that the executor is running, and recovery after a failed step."""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from penstock_common.errors import PenstockError
from penstock_common.observability.logging import STEP_FAILED
from penstock_common.observability.metrics import Buckets
from penstock_common.types.outputs import SchedulerStats
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.core.executor import Executor
from penstock_enginecore.core.request import log_incident
from penstock_enginecore.core.scheduler.base import Scheduler
from penstock_enginecore.core.scheduler.output import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.structured_output.core.grammar_requests import GrammarIntake


def summarize(scheduled: SchedulerOutput, *, include_tokens: bool = False) -> dict[str, Any]:
    """Return request ids, token counts and block ids of a scheduler output. Token ids of requests are left out unless
    ``include_tokens`` is true.
    """
    new = [
        {
            "id": request.request_id,
            "num_tokens": len(request.token_ids),
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_computed_tokens": request.num_computed_tokens,
            "block_ids": request.block_ids,
        }
        | ({"token_ids": request.token_ids} if include_tokens else {})
        for request in scheduled.new_requests
    ]
    cached = scheduled.cached_requests
    return {
        "step": scheduled.step,
        "new": new,
        "known": [
            {"id": key, "num_computed_tokens": num_computed, "new_block_ids": blocks}
            for key, num_computed, blocks in zip(
                cached.request_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            )
        ],
        "num_scheduled_tokens": scheduled.num_scheduled_tokens,
        "finished": scheduled.finished_request_ids,
        "preempted": scheduled.preempted_request_ids,
        "encoder_starts": {start.identifier: start.num_embeds for start in scheduled.encoder_starts},
        "encoder_budget": scheduled.encoder_budget,
        "freed": scheduled.freed_identifiers,
    }


# Recovery after a failed step.

logger = logging.getLogger(__name__)

MAX_UNEXPLAINED_FAILURES = 3
"""Number of consecutive unexplained failures at which the engine shuts down. A failure is unexplained if each request
of the failed step succeeds alone.
"""

KeepFailedStep = Callable[[SchedulerOutput, Exception, SchedulerStats], None]
"""Function that saves a failed step for debugging. The arguments are the scheduler output, the error, and the
scheduler's statistics at that time.
"""


class EngineDeadError(PenstockError):
    """Raised if a step failed and the engine cannot recover. The message is for operators and frontends."""


class StepRecovery:
    """Recomputes every request after a failed step, and finds the request that caused the failure.

    ``keep`` is called with each step in which a request failed alone, and with the step after which the engine shuts
    down.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, keep: KeepFailedStep) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._keep = keep

    def recover(self, scheduled: SchedulerOutput, error: Exception) -> None:
        """Recover from a failed step, which must be the oldest step in flight. No later step may be running.

        Every request is recomputed. The scheduler retries the requests of the failed step in ever smaller groups until
        a request fails alone. That request ends with an error.

        Raises:
            EngineDeadError: The step computed nothing, the executor no longer works, or steps fail repeatedly although
                each request succeeds alone.
        """
        if not (scheduled.num_scheduled_tokens or scheduled.encoder_budget or scheduled.encoder_starts):
            raise self._dead(scheduled, error) from error
        try:
            self._executor.recover()
        except Exception as e:
            logger.warning(
                "the executor cannot recover from a failed step, so the engine stops: %s: %s", type(e).__name__, e
            )
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
            logger.warning(
                "a step with %d requests failed (%s); the engine retries these requests in smaller groups, to find the "
                "request that makes steps fail",
                num_requests,
                name,
            )

    def _dead(self, scheduled: SchedulerOutput, error: Exception) -> EngineDeadError:
        logger.error(
            "a step failed, and the engine stops; scheduler output of the failed step, without token ids: %s",
            summarize(scheduled),
            exc_info=error,
        )
        self._keep(scheduled, error, self._scheduler.stats())
        return EngineDeadError(f"a step failed: {type(error).__name__}: {error}")


DrainAborts = Callable[[], None]
"""Callback that ends requests that were cancelled while a step ran. It is called after the step has sampled and before
its results are processed.
"""
StepDone = Callable[[SchedulerOutput, ModelRunnerOutput], None]
"""Callback that gets each successful step once its results are processed."""


class StepsInFlight:
    """The steps that the executor has started and whose results have not been processed, oldest first. At most
    ``max_steps`` steps are in flight. Results are processed in step order.

    A step may have no requests. The workers still get a step without requests in its turn, and the step's results are
    empty.
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
        """Futures of the draft tokens of steps in flight, and of finished steps whose draft tokens have not been
        processed.
        """

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        """Whether another step may be started before a step in flight finishes."""
        return len(self._steps) < self._max_steps

    @property
    def oldest_is_done(self) -> bool:
        """Whether the oldest step's results are ready. There must be a step."""
        return self._steps[0][1].done()

    def start(self, scheduled: SchedulerOutput, drain_aborts: DrainAborts) -> bool:
        """Hand a step to the executor. Return False if this step or an earlier step has failed.

        If the executor cannot start the step, the engine recovers. If the connection to other ranks is lost during the
        step, the step is rolled back. Raises EngineDeadError and CollectiveBroken.
        """
        try:
            self._grammars.begin_drafts(scheduled)
            self._executor.execute_model(scheduled)
            # While the forward pass runs, process the results of earlier steps, because the tokens that a grammar
            # allows depend on the tokens of these steps.
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
            if self.finish_all(drain_aborts):  # Finish the earlier steps, because the failure does not affect them.
                self._recovery.recover(scheduled, e)
            return False
        self._steps.append((scheduled, future))
        return True

    def finish_oldest(self, drain_aborts: DrainAborts) -> bool:
        """Wait for the oldest step and process its results. If the step failed, recover from the failure and return
        False. In that case, no step is in flight any more.

        Raises EngineDeadError if the engine cannot recover from the failure. Raises CollectiveBroken if the connection
        to other ranks was lost during the step. In that case, the step is rolled back.
        """
        scheduled, future = self._steps.popleft()
        try:
            results = future.result()
        except CollectiveBroken:
            self._roll_back(scheduled)
            raise
        except Exception as e:
            # Break a reference cycle: the future refers to the error, and the error's traceback refers to this stack
            # frame.
            del future
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
        """Process the draft tokens of finished steps. If ``wait`` is true, wait until the drafter is done. Otherwise
        process only draft tokens that are ready.
        """
        while self._drafting:
            scheduled, future = self._drafting[0]
            if any(step is scheduled for step, _ in self._steps) or not (wait or future.done()):
                return
            self._drafting.popleft()
            self._scheduler.update_draft_token_ids(scheduled, future.result())

    def _roll_back(self, scheduled: SchedulerOutput) -> None:
        """Undo a step in the executor and in the scheduler. Requests keep the tokens of earlier steps. The engine must
        have no other step in flight.
        """
        self._executor.roll_back()
        self._scheduler.roll_back(scheduled)
        self._drafting.clear()

    def finish_all(self, drain_aborts: DrainAborts) -> bool:
        """Process the results of all steps in flight. If a step failed, drop the results of later steps and return
        False. Raises EngineDeadError if the engine cannot recover from the failure.
        """
        while self._steps:
            if not self.finish_oldest(drain_aborts):
                return False
        self.take_drafts(wait=True)
        return True


# Statistics of steps: counts since the engine's start, and periodic log lines.

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets in the histogram of tokens per step. The bounds are the same as in vLLM."""


class StepCounts:
    """Counts of steps and of NaN logits since the engine's start. The busy loop's thread updates the counts, and any
    thread may read them.
    """

    def __init__(self) -> None:
        self.tokens = Buckets(STEP_TOKENS)
        """Histogram of the number of tokens that a step computes."""
        self.num_nan_logits = 0
        """Number of NaN or infinite logits at positions where tokens were sampled."""

    def count(self, scheduled: SchedulerOutput, results: ModelRunnerOutput) -> None:
        """Count a finished step, its tokens and its NaN logits."""
        if scheduled.total_num_scheduled_tokens:
            self.tokens.observe(scheduled.total_num_scheduled_tokens)
        if results.num_nans_in_logits:
            self.num_nan_logits += sum(results.num_nans_in_logits.values())


class IterationLog:
    """Logs statistics of steps, one line per interval in which steps ran. ``interval`` is in seconds. An interval of 0
    disables the log.

    The averages in a line cover the time from the first step after the previous line to the last step before this line.
    Preemptions are counted since the previous line. After the last step before an idle period, the caller waits
    ``seconds_to_line`` and then calls ``tick_idle``. The line therefore appears soon after that step, and not when the
    next request arrives.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._since = self._until = clock()
        self._steps = self._computed = self._sampled = self._preemptions = 0

    def begin(self) -> None:
        """Record the beginning of a step."""
        if not self._steps:
            self._since = self._clock()

    def count(self, scheduled: SchedulerOutput, results: ModelRunnerOutput) -> None:
        """Count a step and its tokens for the next log line."""
        self._steps += 1
        self._computed += scheduled.total_num_scheduled_tokens
        self._sampled += sum(map(len, results.sampled_token_ids))

    def tick(self, stats: Callable[[], SchedulerStats]) -> None:
        """Record the end of a step, and write the log line if it is due. ``stats`` returns the scheduler's
        statistics.
        """
        self._until = self._clock()
        self.tick_idle(stats)

    def tick_idle(self, stats: Callable[[], SchedulerStats]) -> None:
        """Write the log line if it is due, without a step. ``stats`` returns the scheduler's statistics."""
        if (left := self.seconds_to_line) is not None and left <= 0:
            self._log(stats())

    @property
    def seconds_to_line(self) -> float | None:
        """Seconds until the next log line is due, or None if all steps have been logged."""
        return self._since + self._interval - self._clock() if self._interval and self._steps else None

    def _log(self, now_there: SchedulerStats) -> None:
        seconds = max(self._until - self._since, 1e-6)
        logger.info(
            "%.1f steps/s, %.0f tokens/s computed, %.0f tokens/s generated, %d requests running, %d requests waiting "
            "(%d of them on hold, for example until a grammar or KV blocks are ready), "
            "KV cache %.1f%% used, prefix cache hits %.1f%%, %d preemptions",
            self._steps / seconds,
            self._computed / seconds,
            self._sampled / seconds,
            now_there.num_running_reqs,
            now_there.num_waiting_reqs,
            now_there.num_skipped_reqs,
            100 * now_there.kv_cache_usage,
            100 * now_there.prefix_cache_hits / max(now_there.prefix_cache_queries, 1),
            now_there.num_preemptions - self._preemptions,
        )
        self._preemptions = now_there.num_preemptions
        self._steps = self._computed = self._sampled = 0
