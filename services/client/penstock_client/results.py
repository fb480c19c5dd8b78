"""Results: answers as plain Python."""

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.common.v1.finish_pb2 import FINISH_REASON_UNSPECIFIED, FinishReason, StopReason
from penstock.common.v1.logprobs_pb2 import Logprobs
from penstock.common.v1.stats_pb2 import Usage as UsageMessage
from penstock.common.v1.tensor_pb2 import Tensor
from penstock.inference.v1 import messages_pb2 as pb

_FINISH_PREFIX = "FINISH_REASON_"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. ``cached_tokens`` are those of the prompt that were cached, ``accepted_draft_tokens`` those of the
    output that were guessed ahead, ``rejected_draft_tokens`` wrong guesses, which are none of it, ``media_tokens`` those of the
    prompt at which media stand, by modality.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    media_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token at a position: its natural log-probability, its rank from 1, its text (empty without ``detokenize``)."""

    token_id: int
    logprob: float
    rank: int
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A piece of one sequence, or all of it; ``index`` is which of the n."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """``stop``, ``length``, ``abort`` or ``repetition``; None before the last piece."""
    stop_reason: str | int | None
    """The stop string or token id that was met; None at the model's own end of text."""
    logprobs: list[list[Logprob]] | None
    """One list for each of ``token_ids``, the token first, then the likeliest; None unless they were asked for."""
    prompt_logprobs: list[list[Logprob]] | None
    """The same of the prompt from its second token on, on the first piece."""
    usage: Usage | None
    """None before the last piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOutput:
    """A piece of one answer, or all of it; fields of Output mean the same here."""

    request_id: str
    index: int
    content: str
    reasoning: str
    tool_calls: list[pb.ToolCall]
    """In a stream a call may come in pieces with the same ``id``, of which the first has the name."""
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[list[Logprob]] | None
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """``vectors``: one for each input, in order, of as many floats as the model has dimensions, or were asked for."""

    vectors: list[list[float]]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Classes:
    """``probabilities`` in the order of the model's labels; ``label`` is the likeliest, empty where the model names none."""

    probabilities: list[float]
    label: str


@dataclass(frozen=True, slots=True)
class Scores:
    """``scores``: one for each document, in order: the model's score of the pair, or the cosine, in [-1, 1]."""

    scores: list[float]
    usage: Usage


def read_output(message: pb.GenerateResponse) -> Output:
    """A message of Generate."""
    return Output(
        request_id=message.request_id,
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        finish_reason=_finish(message.finish_reason),
        stop_reason=_stop(message.stop_reason),
        logprobs=_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        prompt_logprobs=_logprobs(message.prompt_logprobs) if message.HasField("prompt_logprobs") else None,
        usage=read_usage(message.usage) if message.finish_reason else None,
    )


def read_chat_output(message: pb.ChatResponse) -> ChatOutput:
    """A message of Chat."""
    return ChatOutput(
        request_id=message.request_id,
        index=message.index,
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=list(message.tool_calls),
        token_ids=list(message.token_ids),
        finish_reason=_finish(message.finish_reason),
        stop_reason=_stop(message.stop_reason),
        logprobs=_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        usage=read_usage(message.usage) if message.finish_reason else None,
    )


def read_usage(message: UsageMessage) -> Usage:
    """Token counts."""
    return Usage(
        message.prompt_tokens,
        message.cached_tokens,
        message.completion_tokens,
        message.accepted_draft_tokens,
        message.rejected_draft_tokens,
        dict(message.media_tokens),
    )


def _finish(reason: FinishReason.ValueType) -> str | None:
    """A reason that a later contract has is its number."""
    if reason == FINISH_REASON_UNSPECIFIED:
        return None
    known = reason in FinishReason.values()
    return FinishReason.Name(reason).removeprefix(_FINISH_PREFIX).lower() if known else str(int(reason))


def _stop(reason: StopReason) -> str | int | None:
    match reason.WhichOneof("reason"):
        case "text":
            return reason.text
        case "token_id":
            return reason.token_id
        case _:
            return None


def _logprobs(message: Logprobs) -> list[list[Logprob]]:
    tokens: Sequence[str] = message.tokens or [""] * len(message.token_ids)
    entries = [
        Logprob(*entry) for entry in zip(message.token_ids, message.logprobs, message.ranks, tokens, strict=True)
    ]
    bounds = message.offsets
    return [entries[start:end] for start, end in pairwise(bounds)]


def floats(tensor: Tensor) -> list[float]:
    """The elements of a float32 vector; the bytes are little-endian."""
    elements = array("f", tensor.inline)
    if sys.byteorder == "big":
        elements.byteswap()
    return elements.tolist()
