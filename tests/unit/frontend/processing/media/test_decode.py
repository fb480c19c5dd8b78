"""Decoding of images, videos and sound: exact values, limits, and unreadable files."""

import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock_frontend.processing.media.decode import VideoFrames, decode_image, decode_sound, open_image, resampled
from penstock_frontend.processing.media.worker_messages import DecodeLimits, TooLarge, Unreadable
from tests.fakes.media_files import image_file, png, png_bomb, saved, sound_file

LIMITS = DecodeLimits(max_pixels=10_000, max_frames=4, max_audio_seconds=2.0)
WHITE = (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_a_picture_without_loss_comes_as_it_was(kind: str) -> None:
    data = image_file(kind, lossless=True)
    decoded = decode_image(open_image(data, LIMITS))
    assert decoded.mode == "RGB"
    assert np.array_equal(np.asarray(decoded), np.asarray(Image.open(BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize(("width", "height"), [(10_001, 1), (101, 100), (2**31 - 1, 2**31 - 1), (60_000, 60_000)])
def test_pixels_are_refused_from_the_header(width: int, height: int) -> None:
    with pytest.raises(TooLarge) as error:
        open_image(png(width, height, b""), LIMITS)
    assert (error.value.setting, error.value.limit) == ("media.max_pixels", 10_000)
    assert str(width * height) in error.value.what


def test_a_picture_of_as_many_pixels_as_are_allowed_is_decoded() -> None:
    assert decode_image(open_image(png_bomb(100, 100), LIMITS)).size == (100, 100)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "ICO", "PPM", "TGA", "PCX", "JPEG2000"])
def test_other_formats_are_not_opened(kind: str) -> None:
    with pytest.raises(Unreadable, match="not a JPEG, PNG, WebP or GIF"):
        open_image(saved(Image.new("RGB", (4, 4)), kind), LIMITS)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_a_truncated_picture_is_unreadable(kind: str) -> None:
    data = image_file(kind, size=(64, 64))
    for length in (len(data) // 2, 20, 12):
        with pytest.raises(Unreadable):
            decode_image(open_image(data[:length], LIMITS))


@pytest.mark.parametrize("inside", ["BMP", "TIFF"])
def test_a_format_is_not_guessed_behind_anothers_first_bytes(inside: str) -> None:
    data = saved(Image.new("RGB", (4, 4)), inside)
    with pytest.raises(Unreadable):
        open_image(b"\xff\xd8\xff" + data[3:], LIMITS)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_picture_is_taken(kind: str) -> None:
    first, second = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    data = saved(first, kind, save_all=True, append_images=[second], duration=10, lossless=True)
    assert Image.open(BytesIO(data)).n_frames == 2
    pixel = decode_image(open_image(data, LIMITS)).getpixel((0, 0))
    assert isinstance(pixel, tuple)
    assert pixel[0] > 200 > 50 > pixel[2]


def decoded(data: bytes) -> list[tuple[int, ...]]:
    image = decode_image(open_image(data, LIMITS))
    assert image.mode == "RGB"
    return [tuple(int(value) for value in pixel) for pixel in np.asarray(image).reshape(-1, 3)]


RGBA = np.array([[[9, 8, 7, 0], [9, 8, 7, 255], [0, 100, 255, 51]]], np.uint8)
ON_WHITE = [WHITE, (9, 8, 7), (204, 224, 255)]


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True, "exact": True})])
def test_alpha_is_composited_on_white(kind: str, options: dict[str, Any]) -> None:
    assert decoded(saved(Image.fromarray(RGBA, "RGBA"), kind, **options)) == ON_WHITE


def test_hidden_colours_change_nothing() -> None:
    hidden = RGBA.copy()
    hidden[0, 0, :3] = 200
    assert decoded(saved(Image.fromarray(hidden, "RGBA"), "PNG")) == ON_WHITE


def test_grey_with_alpha_is_composited_on_white() -> None:
    grey = np.array([[[9, 0], [9, 255], [0, 51]]], np.uint8)
    assert decoded(saved(Image.fromarray(grey, "LA"), "PNG")) == [WHITE, (9, 9, 9), (204, 204, 204)]


@pytest.mark.parametrize(
    ("kind", "transparency", "expected"),
    [
        ("PNG", 1, [(0, 0, 0), WHITE, (70, 80, 90)]),
        ("PNG", b"\xff\x33\0", [(0, 0, 0), (204, 224, 255), WHITE]),
        ("GIF", 1, [(0, 0, 0), WHITE, (70, 80, 90)]),
    ],
)
def test_palettes_with_transparency_are_composited_on_white(kind: str, transparency: Any, expected: Any) -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([0, 0, 0, 0, 100, 255, 70, 80, 90])
    assert decoded(saved(image, kind, transparency=transparency)) == expected


@pytest.mark.parametrize(
    ("depth", "colour_type", "row", "key", "expected"),
    [
        (1, 0, b"\x40", (1,), [0, 255, 0]),
        (1, 0, b"\x40", (0,), [255, 255, 255]),
        (2, 0, b"\x18", (0,), [255, 85, 170]),
        (2, 0, b"\x18", (2,), [0, 85, 255]),
        (4, 0, b"\x07\x90", (7,), [0, 255, 9 * 17]),
        (8, 0, b"\0\x07\x09", (7,), [0, 255, 9]),
        (8, 0, b"\0\x07\x09", (0x0107,), [0, 255, 9]),
        (16, 0, b"\0\0\x12\x34\x12\x35", (0x1234,), [0, 255, 0x12]),
    ],
)
def test_a_transparent_grey_is_white(depth: int, colour_type: int, row: bytes, key: Any, expected: Any) -> None:
    data = png(3, 1, zlib.compress(b"\0" + row), depth=depth, colour_type=colour_type, transparent=key)
    assert decoded(data) == [(grey,) * 3 for grey in expected]


@pytest.mark.parametrize(("depth", "factor"), [(8, 1), (16, 0x0101)])
def test_a_transparent_colour_is_white(depth: int, factor: int) -> None:
    samples = np.array([1, 2, 3, 1, 2, 4, 0, 0, 0]) * factor
    row = samples.astype(">u2" if depth == 16 else "u1").tobytes()
    key = (1 * factor, 2 * factor, 3 * factor)
    data = png(3, 1, zlib.compress(b"\0" + row), depth=depth, colour_type=2, transparent=key)
    assert decoded(data) == [WHITE, (1, 2, 4), (0, 0, 0)]


@pytest.mark.parametrize(
    ("colour_type", "samples", "expected"),
    [
        (0, [0, 255, 0x1234, 65_535], [(0,) * 3, (0,) * 3, (0x12,) * 3, WHITE]),
        (2, [0x1234, 0x5678, 0x9ABC], [(0x12, 0x56, 0x9A)]),
        (4, [0x0900, 0, 0x0900, 65_535, 0, 0x3333], [WHITE, (9,) * 3, (204,) * 3]),
        (6, [0x0900, 0, 0, 0, 0x0900, 0x0800, 0x0700, 65_535], [WHITE, (9, 8, 7)]),
    ],
    ids=["grey", "RGB", "grey and alpha", "RGBA"],
)
def test_16_bits_are_scaled_to_8(colour_type: int, samples: list[int], expected: list[Any]) -> None:
    data = png(
        len(expected), 1, zlib.compress(b"\0" + np.array(samples, ">u2").tobytes()), depth=16, colour_type=colour_type
    )
    assert decoded(data) == expected


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_transparent_pictures_are_turned(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = decode_image(open_image(saved(Image.fromarray(RGBA, "RGBA"), "PNG", exif=exif.tobytes()), LIMITS))
    assert image.size == ((1, 3) if orientation == 6 else (3, 1))
    found = [tuple(int(value) for value in pixel) for pixel in np.asarray(image).reshape(-1, 3)]
    assert found == (ON_WHITE[::-1] if orientation == 3 else ON_WHITE)


def test_of_a_transparent_animation_the_first_picture_is_taken() -> None:
    first, second = (Image.new("RGBA", (8, 8), (9, 9, 9, alpha)) for alpha in (0, 255))
    for kind in ("WEBP", "PNG"):
        data = saved(first, kind, save_all=True, append_images=[second], duration=10, lossless=True)
        assert set(decoded(data)) == {WHITE}


def test_frames_are_decoded_one_by_one_when_they_are_asked_for() -> None:
    broken = image_file("PNG", size=(64, 64))[:200]
    frames = VideoFrames([image_file("PNG", size=(64, 64)), broken], LIMITS)
    assert len(frames) == 2
    assert frames[0].size == (64, 64)
    with pytest.raises(Unreadable):
        frames[1]
    assert [frame.size for frame in frames[:1]] == [(64, 64)]


def test_frames_of_different_sizes_are_unreadable() -> None:
    with pytest.raises(Unreadable, match="more than one size"):
        VideoFrames([image_file(size=(8, 6)), image_file(size=(6, 8))], LIMITS)


def test_too_many_frames_are_refused() -> None:
    with pytest.raises(TooLarge) as error:
        VideoFrames([image_file()] * 5, LIMITS)
    assert error.value.setting == "media.max_frames"


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_sound_comes_as_mono_at_the_rate_asked_for(kind: str) -> None:
    samples = decode_sound(sound_file(kind, seconds=1.0, rate=32_000, channels=2), 16_000, LIMITS)
    assert samples.dtype == np.float32
    assert abs(len(samples) - 16_000) <= (0 if kind in ("WAV", "FLAC") else 1600)
    spectrum = np.abs(np.fft.rfft(samples))
    assert abs(np.argmax(spectrum) * 16_000 / len(samples) - 440) < 2


def test_channels_are_averaged() -> None:
    import soundfile

    file = BytesIO()
    soundfile.write(
        file, np.stack([np.full(800, 0.5), np.full(800, -0.25)], axis=1), 16_000, format="WAV", subtype="FLOAT"
    )
    assert np.allclose(decode_sound(file.getvalue(), 16_000, LIMITS), 0.125)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_too_many_seconds_are_refused(kind: str) -> None:
    with pytest.raises(TooLarge) as error:
        decode_sound(sound_file(kind, seconds=2.5), 16_000, LIMITS)
    assert error.value.setting == "media.max_audio_seconds"


def test_a_header_that_says_nothing_of_the_length_does_not_help() -> None:
    data = bytearray(sound_file("FLAC", seconds=2.5))
    data[21] &= 0xF0  # total samples in STREAMINFO: 36 bits
    data[22:26] = bytes(4)
    with pytest.raises((TooLarge, Unreadable)):
        decode_sound(bytes(data), 16_000, LIMITS)


@pytest.mark.parametrize("kind", ["AIFF", "AU", "CAF", "W64", "RF64"])
def test_other_sounds_are_not_opened(kind: str) -> None:
    with pytest.raises(Unreadable, match="not a WAV, FLAC, Ogg, MP3, MP4, WebM or AAC file"):
        decode_sound(sound_file(kind), 16_000, LIMITS)


@pytest.mark.parametrize(
    "data", [sound_file()[:44], sound_file()[:20], b"RIFF\0\0\0\0WAVE", b"fLaC" + bytes(100), b"OggS" + bytes(60)]
)
def test_sound_without_samples_is_unreadable(data: bytes) -> None:
    with pytest.raises(Unreadable):
        decode_sound(data, 16_000, LIMITS)


def test_samples_that_are_no_numbers_are_unreadable() -> None:
    import soundfile

    file = BytesIO()
    soundfile.write(file, np.array([0.0, np.nan, np.inf]), 16_000, format="WAV", subtype="FLOAT")
    with pytest.raises(Unreadable, match="not finite numbers"):
        decode_sound(file.getvalue(), 16_000, LIMITS)


@pytest.mark.parametrize("rate", [1, 999, 1_000_000])
def test_a_rate_beyond_reason_is_unreadable(rate: int) -> None:
    with pytest.raises(Unreadable, match="samples per second"):
        decode_sound(sound_file(seconds=100 / rate, rate=rate), 16_000, LIMITS)


EDGE = 0.05
"""Seconds at each end, at the border to silence, that are not compared."""


def tone(hertz: float, rate: int, seconds: float = 0.5) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def inner(
    samples: "np.ndarray[tuple[int], np.dtype[np.float32]]", rate: int
) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return samples[int(EDGE * rate) : -int(EDGE * rate)]


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [(44_100, 16_000), (48_000, 16_000), (8000, 16_000), (22_050, 24_000), (16_000, 44_100), (44_101, 16_000)],
)
def test_a_tone_stays_the_tone_that_it_is(rate: int, wanted: int) -> None:
    out = resampled(tone(1000, rate), rate, wanted)
    assert out.dtype == np.float32
    assert np.abs(inner(out - tone(1000, wanted, len(out) / wanted), wanted)).max() < 1e-5


@pytest.mark.parametrize("rate", [44_100, 48_000])
def test_a_tone_that_the_lower_rate_cannot_have_is_gone(rate: int) -> None:
    assert np.abs(inner(resampled(tone(8800, rate), rate, 16_000), 16_000)).max() < 1e-5


@pytest.mark.parametrize("count", [1, 2, 3, 100, 441, 442])
@pytest.mark.parametrize(("rate", "wanted"), [(44_100, 16_000), (8000, 16_000), (7, 5)])
def test_there_are_as_many_samples_as_last_so_long(count: int, rate: int, wanted: int) -> None:
    assert len(resampled(np.ones(count, np.float32), rate, wanted)) == -(-count * wanted // rate)


def test_the_same_rate_changes_nothing() -> None:
    samples = tone(440, 16_000)
    assert resampled(samples, 16_000, 16_000) is samples
