"""Audio in MP4, WebM and AAC files, and files of all audio formats that are broken or lie."""

import struct
from io import BytesIO

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from penstock_frontend.processing.media.decode import decode_sound
from penstock_frontend.processing.media.sniff import image_format, is_of, sound_format
from penstock_frontend.processing.media.worker_messages import DecodeLimits, TooLarge, Unreadable
from tests.fakes.media_files import container_file, silent_film, sound_file

LIMITS = DecodeLimits(1_000_000, 4, 2.0)
RATE = 16_000
IN_CONTAINERS = ("MP4", "ALAC", "WEBM", "AAC")
PADDING = {"MP4": 1024, "ALAC": 0, "WEBM": 0, "AAC": 3072}
"""Samples before and after the sound that a format cannot mark, at the rate of the file."""


def hertz(samples: npt.NDArray[np.float32]) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * RATE / len(samples))


@pytest.mark.parametrize("kind", IN_CONTAINERS)
@pytest.mark.parametrize("channels", [1, 2])
def test_a_tone_in_a_container_is_decoded_in_full_and_at_its_place(kind: str, channels: int) -> None:
    file = container_file(kind, seconds=1.0, rate=48_000, channels=channels)
    assert sound_format(file) == ("MP4" if kind == "ALAC" else kind)
    assert image_format(file) is None
    assert is_of("audio", file)
    samples = decode_sound(file, RATE, LIMITS)
    assert samples.dtype == np.float32
    assert RATE <= len(samples) <= RATE + PADDING[kind] // 3
    assert abs(hertz(samples) - 440) < 1.5
    assert abs(np.sqrt(2) * samples[4000:12_000].std() - 0.5) < 0.01
    if kind == "ALAC":  # without loss
        expected = decode_sound(sound_file("WAV", seconds=1.0, rate=48_000, channels=channels), RATE, LIMITS)
        assert np.abs(samples - expected).max() < 2 / 2**15


@pytest.mark.parametrize("rate", [8000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3", "MP4", "AAC"])
def test_440_hz_stay_440_hz_from_every_rate(kind: str, rate: int) -> None:
    file = container_file(kind, 1.0, rate) if kind in IN_CONTAINERS else sound_file(kind, 1.0, rate)
    samples = decode_sound(file, RATE, LIMITS)
    middle = samples[2000:14_000]
    assert abs(hertz(middle) - 440) < 1.5
    spectrum = np.abs(np.fft.rfft(middle * np.kaiser(len(middle), 14)))
    frequencies = np.fft.rfftfreq(len(middle), 1 / RATE)
    elsewhere = spectrum[np.abs(frequencies - 440) > 60].max() / spectrum.max()
    assert 20 * np.log10(elsewhere) < (-80 if kind in ("WAV", "FLAC") else -40)  # aliases, and noise of lossy codecs


def test_opus_in_ogg_is_decoded() -> None:
    file = BytesIO()
    tone = np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000)
    soundfile.write(file, tone, 48_000, format="OGG", subtype="OPUS")
    assert abs(hertz(decode_sound(file.getvalue(), RATE, LIMITS)) - 440) < 1.5


@pytest.mark.parametrize("kind", IN_CONTAINERS)
def test_too_many_seconds_in_a_container_are_refused(kind: str) -> None:
    with pytest.raises(TooLarge) as error:
        decode_sound(container_file(kind, seconds=2.5), RATE, LIMITS)
    assert error.value.setting == "media.max_audio_seconds"


@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_a_video_without_sound_says_so(kind: str) -> None:
    with pytest.raises(Unreadable, match="has no audio track"):
        decode_sound(silent_film(kind), RATE, LIMITS)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("kind", ["WAV", "FLAC", "MP4", "ALAC"])
def test_the_formats_that_tell_their_length_are_refused_if_they_are_cut_off(kind: str, share: float) -> None:
    whole = container_file(kind, 2.0) if kind in IN_CONTAINERS else sound_file(kind, 2.0)
    with pytest.raises(Unreadable) as error:
        decode_sound(whole[: int(share * len(whole))], RATE, LIMITS)
    assert str(error.value)


def test_a_cut_off_file_names_both_lengths() -> None:
    with pytest.raises(Unreadable, match="is cut off: its header announces 32000 bytes of samples, and 15956 follow"):
        decode_sound(sound_file("WAV", 1.0)[:16_000], RATE, LIMITS)


@pytest.mark.parametrize("size", [0x7FFF_F000, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FF00, 0xFFFF_FFFF, 0])
def test_a_wav_file_of_an_unknown_size_is_read_to_its_end(size: int) -> None:
    """Programs that write to a pipe, such as espeak-ng, ffmpeg and arecord, write such sizes."""
    file = sound_file("WAV", 1.0)
    lying = file[:40] + struct.pack("<I", size) + file[44:]
    assert np.array_equal(decode_sound(lying, RATE, LIMITS), decode_sound(file, RATE, LIMITS))


def wav(channels: int = 1, rate: int = RATE, bits: int = 16, align: int = 2, size: int | None = None) -> bytes:
    samples = bytes(3200)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, min(rate * align, 2**32 - 1), align, bits)
    data = struct.pack("<4sI", b"data", len(samples) if size is None else size) + samples
    return b"RIFF" + struct.pack("<I", 4 + len(form) + len(data)) + b"WAVE" + form + data


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (wav(channels=0), "readable|channels"),
        (wav(channels=65, align=130), "65 channels|readable"),
        (wav(channels=65_535, align=65_535), "channels|readable"),
        (wav(rate=0), "samples per second|readable"),
        (wav(rate=2**32 - 1), "samples per second|readable"),
        (wav(bits=0), "readable"),
        (wav(bits=255), "readable"),
        (wav(size=2**30), "is cut off"),
        (wav(size=3_000_000_000), "is cut off"),
        (b"", "is not a WAV"),
        (b"\0" * 1000, "is not a WAV"),
        (b"RIFF\xff\xff\xff\xffWAVE", "readable"),
        (b"fLaC", "readable"),
        (b"OggS", "readable"),
        (b"ID3", "readable"),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "readable|audio|samples"),
        (b"\xff\xf1L@", "readable|audio|samples"),
        (b"\x1aE\xdf\xa3\x9fB\x82\x84webm", "readable|audio|samples"),
        (b"\0\0\0\x18ftypavif" + bytes(16), "is not a WAV"),
        (b"\xff\xd8\xff\xe0" + bytes(100), "is not a WAV"),
    ],
)
def test_lying_headers_are_unreadable(file: bytes, says: str) -> None:
    with pytest.raises(Unreadable, match=says):
        decode_sound(file, RATE, LIMITS)


def test_the_name_of_a_file_does_not_matter_but_its_content_does() -> None:
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        assert len(decode_sound(sound_file(kind), RATE, LIMITS)) >= 1600
