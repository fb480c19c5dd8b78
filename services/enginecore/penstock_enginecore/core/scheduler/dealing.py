"""Decodes dealt out to the steps that are on their way through the stages of a pipeline.

Each stage is at another step. A step with every request that decodes would leave nothing to compute for those behind it: the
other stages would wait for its tokens. So a step gets a part of them, in turns. Prompts are not dealt out: their pieces do not
wait for one another's tokens. For the same reason a request whose token is still on its way through the stages is left out of a
step that has others: the first stage would wait for that token, and all that is behind it too.
"""

from penstock_enginecore.core.request import Request


class DecodeDealer:
    """For ``num_stages`` stages. With one stage every request decodes in every step."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages

    def deal(self, requests: list[Request]) -> tuple[list[Request], int | None]:
        """The running ``requests`` in the order in which a step should take them, and how many of them may decode in it; None:
        all. Those that decode come first, who has waited longest before all others; prompts follow in their order.
        """
        if self._num_stages == 1:
            return requests, None
        return sorted(requests, key=_turn), -(-len(requests) // self._num_stages)

    def is_early(self, request: Request, step: int) -> bool:
        """Whether ``step`` would wait in its first stage for a token of ``request`` that another one has yet to give."""
        return request.num_placeholders > 0 and step - request.sampled_step < self._num_stages > 1


def decodes(request: Request) -> bool:
    """Whether a running request is past its prompt."""
    return request.num_computed_tokens >= request.num_prompt_tokens


def _turn(request: Request) -> tuple[bool, int]:
    return not decodes(request), request.sampled_step
