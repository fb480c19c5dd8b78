"""What an ``LLM`` returns."""

import enum
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from penstock_common.types import outputs
from penstock_common.types.outputs import Logprobs, RequestError


class FinishReason(enum.StrEnum):
    """Why an output ended: each is equal to the word that vLLM and OpenAI's API have for it."""

    STOP = "stop"
    """The model's end of sequence, a stop string or a stop token."""
    LENGTH = "length"
    """``max_tokens``, or the model's longest sequence."""
    ABORT = "abort"
    """The caller ended the request."""
    ERROR = "error"
    """The engine failed."""
    REPETITION = "repetition"
    """``repetition_detection`` found that the output repeats itself."""

    @classmethod
    def of(cls, reason: outputs.FinishReason) -> Self:
        """The word for an engine's reason."""
        return cls[reason.name]


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a request that has ended, in seconds.

    ``arrival_time``: since the Unix epoch. ``first_token_latency``: from arrival to the first token of any output, None
    without a token. ``latency``: from arrival to the end. ``num_generation_tokens``: of all outputs.
    """

    arrival_time: float
    first_token_latency: float | None
    latency: float
    num_generation_tokens: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What one input came to. ``error``: why it has no result, only where the call was told to return errors."""

    error: RequestError | None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it as what JSON has: finish reasons are words, as ``stop``."""
        plain: dict[str, Any] = _plain(self)
        return plain

    def to_json(self) -> str:
        """``to_dict`` as one line of JSON."""
        return msgspec.json.encode(self.to_dict()).decode()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error.to_exception()


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One of the n outputs of a prompt. ``stop_reason``: the stop string or stop token id that ended it, None for other ends.

    ``finish_reason``: None only where a step-wise engine tells of an output that goes on. ``logprobs``: of ``token_ids``,
    position by position; None unless they were asked for. ``cumulative_logprob``: the sum of the log-probabilities of
    ``token_ids``; None unless ``logprobs`` were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    cumulative_logprob: float | None = None


class RequestOutput(Record, frozen=True, kw_only=True):
    """A prompt and all its outputs. ``prompt`` is the text (of a conversation: what the chat template wrote), None where
    token ids were given. ``num_cached_tokens``: of the prompt, those that were not computed again. ``num_accepted_draft_tokens``:
    of all outputs, those that had been guessed ahead; ``num_rejected_draft_tokens``: wrong guesses. ``request_id``: a number
    of its own in an ``LLM``, the caller's choice in a step-wise engine; ``finished``: whether a step-wise request has ended.
    ``metrics``: how long the request took, None until it has ended.
    """

    request_id: str = ""
    prompt: str | None = None
    prompt_token_ids: Sequence[int] = ()
    outputs: list[CompletionOutput] = []
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_rejected_draft_tokens: int = 0
    finished: bool = True
    metrics: RequestMetrics | None = None

    @property
    def text(self) -> str:
        """Text of the first output. Raises what the prompt failed with."""
        self._check()
        return self.outputs[0].text


class EmbeddingOutput(Record, frozen=True, kw_only=True):
    """The vector of a text, and how many tokens the text has."""

    embedding: list[float] = []
    num_prompt_tokens: int = 0


class ClassificationOutput(Record, frozen=True, kw_only=True):
    """Probabilities of the classes, in the order of the model's config, and the likeliest one's name, empty without names."""

    probs: list[float] = []
    label: str = ""
    num_prompt_tokens: int = 0


class ScoringOutput(Record, frozen=True, kw_only=True):
    """How well the second text of a pair fits the first: the model's own score where it reads pairs, else the cosine of
    vectors.
    """

    score: float | None = None
    num_prompt_tokens: int = 0


class PoolingOutput(Record, frozen=True, kw_only=True):
    """What a pooling task computes of a text. ``data``: one row for the text; for tasks of tokens one for each token."""

    data: list[list[float]] = []
    num_prompt_tokens: int = 0


class Beam(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that beam search found. ``token_ids``: of the output, a token that ended it included. ``cumulative_logprob``:
    sum of their log-probabilities; ``score`` is that over the length to the power of ``length_penalty``.
    """

    text: str
    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason


class BeamSearchOutput(Record, frozen=True, kw_only=True):
    """The likeliest sequences of a prompt that were found, best first."""

    prompt: str | None = None
    prompt_token_ids: Sequence[int] = ()
    beams: list[Beam] = []


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple) and any(isinstance(each, msgspec.Struct) for each in value[:1]):
        return [_plain(each) for each in value]
    return msgspec.to_builtins(value)
