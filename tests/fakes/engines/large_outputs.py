"""Executors with outputs of configurable size."""

from typing import Any

import msgspec

from penstock_common.types.outputs import Logprobs
from penstock_common.types.request import PoolingTask, Vectors
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from tests.fakes.engines.fake_executor import FakeExecutor


def pooled_bytes(size: int) -> bytes:
    """Return the expected bytes of a pooled result of this size. Their period is a prime, so every displacement is
    detected.
    """
    return (bytes(range(251)) * (size // 251 + 1))[:size]


class PoolingExecutor(FakeExecutor):
    """Executor that returns ``width`` numbers per token of each request."""

    def __init__(self, width: int, **options: Any) -> None:
        pooling = PoolingLimits(tasks=frozenset({PoolingTask.TOKEN_EMBED}), embedding_size=width)
        super().__init__(**{"check_kv": False, "pooling": pooling, **options})
        self.width = width

    def _sample(self, step: SchedulerOutput, grammar: Any) -> ModelRunnerOutput:
        pooled = {}
        for key in step.num_scheduled_tokens:
            state = self._states[key]
            if state.num_computed_tokens == state.num_prompt_tokens:
                size = state.num_prompt_tokens * self.width * 4
                pooled[key] = Vectors((state.num_prompt_tokens, self.width), pooled_bytes(size))
        return msgspec.structs.replace(super()._sample(step, grammar), pooled=pooled)


class ScoringExecutor(FakeExecutor):
    """Executor that returns as many prompt log-probabilities per position as a request asks for."""

    def _sample(self, step: SchedulerOutput, grammar: Any) -> ModelRunnerOutput:
        scored = {}
        for key, count in step.num_scheduled_tokens.items():
            state = self._states[key]
            if (likeliest := state.params.prompt_logprobs) is None:
                continue
            logprobs = scored[key] = Logprobs()
            for position in range(state.num_computed_tokens - count, state.num_computed_tokens):
                if position + 1 < state.num_prompt_tokens:
                    token = state.token_ids[position + 1]
                    entries = [token, *range(likeliest)]
                    logprobs.add(entries, [-1.0] * len(entries), [entry + 1 for entry in entries])
        return msgspec.structs.replace(super()._sample(step, grammar), prompt_logprobs=scored)
