"""Reading of the audio track of MP4, WebM and AAC files with PyAV, the Python interface of FFmpeg's libraries.

This code runs in a media worker. Of FFmpeg's formats and codecs, it uses only those that are listed here.
"""

import contextlib
import errno
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_frontend.processing.media.worker_messages import Unreadable

if TYPE_CHECKING:
    from av import AudioFrame
    from av.container import InputContainer

ContainerFormat = Literal["MP4", "WEBM", "AAC"]

_DEMUXERS: Mapping[ContainerFormat, str] = {"MP4": "mov", "WEBM": "matroska", "AAC": "aac"}
"""Names of FFmpeg's demuxers."""
_CODECS = ("aac", "alac", "flac", "mp3", "opus", "vorbis")
_PCM = "pcm_"
"""Prefix of the names of codecs without compression."""
_OPTIONS = {"codec_whitelist": ",".join(_CODECS), "protocol_whitelist": "", "enable_drefs": "0"}
"""Options of the demuxers. They keep FFmpeg from starting video decoders, and from opening the files that a file names."""
_FULL_SCALE: Mapping[str, float] = {"uint8": 128.0, "int16": 2.0**15, "int32": 2.0**31, "int64": 2.0**63}
"""Value of a sample of full scale, by the type of integer samples."""


class Block(NamedTuple):
    """Consecutive mono samples of a track.

    Attributes:
        samples: Means of all channels, of shape [n].
        rate: Sampling rate in Hz.
        channels: Number of channels in the file.
    """

    samples: npt.NDArray[np.float32]
    rate: int
    channels: int


class Track:
    """The first audio track of an open file."""

    def __init__(self, container: "InputContainer") -> None:
        """Raises Unreadable if the file has no audio track, or if the codec of this track is not accepted."""
        if not container.streams.audio:
            raise Unreadable("has no audio track")
        self._container = container
        self._stream = container.streams.audio[0]
        codec = self._stream.codec_context.codec.canonical_name
        if codec not in _CODECS and not codec.startswith(_PCM):
            raise Unreadable(f"has audio in the codec {codec}; accepted are {', '.join(_CODECS)} and PCM")
        self._stream.codec_context.thread_count = 1

    @property
    def seconds(self) -> float:
        """Length of the track in seconds, as the header announces it. 0 if the header does not announce it."""
        stream = self._stream
        # An AAC file has no header with the length, so FFmpeg estimates it from the bit rate.
        if self._container.format.name == "aac" or stream.duration is None or stream.time_base is None:
            return 0.0
        return float(stream.duration * stream.time_base)

    def blocks(self) -> Iterator[Block]:
        """Decode the track. Raises PyAV's errors if the file is broken."""
        for frame in self._container.decode(self._stream):
            yield Block(_mono(frame), frame.sample_rate, frame.layout.nb_channels)


@contextlib.contextmanager
def open_container(data: bytes, kind: ContainerFormat) -> Iterator[Track]:
    """Open the first audio track of a file. Raises the errors of ``Track``, and PyAV's errors if the file is broken."""
    # Most files need no FFmpeg, whose libraries take 40 MB of memory.
    try:
        import av
    except ModuleNotFoundError:
        raise
    except ImportError as e:  # the libraries do not fit into the worker's memory limit
        raise MemoryError from e
    try:
        with av.open(BytesIO(data), "r", format=_DEMUXERS[kind], options=dict(_OPTIONS)) as container:
            yield Track(container)
    except av.FFmpegError as e:
        # FFmpeg refuses sizes in a header that exceed the memory limit, and has then freed all memory of the file.
        # Python's own MemoryError would end the worker.
        if e.errno == errno.ENOMEM:
            raise Unreadable("announces more data than a media worker can hold") from e
        raise


def _mono(frame: "AudioFrame") -> npt.NDArray[np.float32]:
    """Return the mean of all channels. Integers are scaled to the range from -1 to 1."""
    given: npt.NDArray[Any] = frame.to_ndarray()
    planes = given if frame.format.is_planar else given.reshape(-1, frame.layout.nb_channels).T
    scaled = planes.astype(np.float32)
    if (full := _FULL_SCALE.get(given.dtype.name)) is not None:
        scaled = scaled / np.float32(full) - np.float32(given.dtype == np.uint8)
    mean: npt.NDArray[np.float32] = scaled.mean(axis=0, dtype=np.float32)
    return mean
