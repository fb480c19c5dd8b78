"""Answers of ``/v1/audio/transcriptions`` and ``/v1/audio/translations``: bodies, and events of streams."""

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

import msgspec

from penstock_frontend.api.http.streaming import StreamForm, data_event, data_failure
from penstock_frontend.speech.types import Segment, SpeechTask, TextDelta, Transcript, TranscriptPieces, Word


class AudioUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Length of the audio in seconds, rounded up."""

    type: str = "duration"
    seconds: int


class TranscribedText(msgspec.Struct, frozen=True, kw_only=True):
    """Answer in the format ``json``."""

    text: str
    usage: AudioUsage


class TranscribedWord(msgspec.Struct, frozen=True, kw_only=True):
    """A word. ``start`` and ``end`` are seconds from the start of the file."""

    word: str
    start: float
    end: float


class TranscribedSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the text between two timestamps.

    ``start`` and ``end`` are seconds from the start of the file. ``seek`` is the start of the segment's window in
    frames of 10 ms. ``avg_logprob``, ``compression_ratio`` and ``no_speech_prob`` are values of the window.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: Sequence[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseTranscription(msgspec.Struct, frozen=True, kw_only=True):
    """Answer in the format ``verbose_json``. ``duration`` is the length of the audio in seconds.

    Unless the request asks for them, ``segments`` or ``words`` are left out.
    """

    task: str
    language: str
    duration: float
    text: str
    segments: Sequence[TranscribedSegment] | msgspec.UnsetType = msgspec.UNSET
    words: Sequence[TranscribedWord] | msgspec.UnsetType = msgspec.UNSET
    usage: AudioUsage


class TextDeltaEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Event of a stream with new text."""

    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str


class TextDoneEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Last event of a stream, with the complete text."""

    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: AudioUsage


STREAM = StreamForm(data_event, data_failure)
"""Format of the events: only ``data``, and no event after the last one."""


def plain(transcript: Transcript) -> TranscribedText:
    """Return the answer in the format ``json``."""
    return TranscribedText(text=transcript.text.strip(), usage=_usage(transcript))


def verbose(transcript: Transcript, *, segments: bool, words: bool) -> VerboseTranscription:
    """Return the answer in the format ``verbose_json``, with segments and words if they are asked for."""
    translated = transcript.task is SpeechTask.TRANSLATE
    return VerboseTranscription(
        task=transcript.task.value,
        language="english" if translated else transcript.language,
        duration=transcript.duration,
        text=transcript.text.strip(),
        segments=[_segment(i, each) for i, each in enumerate(transcript.segments)] if segments else msgspec.UNSET,
        words=[_word(each) for each in transcript.words] if words else msgspec.UNSET,
        usage=_usage(transcript),
    )


async def events(pieces: TranscriptPieces) -> AsyncGenerator[msgspec.Struct, None]:
    """Yield the events of a stream. When the generator is closed, the call of ``pieces`` ends."""
    async with aclosing(pieces):
        async for piece in pieces:
            if isinstance(piece, TextDelta):
                yield TextDeltaEvent(delta=piece.text)
            else:
                yield TextDoneEvent(text=piece.text.strip(), usage=_usage(piece))


def _usage(transcript: Transcript) -> AudioUsage:
    return AudioUsage(seconds=math.ceil(transcript.duration))


def _segment(index: int, segment: Segment) -> TranscribedSegment:
    return TranscribedSegment(
        id=index,
        seek=segment.seek,
        start=segment.start,
        end=segment.end,
        text=segment.text,
        tokens=list(segment.token_ids),
        temperature=segment.temperature,
        avg_logprob=segment.avg_logprob,
        compression_ratio=segment.compression_ratio,
        no_speech_prob=segment.no_speech_prob,
    )


def _word(word: Word) -> TranscribedWord:
    return TranscribedWord(word=word.text.strip(), start=word.start, end=word.end)
