"""What the steps of an engine did, counted since its start."""

from penstock_common.observability.histogram import Buckets
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
