"""Which of several sequences are the best: those whose tokens the model found likeliest."""

import math
from collections.abc import Sequence

from penstock_common.types.logprobs import Logprobs
from penstock_frontend.call_types import RequestOutput


def ranked(outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
    """The best first, by the log-probability per token; equals in their order. All of them have log-probabilities."""
    return sorted(outputs, key=lambda output: mean_logprob(output.logprobs), reverse=True)


def mean_logprob(logprobs: Logprobs | None) -> float:
    """Of the chosen tokens; minus infinity without any."""
    if logprobs is None or not len(logprobs):
        return -math.inf
    return sum(logprobs.logprobs[start] for start in logprobs.offsets[:-1]) / len(logprobs)
