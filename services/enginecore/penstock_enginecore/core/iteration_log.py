"""What an engine did lately, as a line of its log."""

import logging
import time
from collections.abc import Callable

from penstock_common.types.outputs import SchedulerStats
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)


class IterationLog:
    """A line now and then on what the steps did. ``interval`` in seconds, 0 for none."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._since = time.monotonic()
        self._steps = self._computed = self._sampled = 0

    def count(self, scheduled: SchedulerOutput, results: ModelRunnerOutput) -> None:
        """Add a step."""
        self._steps += 1
        self._computed += scheduled.total_num_scheduled_tokens
        self._sampled += sum(map(len, results.sampled_token_ids))

    def tick(self, stats: Callable[[], SchedulerStats]) -> None:
        """Log if it is time, and if there were steps. ``stats``: what the scheduler has now."""
        now = time.monotonic()
        if not self._interval or now - self._since < self._interval:
            return
        seconds, self._since = now - self._since, now
        if not self._steps:
            return
        now_there = stats()
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
