"""Spreads decodes over the steps that are on their way through the stages of a pipeline.

Each stage is at another step. A step with every request that decodes would leave nothing to compute for the steps behind it:
the other stages would wait for its tokens. So a step gets a part of the decodes, in turns. Prompts are not spread: their pieces
do not wait for one another's tokens. For the same reason a request whose token is still on its way through the stages is left
out of a step that has other work: the first stage would wait for that token, and all steps behind it too.
"""

from penstock_enginecore.core.request import Request


class DecodeShare:
    """The running requests of one step, in the order in which the step should take them, and how many of them may decode.

    Attributes:
        requests: With one stage the requests as they were given. With more, those that decode first, the one that has waited
            longest before all others; prompts follow in their order.
        is_limited: Whether ``leaves_out`` must be asked, which is so with more than one stage.
        has_early: Whether a request was left out because its last token is still on its way.
    """

    def __init__(self, requests: list[Request], step: int, num_stages: int, *, early: bool = False) -> None:
        """With ``early``, requests whose last token is still on its way are not left out."""
        self.is_limited = num_stages > 1
        self.has_early = False
        self.requests = sorted(requests, key=_turn) if self.is_limited else requests
        self._num_left = -(-len(requests) // num_stages)
        self._step = step
        self._num_stages = num_stages
        self._early = early

    def leaves_out(self, request: Request) -> bool:
        """Return whether the step goes without ``request``, which has one token to compute; otherwise count it."""
        if not decodes(request):
            return False
        if self._num_left == 0:
            return True
        if not self._early and request.num_placeholders > 0 and self._step - request.sampled_step < self._num_stages:
            self.has_early = True
            return True
        self._num_left -= 1
        return False


def decodes(request: Request) -> bool:
    """Return whether a running request is past its prompt."""
    return request.num_computed_tokens >= request.num_prompt_tokens


def _turn(request: Request) -> tuple[bool, int]:
    return not decodes(request), request.sampled_step
