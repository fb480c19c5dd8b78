"""Types of transcription calls and of their results, shared by all protocols."""

from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from penstock_common.types.request import RequestContext

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that are tried in this order until the text of a window is plausible. OpenAI's Whisper uses the same."""


class SpeechTask(StrEnum):
    """Task of a call."""

    TRANSCRIBE = "transcribe"
    """Write the text in the language of the speech."""
    TRANSLATE = "translate"
    """Write the text in English."""


class TranscriptionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Call that transcribes or translates one audio file.

    Attributes:
        audio: Bytes of the encoded file.
        field: Name of the file in the request, for error messages.
        task: Whether to transcribe or to translate.
        language: Language of the speech, as a code such as ``de`` or as an English name such as ``german``. Empty: the
            model detects the language.
        prompt: Text before the speech, which guides style and spelling.
        temperatures: Sampling temperatures to try, in this order.
        segments: Whether the result must have segments with timestamps.
        words: Whether the result must have words with timestamps.
        seed: Seed for temperatures above 0, or None for a random seed.
        context: Context of the request, such as the model, the caller and the deadline.
    """

    audio: bytes
    field: str = "file"
    task: SpeechTask = SpeechTask.TRANSCRIBE
    language: str = ""
    prompt: str = ""
    temperatures: Sequence[float] = TEMPERATURES
    segments: bool = False
    words: bool = False
    seed: int | None = None
    context: RequestContext = RequestContext()


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """A word of a transcript. ``start`` and ``end`` are seconds from the start of the file."""

    text: str
    start: float
    end: float


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a transcript between two timestamps.

    Attributes:
        start: Seconds from the start of the file.
        end: Seconds from the start of the file.
        seek: Start of the window in the file, in frames of 10 ms.
        text: Text of the segment.
        token_ids: Token ids of the segment, with its timestamps.
        temperature: Sampling temperature of the window.
        avg_logprob: Mean log probability of the window's tokens.
        compression_ratio: Length of the window's text divided by its length after compression. A high ratio means
            that the text repeats itself.
        no_speech_prob: Probability that the window contains no speech.
    """

    start: float
    end: float
    seek: int
    text: str
    token_ids: Sequence[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a call.

    Attributes:
        request_id: Id of the request.
        task: Task of the call.
        language: English name of the language in lower case, such as ``german``.
        duration: Length of the audio in seconds.
        text: Text of all segments. Empty if the audio contains no speech.
        segments: Segments in the order of their start.
        words: Words in the order of their start. Empty if the call does not ask for words.
        output_tokens: Number of tokens that the model generated.
    """

    request_id: str
    task: SpeechTask
    language: str
    duration: float
    text: str
    segments: Sequence[Segment] = ()
    words: Sequence[Word] = ()
    output_tokens: int = 0


class TextDelta(msgspec.Struct, frozen=True):
    """New text of a streamed call."""

    text: str


class TranscriptPieces(Protocol):
    """Asynchronous iterator over the pieces of a streamed call. Closing the iterator ends the call."""

    def __aiter__(self) -> AsyncIterator[TextDelta | Transcript]:
        """Return the iterator itself."""

    def close(self) -> None:
        """Cancel the call, if it has not ended. Idempotent."""

    async def aclose(self) -> None:
        """Cancel the call, if it has not ended, and wait until it has ended. Idempotent."""


class Speech(Protocol):
    """Port for transcription calls, used by the code of each protocol."""

    async def transcribe(self, request: TranscriptionRequest) -> Transcript:
        """Return the complete transcript. Raises RequestFailed if the request is refused or fails."""

    def stream(self, request: TranscriptionRequest) -> TranscriptPieces:
        """Yield new text as it is final, and at the end the transcript. Raises RequestFailed as ``transcribe`` does."""
