"""What an ``LLM`` returns."""

from collections.abc import Sequence

import msgspec

from penstock_common.types.logprobs import Logprobs
from penstock_common.types.outputs import FinishReason


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One of the n outputs of a prompt. ``stop_reason``: the stop string or stop token id that ended it, None for other ends.

    ``logprobs``: of ``token_ids``, position by position; None unless they were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and all its outputs. ``prompt`` is the text (of a conversation: what the chat template wrote), None where
    token ids were given. ``num_cached_tokens``: of the prompt, those that were not computed again.
    """

    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text


class EmbeddingOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of a text, and how many tokens the text has."""

    embedding: list[float]
    num_prompt_tokens: int
