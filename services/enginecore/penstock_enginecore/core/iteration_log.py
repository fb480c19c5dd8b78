"""What an engine did lately: its steps counted since its start, and as a line of its log."""

import logging
import time
from collections.abc import Callable

from penstock_common.observability.metrics import Buckets
from penstock_common.types.outputs import SchedulerStats
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput, SchedulerOutput

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


logger = logging.getLogger(__name__)


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
