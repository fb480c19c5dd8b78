"""How many tokens of a request are due, and how many of its positions a step samples."""

from collections.abc import Mapping

from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.output import SchedulerOutput


def num_rows(_request: Request) -> int:
    """Positions that are sampled in a step in which the request catches up with all its tokens: the last one.

    Tokens that are drafted behind it would each be one more: such a step computes them as well (``num_tokens_due``), and brings
    up to as many tokens as it has rows (``count_as_computed``).
    """
    return 1


def num_tokens_due(request: Request) -> int:
    """Tokens of a running request that can be computed now; 0 while its next one is on its way, or its grammar lags behind."""
    if request.grammar is not None and not request.grammar.wanted():
        return 0
    placeholders = request.num_placeholders
    if placeholders and request.num_output_tokens + placeholders >= request.max_tokens:
        return 0
    return len(request.all_token_ids) + placeholders - request.num_computed_tokens


def count_as_computed(output: SchedulerOutput, requests: Mapping[str, Request], *, expect_tokens: bool) -> None:
    """What is scheduled counts as computed for the steps behind this one, and the tokens it will bring as known, where these are
    waited for (``expect_tokens``). ``requests``: the living ones by key.
    """
    for key, num_tokens in output.num_scheduled_tokens.items():
        request = requests[key]
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == request.num_tokens + request.num_placeholders:
            request.sampled_step = output.step
            if expect_tokens:
                request.num_placeholders += num_rows(request)
