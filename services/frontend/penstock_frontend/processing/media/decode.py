"""Decoding of media files to pixels and audio samples. This code runs in a media worker.

The code first checks the headers of a file, and then uses only the decoder of the format that it has detected.
"""

import math
import struct
from collections.abc import Sequence
from io import BytesIO
from typing import NoReturn, overload

import numpy as np
import numpy.typing as npt
import soundfile
from PIL import Image as Pillow
from PIL import ImageOps
from PIL.Image import Image

from penstock_frontend.processing.media.containers import ContainerFormat, open_container
from penstock_frontend.processing.media.rgb import flattened, transparent_colour
from penstock_frontend.processing.media.sniff import FORMATS, image_format, sound_format
from penstock_frontend.processing.media.worker_messages import DecodeLimits, TooLarge, Unreadable

# The code below resamples audio, and needs only numpy.

Samples = npt.NDArray[np.float32]

_ZERO_CROSSINGS = 32
"""Number of zero crossings of the filter kernel on each side of its center."""
_BETA = 12.0
"""Shape parameter of the filter kernel's Kaiser window. With this value, the side lobes are at -118 dB."""
_POINTS = 8192
_WINDOW = np.kaiser(2 * _POINTS + 1, _BETA)[_POINTS:]
"""Lookup table of the right half of the Kaiser window. At its end, the window has the value 0.00005."""
_ROLLOFF = 0.95
"""Cutoff frequency of the filter kernel, as a fraction of the Nyquist frequency of the lower of the two sampling rates."""


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """Resample ``samples`` of shape [n] from ``rate`` Hz to ``wanted`` Hz.

    The result has the shape [ceil(n * wanted / rate)].

    The method is band-limited interpolation: a sum of sinc functions with a Kaiser window (Smith and Gossett, 1984).
    There is one filter for each phase. The phase is the position of an output sample between two input samples.
    """
    if rate == wanted:
        return samples
    up, down = wanted // math.gcd(rate, wanted), rate // math.gcd(rate, wanted)
    cutoff = min(1.0, up / down) * _ROLLOFF
    half = math.ceil(_ZERO_CROSSINGS / cutoff)
    num_out = -(-len(samples) * up // down)
    padded = np.concatenate([np.zeros(half, np.float32), samples, np.zeros(half + down + 1, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    out = np.empty(num_out, np.float32)
    taps = np.arange(-half, half + 1, dtype=np.float64)
    for phase in range(min(up, num_out)):  # output i * up + phase is at input position i * down + phase * down / up
        start, fraction = divmod(phase * down, up)
        kernel = _kernel(taps - fraction / up, cutoff, half)
        rows = len(range(phase, num_out, up))
        out[phase::up] = windows[start::down][:rows] @ kernel
    return out


def _kernel(distance: npt.NDArray[np.float64], cutoff: float, half: int) -> Samples:
    window = np.interp(np.abs(distance) * (_POINTS / half), np.arange(len(_WINDOW)), _WINDOW)
    kernel = np.sinc(distance * cutoff) * window
    scaled: Samples = (kernel / kernel.sum()).astype(np.float32)
    return scaled


# The code below repairs WAV files whose header does not state the length, because the length was unknown when the
# header was written.

_RIFF_HEADER = 12
_CHUNK = struct.Struct("<4sI")
_MOST_MISSING = 64
"""Maximum number of bytes that a complete WAV file may lack, because some programs count the header as samples."""


def _is_unknown(size: int) -> bool:
    """Return whether a program writes this size into a WAV header if it does not know the size.

    Programs write 0, or a value near the maximum of a signed or an unsigned number of 32 bits.
    """
    return size == 0 or 0x7FFF_0000 <= size <= 0x8000_0000 or size >= 0xFFFF_0000


def with_size(data: bytes) -> bytes:
    """Return the WAV file with the size of its samples in the header, if the header does not state the size.

    All bytes after such a header count as samples, with one exception. If the size is 0, and only complete other chunks
    follow up to the end of the file, the file has no samples. Files with a valid size, and files without samples, are
    returned unchanged. Raises Unreadable if the end of the samples is missing.
    """
    offset = _RIFF_HEADER
    while offset + _CHUNK.size <= len(data):
        name, size = _CHUNK.unpack_from(data, offset)
        start = offset + _CHUNK.size
        if name == b"data":
            length = len(data) - start
            if not _is_unknown(size) and size > length + _MOST_MISSING:
                raise Unreadable(f"is cut off: its header announces {size} bytes of samples, and {length} follow")
            if not _is_unknown(size) or (size == 0 and _are_chunks(data, start)):
                return data
            riff = struct.pack("<4sI", b"RIFF", len(data) - 8)
            return b"".join((riff, data[8:offset], _CHUNK.pack(name, length), memoryview(data)[start:]))
        offset = start + size + size % 2
    return data


def _are_chunks(data: bytes, offset: int) -> bool:
    """Return whether the file, from ``offset`` to its end, consists only of complete chunks."""
    while offset + _CHUNK.size <= len(data):
        name, size = _CHUNK.unpack_from(data, offset)
        if not (name.isascii() and name.decode().isprintable()):
            return False
        offset += _CHUNK.size + size + size % 2
    return offset in (len(data), len(data) + 1)


# Pillow's own limit is not needed, because Penstock checks its limit before any pixel is decoded
Pillow.MAX_IMAGE_PIXELS = None

_SOUND_FORMATS = {"WAV": ("WAV", "WAVEX"), "FLAC": ("FLAC",), "OGG": ("OGG",), "MP3": ("MP3", "MPEG")}
_BLOCK = 256 * 1024
"""Number of samples to decode per call, over all channels together."""
MAX_CHANNELS = 64
MIN_RATE, MAX_RATE = 1000, 384_000
"""Minimum and maximum of an audio file's sampling rate in Hz."""
_CUT_OFF, _CUT_OFF_SECONDS = 1.02, 1.0
"""A file in a container is cut off if its header announces more seconds than ``_CUT_OFF`` times the decoded seconds
plus ``_CUT_OFF_SECONDS``. Headers of complete files are less exact than one sample.
"""


def open_image(data: bytes, limits: DecodeLimits) -> Image:
    """Open an image file without decoding its pixels.

    The size of the returned image is known and within the limits. Raises TooLarge if the image exceeds a limit, and
    Unreadable if the file cannot be read.
    """
    if (kind := image_format(data)) is None:
        raise Unreadable("is not a JPEG, PNG, WebP or GIF file")
    try:
        image: Image = Pillow.open(BytesIO(data), formats=[kind])
    except MemoryError:
        raise
    except Exception as e:  # decoders raise errors of many types
        raise Unreadable(f"is not a readable {kind} file") from e
    width, height = image.size
    if width < 1 or height < 1:
        raise Unreadable(f"has {width} x {height} pixels")
    if width * height > limits.max_pixels:
        raise TooLarge(f"has {width * height} pixels ({width} x {height})", "media.max_pixels", limits.max_pixels)
    return image


def decode_image(image: Image) -> Image:
    """Decode the first image of an open file to RGB pixels. Apply the EXIF rotation, and make transparent pixels white.

    Raises:
        Unreadable: The file is broken.
    """
    try:
        if (colour := transparent_colour(image)) is not None:
            image.info["transparency"] = colour
        ImageOps.exif_transpose(image, in_place=True)
        return flattened(image)
    except MemoryError:
        raise
    except Exception as e:  # decoders raise errors of many types
        raise Unreadable(f"is a broken {image.format} file") from e


class VideoFrames(Sequence[Image]):
    """Frames of a video, which a client sends as image files.

    Each frame is decoded when it is accessed. If the headers of the files show a problem, the constructor raises
    TooLarge or Unreadable.
    """

    def __init__(self, files: Sequence[bytes], limits: DecodeLimits) -> None:
        if not files:
            raise Unreadable("has no frames")
        if len(files) > limits.max_frames:
            raise TooLarge(f"has {len(files)} frames", "media.max_frames", limits.max_frames)
        self._files, self._limits = files, limits
        sizes = {open_image(data, limits).size for data in files}
        if len(sizes) > 1:
            raise Unreadable("has frames of more than one size")

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, index: int) -> Image: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Image]: ...

    def __getitem__(self, index: int | slice) -> Image | Sequence[Image]:
        """Return one decoded frame for an index. Return a sequence of frames that are not decoded yet for a slice."""
        if isinstance(index, slice):
            return VideoFrames(self._files[index], self._limits)
        return decode_image(open_image(self._files[index], self._limits))


def decode_sound(data: bytes, sampling_rate: int, limits: DecodeLimits) -> Samples:
    """Decode an audio file to mono samples at ``sampling_rate`` Hz.

    A mono sample is the mean of all channels. From files with several audio tracks, such as videos, the first audio
    track is used. Raises TooLarge if the sound exceeds a limit, and Unreadable if the file cannot be read.
    """
    if (kind := sound_format(data)) is None:
        *others, last = FORMATS["audio"]
        raise Unreadable(f"is not a {', '.join(others)} or {last} file")
    try:
        if kind in ("MP4", "WEBM", "AAC"):
            samples, rate = _from_container(data, kind, limits)
        else:
            with soundfile.SoundFile(BytesIO(with_size(data) if kind == "WAV" else data)) as file:
                if file.format not in _SOUND_FORMATS[kind]:
                    raise Unreadable(f"is not a {kind} file")
                samples, rate = _read(file, limits), file.samplerate
    except (MemoryError, TooLarge, Unreadable):
        raise
    except Exception as e:  # decoders raise errors of many types
        raise Unreadable(f"is not a readable {kind} file") from e
    if not len(samples):
        raise Unreadable("has no samples")
    if not np.isfinite(samples).all():
        raise Unreadable("has samples that are not finite numbers")
    return resampled(samples, rate, sampling_rate)


def _read(file: soundfile.SoundFile, limits: DecodeLimits) -> Samples:
    _check_form(file.channels, file.samplerate)
    most = int(limits.max_audio_seconds * file.samplerate)
    # libsndfile uses such large values if the number of samples is unknown
    known = file.frames if file.frames < 2**62 else 0
    _check_seconds(known, most, file.samplerate, limits)
    blocks: list[Samples] = []
    total = 0
    while len(block := file.read(_BLOCK // file.channels, dtype="float32", always_2d=True)):
        # check the decoded length too, because the header may be wrong
        _check_seconds(total := total + len(block), most, file.samplerate, limits)
        blocks.append(block.mean(axis=1, dtype=np.float32))
    if file.format == "FLAC" and total < known:
        raise _cut_off(known / file.samplerate, total / file.samplerate)
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


def _from_container(data: bytes, kind: ContainerFormat, limits: DecodeLimits) -> tuple[Samples, int]:
    """Return the mono samples and the sampling rate of a file that PyAV decodes."""
    blocks: list[Samples] = []
    total = rate = 0
    with open_container(data, kind) as track:
        if track.seconds > limits.max_audio_seconds:
            _refuse_seconds(track.seconds, limits)
        for block in track.blocks():
            _check_form(block.channels, block.rate)
            if rate not in (0, block.rate):
                raise Unreadable(f"changes its sampling rate from {rate} to {block.rate} Hz")
            rate = block.rate
            total += len(block.samples)
            _check_seconds(total, int(limits.max_audio_seconds * rate), rate, limits)
            blocks.append(block.samples)
    if rate and track.seconds > _CUT_OFF * total / rate + _CUT_OFF_SECONDS:
        raise _cut_off(track.seconds, total / rate)
    return (np.concatenate(blocks) if blocks else np.zeros(0, np.float32)), rate


def _check_form(channels: int, rate: int) -> None:
    if not 1 <= channels <= MAX_CHANNELS:
        raise Unreadable(f"has {channels} channels; the limit is {MAX_CHANNELS}")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise Unreadable(f"has {rate} samples per second; it must have from {MIN_RATE} to {MAX_RATE}")


def _check_seconds(frames: int, most: int, rate: int, limits: DecodeLimits) -> None:
    if frames > most:
        _refuse_seconds(frames / rate, limits)


def _refuse_seconds(seconds: float, limits: DecodeLimits) -> NoReturn:
    what = f"has at least {seconds:.1f} s of sound"
    raise TooLarge(what, "media.max_audio_seconds", limits.max_audio_seconds)


def _cut_off(announced: float, found: float) -> Unreadable:
    return Unreadable(f"is cut off: its header announces {announced:.1f} s of sound, and it has {found:.1f} s")
