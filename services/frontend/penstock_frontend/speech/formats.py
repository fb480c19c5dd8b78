"""Texts of transcripts in the subtitle formats SubRip (SRT) and WebVTT."""

import html
import re
from collections.abc import Iterator, Sequence

from penstock_frontend.speech.types import Segment

_ARROW = "-->"
"""Text between the two times of a subtitle. The text of a subtitle must not contain it."""
_ARROWS = re.compile("--+>")


def subrip(segments: Sequence[Segment]) -> str:
    """Return a file in SubRip's format with one subtitle per segment. Without segments, the file is empty.

    SubRip has no escapes, so a text's ``-->`` becomes ``->``. Segments without text are left out.
    """
    cues = _cues(segments, ",")
    return "".join(
        f"{number}\n{times}\n{_ARROWS.sub('->', text)}\n\n" for number, (times, text) in enumerate(cues, start=1)
    )


def webvtt(segments: Sequence[Segment]) -> str:
    """Return a file in WebVTT's format with one cue per segment. Without segments, the file has only its header.

    Characters that begin tags or escapes are escaped. Segments without text are left out.
    """
    return "WEBVTT\n\n" + "".join(
        f"{times}\n{html.escape(text, quote=False)}\n\n" for times, text in _cues(segments, ".")
    )


def _cues(segments: Sequence[Segment], point: str) -> Iterator[tuple[str, str]]:
    """Yield the line with the times, and the text in one line, of each segment with text."""
    for segment in segments:
        text = " ".join(segment.text.replace("\0", " ").split())
        if text:
            start = _milliseconds(segment.start)
            end = max(start, _milliseconds(segment.end))
            yield f"{_time(start, point)} {_ARROW} {_time(end, point)}", text


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _time(milliseconds: int, point: str) -> str:
    """Return a time such as ``01:02:03,456``. ``point`` is the character before the milliseconds."""
    seconds, rest = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{point}{rest:03d}"
