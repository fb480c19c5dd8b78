"""The token budget of a step: what it may hold, what each request is due, how pipelines spread decodes over steps."""

from collections.abc import Mapping
from typing import Protocol

from penstock_common.errors import ConfigError
from penstock_enginecore.config import SchedulerConfig
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.base import SchedulerContext
from penstock_enginecore.core.scheduler.output import SchedulerOutput

_PIECES = 4
_SMALLEST_PIECE = 256


class EncoderTurn(Protocol):
    """What encodes media between the steps."""

    @property
    def has_work(self) -> bool:
        """Whether an item is to be encoded."""

    def begin_slice(self, *, waits: bool) -> bool:
        """Begin a step, in which towers compute unless they are to wait. Return whether they compute so far."""


class StepBudget:
    """The limits of every step: tokens to compute, of prompts and in all, and running requests.

    Streams wait for the whole of a step. So beside requests that decode, prompts have half of ``max_prompt_batch_tokens`` of it,
    and none of one that computes a slice of a tower, which takes as long: the two take turns.

    Whatever else a step has only so much of (inputs of an encoder, slots for adapters) is a limit here and a condition of
    ``has_room``. What is spent stands in the step's output alone, so that a request which is taken out again gives its share
    back.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        supports_chunked_prefill: bool,
        max_model_len: int,
        num_stages: int = 1,
        largest_span: int = 0,
    ) -> None:
        """``max_model_len`` in tokens. ``largest_span``: tokens of a prompt that are computed together, at most. Raises
        ConfigError when a prompt that must be computed at once may be too long for it.
        """
        # Each running request needs a token of every step.
        self.max_num_running = min(config.max_num_seqs, config.step_tokens)
        self.chunked_prefill = config.enable_chunked_prefill and supports_chunked_prefill
        self.max_num_tokens = config.step_tokens
        if num_stages > 1 and self.chunked_prefill:
            # What fills a step comes to the stages in pieces, so that all of them soon compute some of it.
            piece = max(
                self.max_num_tokens // (_PIECES * num_stages), _SMALLEST_PIECE, self.max_num_running, largest_span
            )
            self.max_num_tokens = min(self.max_num_tokens, piece)
        self._max_batch_tokens = config.max_prompt_batch_tokens or 0
        self._max_prompt_tokens = config.long_prefill_token_threshold if self.chunked_prefill else 0
        self._shares = bool(self._max_batch_tokens) and self.chunked_prefill
        self._prompt_tokens = self.max_num_tokens  # of the step
        self._prompts_wait = False  # had none of the last step, in which a tower computed
        if not self.chunked_prefill and self.max_num_tokens < max_model_len:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens is {self.max_num_tokens}; without chunked prefill "
                f"it must be at least max_model_len, {max_model_len}"
            )

    def begin_step(self, encoder: EncoderTurn | None, *, decoding: bool) -> None:
        """Of a step in which a request decodes, or none. ``encoder``: of a model with towers."""
        sharing = self._shares and decoding
        encoding = encoder is not None and encoder.begin_slice(
            waits=sharing and (self._prompts_wait or not encoder.has_work)
        )
        self._prompts_wait = False
        self._prompt_tokens = self.max_num_tokens
        if sharing:
            self._prompt_tokens = 0 if encoding else max(self._max_batch_tokens // 2, 1)

    def has_room(self, output: SchedulerOutput, num_running: int) -> bool:
        """Whether one more request can start in the step, beside ``num_running`` that run."""
        return num_running < self.max_num_running and output.total_num_scheduled_tokens < self.max_num_tokens

    def may_join(self, num_tokens: int, output: SchedulerOutput) -> bool:
        """Whether a prompt with ``num_tokens`` to compute may begin beside those that the step has already."""
        others = _num_prompt_tokens(output)
        return not self._max_batch_tokens or not others or others + num_tokens <= self._max_batch_tokens

    def tokens_for(self, num_tokens: int, output: SchedulerOutput) -> int:
        """How many of the ``num_tokens`` due tokens of a prompt the step takes, of what is left; 0: none."""
        if 0 < self._max_prompt_tokens < num_tokens:
            num_tokens = self._max_prompt_tokens
        left = self.max_num_tokens - output.total_num_scheduled_tokens
        if self._prompt_tokens < self.max_num_tokens:
            left = min(left, self._prompt_tokens - _num_prompt_tokens(output))
            self._prompts_wait = self._prompts_wait or self._prompt_tokens == 0
        return max(min(num_tokens, left), 0)


def _num_prompt_tokens(output: SchedulerOutput) -> int:
    """Of a step: every request has a token of it, some have drafts, and prompts have more."""
    drafts = output.scheduled_spec_decode_tokens
    num_drafts = sum(map(len, drafts.values())) if drafts else 0
    return output.total_num_scheduled_tokens - len(output.num_scheduled_tokens) - num_drafts


def budget_of(context: SchedulerContext) -> StepBudget:
    """Of the steps of a scheduler. Raises as StepBudget does."""
    return StepBudget(
        context.config,
        supports_chunked_prefill=context.supports_chunked_prefill,
        max_model_len=context.kv_cache.max_model_len,
        num_stages=context.num_stages,
        largest_span=max((info.max_tokens for info in context.media if info.attends_both_ways), default=0),
    )


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


# Pipelines. Each stage is at another step. A step with every request that decodes would leave nothing to compute for the steps
# behind it: the other stages would wait for its tokens. So a step gets a part of the decodes, in turns. Prompts are not spread:
# their pieces do not wait for one another's tokens. For the same reason a request whose token is still on its way through the
# stages is left out of a step that has other work: the first stage would wait for that token, and all steps behind it too.


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
