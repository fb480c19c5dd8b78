"""Results of ``LLM`` methods."""

import enum
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from penstock_common.types import outputs
from penstock_common.types.outputs import Logprobs, RequestError


class FinishReason(enum.StrEnum):
    """Reason why an output ended. Each value equals the word of vLLM and OpenAI's API."""

    STOP = "stop"
    """The output ended with an end-of-sequence token, a stop string or a stop token."""
    LENGTH = "length"
    """The output reached ``max_tokens`` or the model's maximum sequence length."""
    ABORT = "abort"
    """The caller aborted the request."""
    ERROR = "error"
    """The engine failed."""
    REPETITION = "repetition"
    """The output repeated itself (``repetition_detection``)."""

    @classmethod
    def of(cls, reason: outputs.FinishReason) -> Self:
        """Convert an engine's finish reason."""
        return cls[reason.name]


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a finished request, in seconds.

    Attributes:
        arrival_time: Arrival, in seconds since the Unix epoch.
        first_token_latency: Time from arrival to the first token of any output; None if there was no token.
        latency: Time from arrival to the end.
        num_generation_tokens: Number of tokens of all outputs.
    """

    arrival_time: float
    first_token_latency: float | None
    latency: float
    num_generation_tokens: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one input. ``error`` is the reason of a failure; set only if the call returns errors."""

    error: RequestError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-compatible data. Finish reasons are words such as ``stop``."""
        plain: dict[str, Any] = _plain(self)
        return plain

    def to_json(self) -> str:
        """Return ``to_dict`` as one line of JSON."""
        return msgspec.json.encode(self.to_dict()).decode()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error.to_exception()


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One of the n outputs of a prompt.

    Attributes:
        index: Index among the outputs, from 0.
        text: Generated text.
        token_ids: Generated token ids.
        finish_reason: Reason of the end; None for an unfinished output of a step-wise engine.
        stop_reason: Stop string or stop token id that ended the output; None for other ends.
        logprobs: Log-probabilities by position of ``token_ids``; None unless requested.
        cumulative_logprob: Sum of the log-probabilities of ``token_ids``; None unless ``logprobs`` were requested.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    cumulative_logprob: float | None = None


class RequestOutput(Record, frozen=True, kw_only=True):
    """A prompt and all its outputs.

    Attributes:
        request_id: Number chosen by the ``LLM``, or the caller's id in a step-wise engine.
        prompt: Text of the prompt, or of the rendered conversation; None if token ids were given.
        prompt_token_ids: Token ids of the prompt.
        outputs: Outputs of the prompt.
        prompt_logprobs: Log-probabilities of the prompt tokens; None unless requested.
        num_cached_tokens: Number of prompt tokens found in the cache.
        num_accepted_draft_tokens: Number of accepted draft tokens in all outputs.
        num_rejected_draft_tokens: Number of rejected draft tokens.
        finished: Whether the request has ended.
        metrics: Times of the request; None until it has ended.
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
        """Text of the first output. Raises the error of the prompt if it failed."""
        self._check()
        return self.outputs[0].text


class EmbeddingOutput(Record, frozen=True, kw_only=True):
    """Embedding of a text, and its number of tokens."""

    embedding: list[float] = []
    num_prompt_tokens: int = 0


class ClassificationOutput(Record, frozen=True, kw_only=True):
    """Class probabilities in the order of the model's config, and the most likely label.

    The label is empty if classes have no names.
    """

    probs: list[float] = []
    label: str = ""
    num_prompt_tokens: int = 0


class ScoringOutput(Record, frozen=True, kw_only=True):
    """Score of a pair of texts: the model's own score for cross-encoders, else the cosine similarity of embeddings."""

    score: float | None = None
    num_prompt_tokens: int = 0


class PoolingOutput(Record, frozen=True, kw_only=True):
    """Result of a pooling task. ``data`` has one row for the text, or one row per token for token tasks."""

    data: list[list[float]] = []
    num_prompt_tokens: int = 0


class Beam(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence found by beam search.

    Attributes:
        text: Text of the output.
        token_ids: Token ids of the output, including a final end-of-sequence token.
        cumulative_logprob: Sum of the log-probabilities.
        score: The sum of the log-probabilities, divided by the length to the power of ``length_penalty``.
        finish_reason: Reason of the end.
    """

    text: str
    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason


class BeamSearchOutput(Record, frozen=True, kw_only=True):
    """Most likely sequences found for a prompt, best first."""

    prompt: str | None = None
    prompt_token_ids: Sequence[int] = ()
    beams: list[Beam] = []


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple) and any(isinstance(each, msgspec.Struct) for each in value[:1]):
        return [_plain(each) for each in value]
    return msgspec.to_builtins(value)
