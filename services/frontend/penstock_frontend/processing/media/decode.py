"""Files to pixels and samples, in a media worker: opened as the one format that they show, refused by their headers."""

from collections.abc import Sequence
from io import BytesIO
from typing import overload

import numpy as np
import numpy.typing as npt
import soundfile
from PIL import Image as Pillow
from PIL import ImageOps
from PIL.Image import Image

from penstock_frontend.processing.media.decode_limits import DecodeLimits, TooLarge, Unreadable
from penstock_frontend.processing.media.flatten import flattened, transparent_colour
from penstock_frontend.processing.media.resample import resampled
from penstock_frontend.processing.media.sniff import image_format, sound_format
from penstock_frontend.processing.media.wav import with_size

Pillow.MAX_IMAGE_PIXELS = None  # ours is looked at before any pixel is decoded

_SOUND_FORMATS = {"WAV": ("WAV", "WAVEX"), "FLAC": ("FLAC",), "OGG": ("OGG",), "MP3": ("MP3", "MPEG")}
_BLOCK = 256 * 1024
"""Samples of all channels that are decoded in one go."""
MAX_CHANNELS = 64
MIN_RATE, MAX_RATE = 1000, 384_000
"""Samples a second."""


def open_image(data: bytes, limits: DecodeLimits) -> Image:
    """The picture, undecoded: its size is known and within the limits. Raises TooLarge, Unreadable."""
    if (kind := image_format(data)) is None:
        raise Unreadable("is no JPEG, PNG, WebP or GIF file")
    try:
        image: Image = Pillow.open(BytesIO(data), formats=[kind])
    except MemoryError:
        raise
    except Exception as e:  # decoders raise what they like
        raise Unreadable(f"is no {kind} file that can be read") from e
    width, height = image.size
    if width < 1 or height < 1:
        raise Unreadable(f"has {width} x {height} pixels")
    if width * height > limits.max_pixels:
        raise TooLarge(f"has {width * height} pixels ({width} x {height})", "media.max_pixels", limits.max_pixels)
    return image


def decode_image(image: Image) -> Image:
    """Return the first picture of an open file in RGB, turned as its EXIF data says, with transparent pixels on white.

    Raises:
        Unreadable: the file is broken.
    """
    try:
        if (colour := transparent_colour(image)) is not None:
            image.info["transparency"] = colour
        ImageOps.exif_transpose(image, in_place=True)
        return flattened(image)
    except MemoryError:
        raise
    except Exception as e:  # decoders raise what they like
        raise Unreadable(f"is a broken {image.format} file") from e


class VideoFrames(Sequence[Image]):
    """Frames of a video, each decoded when it is asked for. Raises TooLarge, Unreadable at once where headers show it."""

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
        """A frame, or some of them, undecoded."""
        if isinstance(index, slice):
            return VideoFrames(self._files[index], self._limits)
        return decode_image(open_image(self._files[index], self._limits))


def decode_sound(data: bytes, sampling_rate: int, limits: DecodeLimits) -> npt.NDArray[np.float32]:
    """Mono samples, the mean of all channels, at ``sampling_rate`` in Hz. Raises TooLarge, Unreadable."""
    if (kind := sound_format(data)) is None:
        raise Unreadable("is no WAV, FLAC, Ogg or MP3 file")
    try:
        with soundfile.SoundFile(BytesIO(with_size(data) if kind == "WAV" else data)) as file:
            if file.format not in _SOUND_FORMATS[kind]:
                raise Unreadable(f"is no {kind} file")
            samples, rate = _read(file, limits), file.samplerate
    except (MemoryError, TooLarge, Unreadable):
        raise
    except Exception as e:  # decoders raise what they like
        raise Unreadable(f"is no {kind} file that can be read") from e
    if not len(samples):
        raise Unreadable("has no samples")
    if not np.isfinite(samples).all():
        raise Unreadable("has samples that are no numbers")
    return resampled(samples, rate, sampling_rate)


def _read(file: soundfile.SoundFile, limits: DecodeLimits) -> npt.NDArray[np.float32]:
    if not 1 <= file.channels <= MAX_CHANNELS:
        raise Unreadable(f"has {file.channels} channels; the limit is {MAX_CHANNELS}")
    if not MIN_RATE <= file.samplerate <= MAX_RATE:
        raise Unreadable(f"has {file.samplerate} samples a second; it must have {MIN_RATE} to {MAX_RATE}")
    most = int(limits.max_audio_seconds * file.samplerate)
    known = file.frames if file.frames < 2**62 else 0  # libsndfile's word for unknown
    _check_seconds(known, most, file.samplerate, limits)
    blocks: list[npt.NDArray[np.float32]] = []
    total = 0
    while len(block := file.read(_BLOCK // file.channels, dtype="float32", always_2d=True)):
        _check_seconds(total := total + len(block), most, file.samplerate, limits)  # whatever the header said
        blocks.append(block.mean(axis=1, dtype=np.float32))
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


def _check_seconds(frames: int, most: int, rate: int, limits: DecodeLimits) -> None:
    if frames > most:
        seconds = f"has {frames / rate:.1f} s of sound, or more"
        raise TooLarge(seconds, "media.max_audio_seconds", limits.max_audio_seconds)
