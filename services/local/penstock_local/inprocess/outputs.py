"""What an ``LLM`` returns."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock_common.types.logprobs import Logprobs
from penstock_common.types.outputs import FinishReason, RequestError


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
    position by position; None unless they were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None


class RequestOutput(Record, frozen=True, kw_only=True):
    """A prompt and all its outputs. ``prompt`` is the text (of a conversation: what the chat template wrote), None where
    token ids were given. ``num_cached_tokens``: of the prompt, those that were not computed again. ``num_accepted_draft_tokens``:
    of all outputs, those that had been guessed ahead; ``num_rejected_draft_tokens``: wrong guesses. ``request_id`` and
    ``finished`` tell a step-wise engine's requests and their ends.
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
    if isinstance(value, FinishReason):
        return value.name.lower()
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple) and any(isinstance(each, msgspec.Struct) for each in value[:1]):
        return [_plain(each) for each in value]
    return msgspec.to_builtins(value)
