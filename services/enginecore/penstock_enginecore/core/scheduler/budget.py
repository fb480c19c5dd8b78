"""What one step may hold."""

from typing import Protocol

from penstock_common.errors import ConfigError
from penstock_enginecore.config import SchedulerConfig
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
