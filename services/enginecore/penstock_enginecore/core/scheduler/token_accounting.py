"""How many tokens of a request are due, and what counts as computed once they are scheduled."""

from collections.abc import Mapping

from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.output import SchedulerOutput


def num_tokens_due(request: Request) -> int:
    """Tokens of a running request that can be computed now, without drafts; 0 while its next one is on its way, or its
    grammar lags behind.
    """
    if request.unsettled:
        return 0
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
        drafts = output.scheduled_spec_decode_tokens.get(key)
        num_drafts = 0
        if drafts is not None:
            request.unsettled = True  # how many of them hold is known when the step is over
            num_drafts = len(drafts)
        if request.num_computed_tokens - num_drafts == request.num_tokens + request.num_placeholders:
            request.sampled_step = output.step
            if expect_tokens:
                request.num_placeholders += 1 + num_drafts


def count_as_not_computed(output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
    """A step that ``count_as_computed`` has seen, the last one, was not computed, and nothing of it stays."""
    for key, count in output.num_scheduled_tokens.items():
        if (request := requests.get(key)) is not None:
            request.num_computed_tokens -= count
            request.unsettled = False
            request.spec_token_ids = []


def sampled_by_grammar(output: SchedulerOutput, requests: Mapping[str, Request]) -> list[Request]:
    """Those of the ``requests`` that get a token in the step which a grammar decides on, in batch order."""
    found: list[Request] = []
    for key in output.num_scheduled_tokens:
        request = requests.get(key)
        if request is None or request.grammar is None or output.step < request.valid_from_step:
            continue
        if request.num_computed_tokens >= request.num_tokens:
            found.append(request)
    return found
