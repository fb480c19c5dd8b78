"""Results of calls as plain Python objects, and their conversion from messages."""

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
from penstock_client.errors import Internal

_FINISH_PREFIX = "FINISH_REASON_"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request.

    Attributes:
        prompt_tokens: Number of prompt tokens.
        cached_tokens: Number of prompt tokens that the engine found in its prefix cache.
        completion_tokens: Number of output tokens.
        accepted_draft_tokens: Number of output tokens that came from accepted drafts.
        rejected_draft_tokens: Number of draft tokens that the model rejected. Rejected tokens are not part of the
            output.
        media_tokens: Number of prompt tokens that stand for media, by modality.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    media_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Token at a position, with its natural log-probability, its rank from 1, and its text.

    The text is empty without ``detokenize``.
    """

    token_id: int
    logprob: float
    rank: int
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A piece of the output of one sequence, or the complete output.

    ``index`` is the sequence's number, from 0 to n - 1.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """Finish reason: ``stop``, ``length``, ``abort`` or ``repetition``. None before the last piece."""
    stop_reason: str | int | None
    """Stop string or stop token id that ended the output. None for the model's end-of-sequence token."""
    logprobs: list[list[Logprob]] | None
    """Log-probabilities, with one list for each token in ``token_ids``. The list has this token first, then the most
    likely tokens.

    None if the request did not ask for log-probabilities.
    """
    prompt_logprobs: list[list[Logprob]] | None
    """Log-probabilities of the prompt tokens, beginning with the second prompt token. Set in the first piece."""
    usage: Usage | None
    """Token counts. None before the last piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOutput:
    """A piece of one chat answer, or the complete answer.

    Fields with the same names as in ``Output`` have the same meaning.
    """

    request_id: str
    index: int
    content: str
    reasoning: str
    tool_calls: list[pb.ToolCall]
    """Tool calls. In a stream, a call may be split into pieces with the same ``id``. The first piece has the call's
    name.
    """
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[list[Logprob]] | None
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings of the inputs. ``vectors`` has one vector per input, in the order of the inputs."""

    vectors: list[list[float]]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Classes:
    """Class probabilities of one input, in the order of the model's labels.

    ``label`` is the label with the highest probability, or empty if the model's labels have no names.
    """

    probabilities: list[float]
    label: str


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of documents, in the order of the documents.

    A score is the model's score of query and document, or a cosine similarity in [-1, 1].
    """

    scores: list[float]
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechSegment:
    """A part of a transcript between two timestamps.

    ``start`` and ``end`` are seconds from the start of the file. The values from ``temperature`` on apply to the whole
    window of at most 30 s that contains the segment.
    """

    start: float
    end: float
    seek: int
    """Start of the window in the file, in frames of 10 ms."""
    text: str
    token_ids: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """Transcript of an audio file."""

    request_id: str
    task: str
    """Task of the request: ``transcribe`` or ``translate``."""
    language: str
    """English name of the language, such as ``german``. Empty for silent audio without a given language."""
    duration: float
    """Length of the audio in seconds."""
    text: str
    """Text of the whole file. Empty if the file contains no speech."""
    segments: list[SpeechSegment]
    """Segments in the order of their start. Empty if the request does not ask for segments."""
    output_tokens: int
    """Number of tokens that the model generated."""


def read_transcript_item(message: pb.TranscribeResponse) -> str | Transcript:
    """Convert a response message of Transcribe: new text, or the transcript."""
    if message.WhichOneof("message") != "transcript":
        return message.text
    found = message.transcript
    return Transcript(
        request_id=found.request_id,
        task=pb.SpeechTask.Name(found.task).removeprefix("SPEECH_TASK_").lower(),
        language=found.language,
        duration=found.duration,
        text=found.text,
        segments=[_segment(each) for each in found.segments],
        output_tokens=found.output_tokens,
    )


def transcript_of(items: Sequence[str | Transcript]) -> Transcript:
    """Return the transcript of a complete stream, which is the last item. Raises Internal if it is missing."""
    if not items or not isinstance(last := items[-1], Transcript):
        raise Internal("INTERNAL", "the server ended the stream without a transcript")
    return last


def _segment(message: pb.SpeechSegment) -> SpeechSegment:
    return SpeechSegment(
        start=message.start,
        end=message.end,
        seek=message.seek,
        text=message.text,
        token_ids=list(message.token_ids),
        temperature=message.temperature,
        avg_logprob=message.avg_logprob,
        compression_ratio=message.compression_ratio,
        no_speech_prob=message.no_speech_prob,
    )


def read_output(message: pb.GenerateResponse) -> Output:
    """Convert a response message of Generate."""
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
    """Convert a response message of Chat."""
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
    """Convert the token counts of a message."""
    return Usage(
        message.prompt_tokens,
        message.cached_tokens,
        message.completion_tokens,
        message.accepted_draft_tokens,
        message.rejected_draft_tokens,
        dict(message.media_tokens),
    )


def _finish(reason: FinishReason.ValueType) -> str | None:
    """Convert a finish reason. If this version does not know the reason, return its number as text."""
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
    """Return the elements of a float32 tensor, whose bytes are little-endian."""
    elements = array("f", tensor.inline)
    if sys.byteorder == "big":
        elements.byteswap()
    return elements.tolist()
