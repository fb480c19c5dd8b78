"""Segments and quality of the text of a window, computed from output tokens as in OpenAI's Whisper."""

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_PRECISION = 0.02
"""Seconds between two timestamps."""
_LEAST_UNREAD = 1.0
"""Minimum number of seconds that the model must have read, and that must be left, to read the rest of a window."""


class Span(NamedTuple):
    """A segment of a window.

    Attributes:
        start: Seconds from the start of the window.
        end: Seconds from the start of the window.
        token_ids: Token ids of the segment, with its timestamps.
    """

    start: float
    end: float
    token_ids: Sequence[int]


def spans(token_ids: Sequence[int], first_timestamp: int, seconds: float) -> list[Span]:
    """Return the segments of a window of ``seconds`` seconds.

    ``token_ids`` are the output tokens of the window, without the end-of-text token. A segment ends where two
    timestamps follow each other. If text follows the last pair of timestamps, this text is a segment up to the next
    timestamp, or to the end of the window. Tokens without any timestamp are one segment.
    """
    return [each for part in _parts(token_ids, first_timestamp) if (each := _span(part, first_timestamp, seconds))]


def unread_from(token_ids: Sequence[int], first_timestamp: int, seconds: float) -> float | None:
    """Return the time in the window from which the model has not read the speech, or None if it has read all of it.

    If the output ends with two timestamps, the model has stopped before a further segment, which begins at the last
    timestamp. OpenAI's Whisper also continues there.
    """
    if len(token_ids) < 2 or min(token_ids[-2:]) < first_timestamp:
        return None
    time = (token_ids[-1] - first_timestamp) * _PRECISION
    return time if _LEAST_UNREAD <= time <= seconds - _LEAST_UNREAD else None


def _parts(token_ids: Sequence[int], first_timestamp: int) -> Iterator[Sequence[int]]:
    """Yield the token ids of each segment. A pair of timestamps is divided between two segments."""
    start = 0
    for index in range(1, len(token_ids)):
        if token_ids[index] >= first_timestamp and token_ids[index - 1] >= first_timestamp:
            yield token_ids[start:index]
            start = index
    if start < len(token_ids):
        yield token_ids[start:]


def _span(token_ids: Sequence[int], first_timestamp: int, seconds: float) -> Span | None:
    """Return the segment with these tokens, or None if the tokens are only timestamps."""
    times = [min((each - first_timestamp) * _PRECISION, seconds) for each in token_ids if each >= first_timestamp]
    if len(times) == len(token_ids):
        return None
    start = times[0] if token_ids[0] >= first_timestamp else 0.0
    end = times[-1] if token_ids[-1] >= first_timestamp else seconds
    return Span(start, max(start, end), token_ids)


_LARGEST_COMPRESSION_RATIO = 2.4
_LEAST_LOGPROB = -1.0
_NO_SPEECH = 0.6


class Quality(NamedTuple):
    """Quality of the text of a window. The thresholds are those of OpenAI's Whisper.

    Attributes:
        avg_logprob: Mean log probability of the output tokens.
        compression_ratio: Length of the text in bytes, divided by its length after compression.
    """

    avg_logprob: float
    compression_ratio: float

    @property
    def unlikely(self) -> bool:
        """Whether the tokens are so unlikely that the window may contain no speech."""
        return self.avg_logprob < _LEAST_LOGPROB

    @property
    def implausible(self) -> bool:
        """Whether the window must be transcribed again with the next temperature."""
        return self.unlikely or self.compression_ratio > _LARGEST_COMPRESSION_RATIO

    def silent(self, no_speech_prob: float) -> bool:
        """Return whether the window contains no speech, so that its text must be dropped."""
        return self.unlikely and no_speech_prob > _NO_SPEECH


def quality(text: str, logprobs: Sequence[float]) -> Quality:
    """Return the quality of a text. ``logprobs`` are the log probabilities of all output tokens, including the
    end-of-text token.
    """
    data = text.strip().encode()
    ratio = len(data) / len(zlib.compress(data))
    return Quality(math.fsum(logprobs) / max(len(logprobs), 1), ratio)
