"""The token budget of a step: limits of a step, number of tokens that each request can compute, and distribution of
decoding requests over the steps of a pipeline.
"""

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
    """Interface to the media encoders, which compute a slice of their work before a step."""

    @property
    def has_work(self) -> bool:
        """Whether a media item is waiting to be encoded."""

    def begin_slice(self, *, waits: bool) -> bool:
        """Begin a step. The encoders compute in the step if they have work and ``waits`` is false. Return whether the
        encoders compute.
        """


class StepBudget:
    """The limits of every step: the numbers of tokens to compute, of prompt tokens, and of running requests.

    A decoding request gets its next token only when the complete step is done. Therefore, while requests decode,
    prompts get at most half of ``max_prompt_batch_tokens`` per step. A step that computes a slice of an encoder
    computes no prompt tokens, because the slice takes as long as the prompt tokens would. Such steps alternate with
    steps that compute prompt tokens.

    To add another limited resource (encoder inputs, adapter slots), add a limit to this class and a condition to
    ``has_room``. The used part of a limit is always computed from the step's ``SchedulerOutput``. If a request is
    removed from the step, its tokens therefore no longer count.
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
        """Create the budget.

        Args:
            config: The scheduler's settings.
            supports_chunked_prefill: Whether the model can compute a prompt in several steps.
            max_model_len: Maximum sequence length in tokens.
            num_stages: Number of pipeline stages.
            largest_span: Maximum number of prompt tokens that must be computed together in one step.

        Raises:
            ConfigError: Prompts cannot be split over several steps, and a prompt of the maximum length does not fit
                into a step.
        """
        # Each running request needs one token in every step.
        self.max_num_running = min(config.max_num_seqs, config.step_tokens)
        self.chunked_prefill = config.enable_chunked_prefill and supports_chunked_prefill
        self.max_num_tokens = config.step_tokens
        if num_stages > 1 and self.chunked_prefill:
            # Split large steps into pieces, so that all pipeline stages soon have work.
            piece = max(
                self.max_num_tokens // (_PIECES * num_stages), _SMALLEST_PIECE, self.max_num_running, largest_span
            )
            self.max_num_tokens = min(self.max_num_tokens, piece)
        self._max_batch_tokens = config.max_prompt_batch_tokens or 0
        self._max_prompt_tokens = config.long_prefill_token_threshold if self.chunked_prefill else 0
        self._shares = bool(self._max_batch_tokens) and self.chunked_prefill
        self._prompt_tokens = self.max_num_tokens  # Maximum number of prompt tokens in the current step.
        self._prompts_wait = False  # Whether prompts got no tokens in the last step because an encoder computed in it.
        if not self.chunked_prefill and self.max_num_tokens < max_model_len:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens is {self.max_num_tokens}; without chunked prefill "
                f"it must be at least max_model_len, {max_model_len}"
            )

    def begin_step(self, encoder: EncoderTurn | None, *, decoding: bool, encoder_waits: bool = False) -> None:
        """Begin a step. ``decoding`` says whether any running request decodes. ``encoder`` is None if the model has no
        encoders. If ``encoder_waits`` is true, the step encodes no media.
        """
        sharing = self._shares and decoding
        encoding = encoder is not None and encoder.begin_slice(
            waits=encoder_waits or (sharing and (self._prompts_wait or not encoder.has_work))
        )
        self._prompts_wait = False
        self._prompt_tokens = self.max_num_tokens
        if sharing:
            self._prompt_tokens = 0 if encoding else max(self._max_batch_tokens // 2, 1)

    def has_room(self, output: SchedulerOutput, num_running: int) -> bool:
        """Return whether one more request can start in the step, with ``num_running`` requests running."""
        return num_running < self.max_num_running and output.total_num_scheduled_tokens < self.max_num_tokens

    def may_join(self, num_tokens: int, output: SchedulerOutput) -> bool:
        """Return whether a prompt with ``num_tokens`` tokens to compute may start, given the prompts already in the
        step.
        """
        others = _num_prompt_tokens(output)
        return not self._max_batch_tokens or not others or others + num_tokens <= self._max_batch_tokens

    def tokens_for(self, num_tokens: int, output: SchedulerOutput) -> int:
        """Return how many of ``num_tokens`` tokens of a prompt still fit into the step, or 0."""
        if 0 < self._max_prompt_tokens < num_tokens:
            num_tokens = self._max_prompt_tokens
        left = self.max_num_tokens - output.total_num_scheduled_tokens
        if self._prompt_tokens < self.max_num_tokens:
            left = min(left, self._prompt_tokens - _num_prompt_tokens(output))
            self._prompts_wait = self._prompts_wait or self._prompt_tokens == 0
        return max(min(num_tokens, left), 0)


def _num_prompt_tokens(output: SchedulerOutput) -> int:
    """Return the number of prompt tokens in a step. For each request, one token and its draft tokens count as decoding.
    All other tokens count as prompt tokens.
    """
    drafts = output.scheduled_spec_decode_tokens
    num_drafts = sum(map(len, drafts.values())) if drafts else 0
    return output.total_num_scheduled_tokens - len(output.num_scheduled_tokens) - num_drafts


def budget_of(context: SchedulerContext) -> StepBudget:
    """Create the step budget of a scheduler. Raises the same ConfigError as ``StepBudget``."""
    return StepBudget(
        context.config,
        supports_chunked_prefill=context.supports_chunked_prefill,
        max_model_len=context.kv_cache.max_model_len,
        num_stages=context.num_stages,
        largest_span=max((info.max_span for info in context.media), default=0),
    )


def num_tokens_due(request: Request) -> int:
    """Return the number of tokens of a running request that can be computed now, without drafts. The result is 0 while
    the request's next token is unknown, or while its grammar has not processed the last token.
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
    """Count the scheduled tokens as computed, so that the next step can be scheduled.

    Args:
        output: The scheduled step.
        requests: The requests that have not ended, by key.
        expect_tokens: Also add placeholders for the tokens that the step will sample.
    """
    for key, num_tokens in output.num_scheduled_tokens.items():
        request = requests[key]
        request.num_computed_tokens += num_tokens
        drafts = output.scheduled_spec_decode_tokens.get(key)
        num_drafts = 0
        if drafts is not None:
            request.unsettled = True  # The number of accepted draft tokens is known only after the step.
            num_drafts = len(drafts)
        if request.num_computed_tokens - num_drafts == request.num_tokens + request.num_placeholders:
            request.sampled_step = output.step
            if expect_tokens:
                request.num_placeholders += 1 + num_drafts


def count_as_not_computed(output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
    """Undo ``count_as_computed`` for the last step, which was not computed."""
    for key, count in output.num_scheduled_tokens.items():
        if (request := requests.get(key)) is not None:
            request.num_computed_tokens -= count
            request.unsettled = False
            request.spec_token_ids = []


def sampled_by_grammar(output: SchedulerOutput, requests: Mapping[str, Request]) -> list[Request]:
    """Return the requests for which the step samples a token that a grammar constrains, in batch order."""
    found: list[Request] = []
    for key in output.num_scheduled_tokens:
        request = requests.get(key)
        if request is None or request.grammar is None or output.step < request.valid_from_step:
            continue
        if request.num_computed_tokens >= request.num_tokens:
            found.append(request)
    return found


# Pipelines: each stage computes a different step. If one step contained every decoding request, the next steps would
# have nothing to compute, and the other stages would wait for the tokens of that step. So each step gets only some of
# the decoding requests, in turns. Prompts are not distributed over steps, because a chunk of a prompt need not wait for
# sampled tokens. If a step has other work, the step leaves out a request whose last token is still in the pipeline
# stages. Otherwise the first stage and all later steps would wait for that token.


class DecodeShare:
    """The running requests of one step, in the order in which the step should include them, and a limit on decoding
    requests.

    Attributes:
        requests: With one pipeline stage, the requests in the given order. With more stages, decoding requests are
            first, starting with the request that has waited longest. Requests that still compute their prompts follow,
            in the given order.
        is_limited: Whether the caller must call ``leaves_out``. True with more than one stage.
        has_early: Whether a request was left out because its last token is still in the pipeline stages.
    """

    def __init__(self, requests: list[Request], step: int, num_stages: int, *, early: bool = False) -> None:
        """Sort the requests. If ``early`` is true, requests whose last token is still in the pipeline stages are not
        left out.
        """
        self.is_limited = num_stages > 1
        self.has_early = False
        self.requests = sorted(requests, key=_turn) if self.is_limited else requests
        self._num_left = -(-len(requests) // num_stages)
        self._step = step
        self._num_stages = num_stages
        self._early = early

    def leaves_out(self, request: Request) -> bool:
        """Return whether to leave out ``request`` from the step. ``request`` has one token to compute. If the request
        is not left out, count it as a decoding request of the step.
        """
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
    """Return whether a running request decodes: all tokens of its prompt have been scheduled."""
    return request.num_computed_tokens >= request.num_prompt_tokens


def _turn(request: Request) -> tuple[bool, int]:
    return not decodes(request), request.sampled_step
