"""Conversion of images with any mode to RGB. Transparent pixels become white, and 16-bit grey is scaled."""

from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import ImageFile
from PIL.Image import Image

_TILE = 1024
"""Width and height in pixels of the tiles in which an image is converted. Because of the tiles, the conversion needs
only about 16 MiB of additional memory.
"""
_DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_MAX_DEEP = 65_535
_GREY_STEPS = {"L;2": 85, "L;4": 17}
"""Factors by which Pillow multiplies grey samples that have 2 or 4 bits."""


def flattened(image: Image) -> Image:
    """Return the image converted to the mode RGB.

    Alpha is composited on white, as in ``convert_to_rgb`` of transformers. Palettes with alpha and a transparent color
    are handled the same. Grey modes with more than 8 bits (I and I;16) are read as 16 bits, of which the upper 8 bits
    are kept. Pillow does the same for 16-bit color images. Values of mode F are clipped to 0 to 255, as in Pillow.

    Raises:
        ValueError: Pillow cannot convert the image's mode.
    """
    if image.mode not in _DEEP and not image.has_transparency_data:
        return image.convert("RGB")
    image.load()
    result = Pillow.new("RGB", image.size, "white")
    for top in range(0, image.height, _TILE):
        for left in range(0, image.width, _TILE):
            box = (left, top, min(left + _TILE, image.width), min(top + _TILE, image.height))
            tile = _with_alpha(image.crop(box))
            result.paste(tile, box[:2], tile)
    return result


def transparent_colour(image: Image) -> Any:
    """Return the transparent color of an undecoded PNG file, as a value of the decoded pixels.

    Return None if the file has no transparent color.

    The function converts the color, because Pillow returns the value in the file. Pillow does not scale grey with 2 and
    4 bits, and does not reduce 16 bits per color to 8 bits. 16-bit colors that differ only in the lower 8 bits count as
    equal.
    """
    colour = image.info.get("transparency")
    if image.format != "PNG" or not isinstance(image, ImageFile.ImageFile) or not image.tile:
        return colour
    raw = image.tile[0].args
    if image.mode == "RGB" and isinstance(colour, tuple):
        return tuple(sample >> 8 if raw == "RGB;16B" else sample & 0xFF for sample in colour)
    if image.mode == "L" and isinstance(colour, int):
        step = _GREY_STEPS.get(str(raw), 1)
        return colour % (255 // step + 1) * step
    return colour


def _with_alpha(tile: Image) -> Image:
    """Return a tile of the image in the mode RGBA."""
    if tile.mode in _DEEP:
        return _deep_with_alpha(tile)
    if tile.mode == "La":  # Pillow can convert an image with this mode only to LA
        tile = tile.convert("LA")
    return tile.convert("RGBA")


def _deep_with_alpha(tile: Image) -> Image:
    samples = np.asarray(tile).clip(0, _MAX_DEEP)
    grey = Pillow.fromarray((samples >> 8).astype(np.uint8))
    colour = tile.info.get("transparency")
    alpha = np.full(samples.shape, 255, np.uint8) if colour is None else np.where(samples == colour, 0, 255)
    return Pillow.merge("LA", (grey, Pillow.fromarray(alpha.astype(np.uint8)))).convert("RGBA")
