"""Result of the division of an audio file with speech into windows, as the frontend uses it."""

import struct
from collections import deque
from typing import NamedTuple

import numpy as np

from penstock_common.in_flight import BytesInFlight, Held
from penstock_frontend.processing.media.families.base import ProcessedItem
from penstock_frontend.processing.media.windows import HEADER_BYTES, wav
from penstock_frontend.processing.media.worker_messages import Unreadable


class SpeechWindow(NamedTuple):
    """A part of an audio file that is not silent.

    Attributes:
        start: Start of the window in the file, in seconds.
        seconds: Length of the window in seconds.
        file: WAV file with the samples of the window.
    """

    start: float
    seconds: float
    file: bytes | bytearray

    def rest(self, seconds: float) -> "SpeechWindow":
        """Return the part of the window from ``seconds`` on."""
        samples = np.frombuffer(self.file, np.float32, offset=HEADER_BYTES)
        rate = round(len(samples) / self.seconds)
        first = round(seconds * rate)
        return SpeechWindow(self.start + first / rate, (len(samples) - first) / rate, wav(samples[first:], rate))


class SplitSpeech:
    """Windows of an audio file. The bytes of all windows count as in flight until ``release`` is called, or until this
    object is freed.
    """

    def __init__(self, seconds: float, windows: list[SpeechWindow], held: Held | None) -> None:
        self.seconds = seconds
        """Length of the file in seconds, including silence."""
        self.windows = deque(windows)
        """Windows in order. The caller removes each window that it has started, so that its samples can be freed."""
        self._held = held

    def release(self) -> None:
        """Stop counting the bytes of the windows as in flight. Idempotent."""
        if self._held is not None:
            self._held.release()


def split_speech(item: ProcessedItem, rate: int, in_flight: BytesInFlight) -> SplitSpeech:
    """Return the windows that a media worker made with ``windows.split``.

    Raises ResourceExhausted if too many bytes of windows are in flight, and Unreadable if the worker's answer is not
    valid, because the worker reads files of clients.
    """
    files = [bytearray(0) if (tensor := item.data.get(str(i))) is None else tensor.data for i in range(len(item.data))]
    places = [*zip(item.layout[1::2], item.layout[2::2], strict=False)]
    if len(item.layout) != 1 + 2 * len(files) or not _is_in_order(item.layout[0], places, files):
        raise Unreadable("cannot be divided into windows")
    size = sum(map(len, files))
    if (refusal := in_flight.refusal(size)) is not None:
        raise refusal
    windows = [
        SpeechWindow(start / rate, count / rate, file) for (start, count), file in zip(places, files, strict=True)
    ]
    held = in_flight.hold(None, size)
    return SplitSpeech(item.layout[0] / rate, windows, held if isinstance(held, Held) else None)


def _is_in_order(total: int, places: list[tuple[int, int]], files: list[bytes | bytearray]) -> bool:
    end = 0
    for (start, count), file in zip(places, files, strict=True):
        if start < end or count <= 0 or len(file) <= count * struct.calcsize("f"):
            return False
        end = start + count
    return end <= total and total > 0
