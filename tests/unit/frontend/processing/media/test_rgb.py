"""Pixels by mode: the exact colour of each mode on white."""

from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from penstock_frontend.processing.media import rgb
from penstock_frontend.processing.media.rgb import flattened

WHITE = (255, 255, 255)


def pixels(image: Image.Image) -> list[tuple[int, ...]]:
    assert image.mode == "RGB"
    return [tuple(int(value) for value in pixel) for pixel in np.asarray(image).reshape(-1, 3)]


def image_of(mode: str, *values: Any) -> Image.Image:
    image = Image.new(mode, (len(values), 1))
    for x, value in enumerate(values):
        image.putpixel((x, 0), value)
    return image


def of_samples(samples: Any, mode: str) -> Image.Image:
    array = np.array([samples])
    return Image.frombytes(mode, (array.shape[1], 1), array.tobytes())


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (image_of("1", 0, 255), [(0, 0, 0), WHITE]),
        (image_of("L", 0, 7, 255), [(0, 0, 0), (7, 7, 7), WHITE]),
        (image_of("RGB", (1, 2, 3), WHITE), [(1, 2, 3), WHITE]),
        (image_of("RGBX", (1, 2, 3, 0), (1, 2, 3, 255)), [(1, 2, 3), (1, 2, 3)]),
        (image_of("CMYK", (0, 0, 0, 0), (0, 255, 255, 0), (0, 0, 0, 255)), [WHITE, (255, 0, 0), (0, 0, 0)]),
        (image_of("YCbCr", (0, 128, 128), (100, 128, 128)), [(0, 0, 0), (100, 100, 100)]),
        (image_of("HSV", (0, 255, 255), (0, 0, 90)), [(255, 0, 0), (90, 90, 90)]),
        (image_of("F", -1.0, 7.0, 255.0, 1e9), [(0, 0, 0), (7, 7, 7), WHITE, WHITE]),
    ],
    ids=lambda each: each.mode if isinstance(each, Image.Image) else "",
)
def test_modes_without_alpha_stay_as_pillow_has_them(image: Image.Image, expected: list[tuple[int, ...]]) -> None:
    assert pixels(flattened(image)) == expected


def test_lab_is_converted_by_its_profile() -> None:
    colours = image_of("RGB", (0, 0, 0), WHITE, (120, 120, 120))
    lab = ImageCms.profileToProfile(
        colours, ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    assert lab is not None
    assert np.abs(np.asarray(flattened(lab)).astype(int) - np.asarray(colours)).max() <= 1


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (
            image_of("RGBA", (9, 8, 7, 0), (9, 8, 7, 255), (0, 100, 255, 51), (0, 0, 0, 128)),
            [WHITE, (9, 8, 7), (204, 224, 255), (127, 127, 127)],
        ),
        (image_of("LA", (9, 0), (9, 255), (0, 51), (0, 128)), [WHITE, (9, 9, 9), (204,) * 3, (127,) * 3]),
        (image_of("RGBa", (0, 0, 0, 0), (9, 8, 7, 255), (0, 20, 51, 51)), [WHITE, (9, 8, 7), (204, 224, 255)]),
        (image_of("LA", (9, 0), (9, 255), (0, 51)).convert("La"), [WHITE, (9, 9, 9), (204,) * 3]),
        (image_of("RGBA", (9, 8, 7, 0), (9, 8, 7, 255), (0, 0, 0, 51)).convert("PA"), [WHITE, (9, 8, 7), (204,) * 3]),
    ],
    ids=["RGBA", "LA", "RGBa", "La", "PA"],
)
def test_alpha_is_composited_on_white(image: Image.Image, expected: list[tuple[int, ...]]) -> None:
    assert pixels(flattened(image)) == expected


@pytest.mark.parametrize(
    ("mode", "values", "colour", "expected"),
    [
        ("1", [0, 255], 0, [WHITE, WHITE]),
        ("1", [0, 255], 255, [(0, 0, 0), WHITE]),
        ("L", [0, 7, 9], 7, [(0, 0, 0), WHITE, (9, 9, 9)]),
        ("RGB", [(1, 2, 3), (1, 2, 4)], (1, 2, 3), [WHITE, (1, 2, 4)]),
        ("P", [0, 1, 2], 1, [(0, 0, 0), WHITE, (70, 80, 90)]),
        ("P", [0, 1, 2], b"\xff\x33\0", [(0, 0, 0), (204, 224, 255), WHITE]),
        ("I;16", [0, 0x0700, 0x0701], 0x0700, [(0, 0, 0), WHITE, (7, 7, 7)]),
        ("I", [0, 0x0700, 0x0701], 0x0700, [(0, 0, 0), WHITE, (7, 7, 7)]),
    ],
)
def test_a_transparent_colour_is_white(mode: str, values: list[Any], colour: Any, expected: list[Any]) -> None:
    image = image_of(mode, *values)
    if mode == "P":
        image.putpalette([0, 0, 0, 0, 100, 255, 70, 80, 90])
    image.info["transparency"] = colour
    assert pixels(flattened(image)) == expected


def test_a_palette_with_alpha_is_composited() -> None:
    image = image_of("P", 0, 1, 2)
    image.putpalette([9, 9, 9, 0, 0, 100, 255, 51, 70, 80, 90, 255], "RGBA")
    assert pixels(flattened(image)) == [WHITE, (204, 224, 255), (70, 80, 90)]


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I;16N", "I"])
def test_16_bits_of_grey_are_scaled_to_8(mode: str) -> None:
    kind = {"I;16B": ">u2", "I;16N": "=u2", "I": "=i4"}.get(mode, "<u2")
    image = of_samples(np.array([0, 255, 256, 0x1234, 32_768, 65_535], kind), mode)
    assert image.mode == mode
    assert pixels(flattened(image)) == [(grey,) * 3 for grey in (0, 0, 1, 0x12, 128, 255)]


def test_whole_numbers_beyond_16_bits_are_clipped() -> None:
    assert pixels(flattened(image_of("I", -5, 70_000, 2**31 - 1))) == [(0, 0, 0), WHITE, WHITE]


def test_tiles_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.random.default_rng(0).integers(0, 256, (13, 22, 4), np.uint8)
    image = Image.fromarray(samples, "RGBA")
    whole = np.asarray(flattened(image))
    monkeypatch.setattr(rgb, "_TILE", 5)
    assert np.array_equal(np.asarray(flattened(image)), whole)
    alpha = samples[..., 3:].astype(np.float64)
    exact = np.rint((samples[..., :3] * alpha + 255 * (255 - alpha)) / 255)
    assert np.array_equal(whole, exact)
