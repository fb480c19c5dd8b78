"""The steps that the executor has been given, and how an engine goes on after one that failed."""

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
    """Ids, counts and blocks of a scheduler output; no token of any user, unless ``include_tokens`` asks for it."""
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


# Recovery after a step that failed.

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


# What an engine did lately: its steps counted since its start, and as a line of its log.

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper ends of the buckets of tokens per step; vLLM's."""


class StepCounts:
    """Counted on the busy loop's thread; any thread may read."""

    def __init__(self) -> None:
        self.tokens = Buckets(STEP_TOKENS)
        """Steps by the tokens they computed."""
        self.num_nan_logits = 0
        """Logits of sampled rows that were NaN."""

    def count(self, scheduled: SchedulerOutput, results: ModelRunnerOutput) -> None:
        """Add a step that is over."""
        if scheduled.total_num_scheduled_tokens:
            self.tokens.observe(scheduled.total_num_scheduled_tokens)
        if results.num_nans_in_logits:
            self.num_nan_logits += sum(results.num_nans_in_logits.values())


class IterationLog:
    """Logs what the steps did, one line per interval in which there were steps. ``interval`` in seconds, 0 for none.

    A line averages from the first step after the line before it, to the last step. Its preemptions are those since the line
    before it. After the last step of a burst the caller waits ``seconds_to_line``, then calls ``tick_idle``: so the line appears
    soon after the steps, not when the next burst begins.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._since = self._until = clock()
        self._steps = self._computed = self._sampled = self._preemptions = 0

    def begin(self) -> None:
        """Note that a step begins."""
        if not self._steps:
            self._since = self._clock()

    def count(self, scheduled: SchedulerOutput, results: ModelRunnerOutput) -> None:
        """Add a step."""
        self._steps += 1
        self._computed += scheduled.total_num_scheduled_tokens
        self._sampled += sum(map(len, results.sampled_token_ids))

    def tick(self, stats: Callable[[], SchedulerStats]) -> None:
        """Note that a step has ended, and log if it is time. ``stats``: returns the scheduler's state."""
        self._until = self._clock()
        self.tick_idle(stats)

    def tick_idle(self, stats: Callable[[], SchedulerStats]) -> None:
        """Log if there were steps and it is time. ``stats``: returns the scheduler's state."""
        if (left := self.seconds_to_line) is not None and left <= 0:
            self._log(stats())

    @property
    def seconds_to_line(self) -> float | None:
        """Seconds until the next line is due, or None if no step is unlogged."""
        return self._since + self._interval - self._clock() if self._interval and self._steps else None

    def _log(self, now_there: SchedulerStats) -> None:
        seconds = max(self._until - self._since, 1e-6)
        logger.info(
            "%.1f steps/s, %.0f tokens/s computed, %.0f tokens/s produced, %d running, %d waiting (%d held), "
            "KV cache %.1f%% used, prefix hits %.1f%%, %d preemptions",
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
