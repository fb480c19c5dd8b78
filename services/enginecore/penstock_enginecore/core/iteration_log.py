"""What an engine did lately, as a line of its log."""

import logging
import time
from collections.abc import Callable

from penstock_common.types.outputs import SchedulerStats
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)


class IterationLog:
    """A line now and then on what the steps did. ``interval`` in seconds, 0 for none.

    A line averages from the first step behind the line before it, so that it does not count time without requests. If there
    was no step for an interval, the line ends with the last step.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._since = self._until = clock()
        self._steps = self._computed = self._sampled = 0

    def begin(self, stats: Callable[[], SchedulerStats]) -> None:
        """A step begins. ``stats``: what the scheduler has now."""
        now = self._clock()
        if self._steps and self._interval and now - self._until >= self._interval:
            self._log(stats())
        if not self._steps:
            self._since = now

    def count(self, scheduled: SchedulerOutput, results: ModelRunnerOutput) -> None:
        """Add a step."""
        self._steps += 1
        self._computed += scheduled.total_num_scheduled_tokens
        self._sampled += sum(map(len, results.sampled_token_ids))

    def tick(self, stats: Callable[[], SchedulerStats]) -> None:
        """A step has ended: log if it is time, and if there were steps. ``stats``: what the scheduler has now."""
        self._until = self._clock()
        if self._interval and self._steps and self._until - self._since >= self._interval:
            self._log(stats())

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
            now_there.num_preemptions,
        )
        self._steps = self._computed = self._sampled = 0
