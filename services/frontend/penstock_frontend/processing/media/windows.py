"""Division of speech into windows, which end at quiet places. This code runs in a media worker."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_common.types.media import TensorData
from penstock_frontend.processing.media.families.base import ProcessedItem

Samples = npt.NDArray[np.float32]

MAX_SECONDS = 30.0
"""Maximum length of a window in seconds. Whisper's encoder reads exactly this length."""
_LEAST_SECONDS = 20.0
"""Minimum length of a window that is not the last one, in seconds."""
_FRAMES_PER_SECOND = 100
"""Windows begin and end at multiples of 10 ms."""
_PAUSE = 20
"""Number of frames over which the energy is averaged in the search for a quiet place: 0.2 s, the length of a short pause."""
_SILENCE = 0.0003**2
"""Mean of the squared samples of a frame, at or below which the frame is silent: -70 dB of full scale."""
_FLOAT_FORMAT = 3
"""Number of the format of WAV files whose samples are float32 numbers."""


HEADER_BYTES = 44
"""Size of the header of the WAV files of windows."""


class Window(NamedTuple):
    """A part of an audio file.

    Attributes:
        start: Index of the first sample.
        end: Index after the last sample.
        silent: Whether every 10 ms of the window are silent.
    """

    start: int
    end: int
    silent: bool


def windows(samples: Samples, rate: int) -> list[Window]:
    """Divide samples of shape [n] into windows of at most 30 s, in order. Every sample is in exactly one window.

    A window ends at its quietest place between 20 s and 30 s. If several places are equally quiet, the window ends at
    the last of them. ``rate`` is the sampling rate in Hz, a multiple of 100.
    """
    frame = rate // _FRAMES_PER_SECOND
    energies = _energies(samples, frame)
    found, start = [], 0
    while start < len(samples):
        end = len(samples)
        if end - start > MAX_SECONDS * rate:
            end = _cut(energies, start // frame) * frame
        loudest = energies[start // frame : -(-end // frame)].max()
        found.append(Window(start, end, bool(loudest <= _SILENCE)))
        start = end
    return found


def _energies(samples: Samples, frame: int) -> Samples:
    """Return the mean of the squared samples of each frame. The last frame may have fewer samples than the others."""
    whole = samples[: len(samples) // frame * frame].reshape(-1, frame)
    energies = np.einsum("ij,ij->i", whole, whole) / np.float32(frame)
    if len(rest := samples[whole.size :]):
        energies = np.append(energies, np.dot(rest, rest) / np.float32(len(rest)))
    same: Samples = energies.astype(np.float32, copy=False)
    return same


def _cut(energies: Samples, start: int) -> int:
    """Return the frame at which the window that starts at frame ``start`` ends."""
    first = start + int(_LEAST_SECONDS * _FRAMES_PER_SECOND) + 1
    last = start + int(MAX_SECONDS * _FRAMES_PER_SECOND)
    near = energies[first - _PAUSE // 2 : last + _PAUSE // 2].astype(np.float64)
    padded = np.pad(near, (0, last - first + _PAUSE - len(near)), mode="edge")
    means = np.convolve(padded, np.ones(_PAUSE), mode="valid")
    return last - int(np.argmin(means[::-1]))


def split(samples: Samples, rate: int) -> ProcessedItem:
    """Return the windows of the samples that are not silent, each as a WAV file with float32 samples.

    ``data`` has the files under the names "0", "1", and so on. ``layout`` has the number of samples of the whole audio,
    and then the first sample and the number of samples of each file.
    """
    heard = [window for window in windows(samples, rate) if not window.silent]
    files = (wav(samples[window.start : window.end], rate) for window in heard)
    return ProcessedItem(
        modality="audio",
        data={str(index): TensorData("uint8", (len(file),), file) for index, file in enumerate(files)},
        num_embeds=0,
        layout=(len(samples), *_places(heard)),
    )


def _places(heard: list[Window]) -> Iterator[int]:
    for window in heard:
        yield from (window.start, window.end - window.start)


def wav(samples: Samples, rate: int) -> bytes:
    """Return a WAV file with these mono samples of shape [n]. The file has the same float32 numbers."""
    data = samples.astype("<f4", copy=False).tobytes()
    fields = (b"fmt ", 16, _FLOAT_FORMAT, 1, rate, rate * 4, 4, 32)
    chunks = struct.pack("<4sIHHIIHH", *fields) + struct.pack("<4sI", b"data", len(data))
    return b"".join((struct.pack("<4sI4s", b"RIFF", 4 + len(chunks) + len(data), b"WAVE"), chunks, data))
