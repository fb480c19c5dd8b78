"""Decoded images equal transformers' decoded images, for every format, mode and orientation.

The reference is ``load_image`` for opaque images. For images with alpha, the reference is ``convert_to_rgb`` of
transformers' image processors.
"""

import base64
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from penstock_frontend.processing.media.decode import decode_image, open_image
from penstock_frontend.processing.media.worker_messages import DecodeLimits
from tests.fakes.media_files import image_file, saved

LIMITS = DecodeLimits(max_pixels=1_000_000, max_frames=1, max_audio_seconds=1.0)
ORIENTATION = 0x0112


def assert_same(data: bytes) -> None:
    expected = load_image(base64.b64encode(data).decode())
    found = decode_image(open_image(data, LIMITS))
    assert found.mode == expected.mode == "RGB"
    assert np.array_equal(np.asarray(found), np.asarray(expected))


def assert_same_on_white(data: bytes) -> None:
    expected = convert_to_rgb(ImageOps.exif_transpose(Image.open(BytesIO(data))), return_numpy=True)
    found = decode_image(open_image(data, LIMITS))
    assert found.mode == "RGB"
    assert np.array_equal(np.asarray(found), expected)


def random(shape: tuple[int, ...], dtype: type = np.uint8) -> Any:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape, dtype)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("size", [(1, 1), (7, 3), (64, 48), (255, 1)])
def test_each_format(kind: str, size: tuple[int, int]) -> None:
    assert_same(image_file(kind, size))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_each_orientation(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = image_file(kind, (16, 8), exif=exif.tobytes())
    assert_same(data)
    turned = decode_image(open_image(data, LIMITS)).size
    assert turned == ((8, 16) if orientation in (5, 6, 7, 8) else (16, 8))


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(random((8, 8))),
        Image.fromarray(random((8, 8, 3))).quantize(7),
        Image.fromarray(random((8, 8))).convert("1"),
    ],
    ids=["L", "P", "1"],
)
def test_each_mode_of_png(image: Image.Image) -> None:
    assert_same(saved(image, "PNG"))


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_alpha(mode: str, kind: str) -> None:
    image = Image.fromarray(random((40, 30, len(mode))), mode)
    assert_same_on_white(saved(image.convert("RGBA") if kind == "WEBP" else image, kind, lossless=True, exact=True))


@pytest.mark.parametrize("transparency", [0, 3, bytes(range(0, 250, 25))])
def test_palettes_with_transparency(transparency: Any) -> None:
    image = Image.fromarray(random((8, 8, 3))).quantize(10)
    for kind in ("PNG", "GIF") if isinstance(transparency, int) else ("PNG",):
        assert_same_on_white(saved(image, kind, transparency=transparency))


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 10}], ids=str)
def test_each_mode_of_jpeg(mode: str, options: dict[str, Any]) -> None:
    assert_same(image_file("JPEG", (40, 24), mode=mode, **options))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_picture_of_an_animation(kind: str) -> None:
    images = [Image.fromarray(random((8, 8, 3)) // (n + 1)) for n in range(3)]
    assert_same(saved(images[0], kind, save_all=True, append_images=images[1:], duration=20))


def test_several_pictures_in_one_jpeg_file() -> None:
    file = BytesIO()
    first, second = (Image.fromarray(random((8, 8, 3)) // n) for n in (1, 2))
    first.save(file, "MPO", save_all=True, append_images=[second])
    assert_same(file.getvalue())
