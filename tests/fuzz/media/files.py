"""Hostile media files."""

import struct
import zlib
from functools import cache
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from tests.fakes.hostile_media import IMAGES
from tests.fakes.media_files import image_file, png_bomb, saved, sound_file

MAX_SECONDS = 60.0


@cache
def too_large() -> bytes:
    """Return an image with more pixels than the limit."""
    return png_bomb(3000, 3000)


@cache
def largest() -> bytes:
    """Return an image with the maximum number of pixels."""
    return png_bomb(2000, 2000)


@cache
def large_image() -> bytes:
    """Return an image with almost the maximum number of pixels, which takes long to decode."""
    return saved(Image.radial_gradient("L").resize((1900, 1900)).convert("RGB"), "PNG", compress_level=1)


@cache
def long_sound() -> bytes:
    """Return audio of the maximum duration."""
    return sound_file("MP3", seconds=MAX_SECONDS - 1, rate=44_100)


@cache
def long_gif() -> bytes:
    """Return a GIF with hundreds of frames."""
    pictures = [Image.new("P", (400, 400), color % 256) for color in range(400)]
    return saved(pictures[0], "GIF", save_all=True, append_images=pictures[1:])


@cache
def silent_flac() -> bytes:
    """Return a small FLAC file with hours of silence."""
    return sound_file("FLAC", seconds=0.0, rate=8000)[:42] + _silence_frames()


def _silence_frames() -> bytes:
    return sound_file("FLAC", seconds=20.0, rate=8000)[42:]


def claiming_flac(rng: Random) -> bytes:
    """Return a FLAC file with a wrong length, rate or sample width in the header."""
    data = bytearray(sound_file("FLAC"))
    data[18:26] = rng.choice((b"\xff" * 8, b"\0" * 8, rng.randbytes(8)))  # rate, channels, bits, samples
    return bytes(data)


def chunk_bomb(kind: bytes) -> bytes:
    """Return a small image with a hundred megabytes in a chunk."""
    squeezed = _squeezed()
    content = {
        b"zTXt": b"Comment\0\0" + squeezed,
        b"iTXt": b"Comment\0\1\0\0\0" + squeezed,
        b"iCCP": b"profile\0\0" + squeezed,
        b"eXIf": b"II*\0\x08\0\0\0\xff\xff" + bytes(65_535),
    }[kind]
    chunk = struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    small = image_file("PNG", (40, 30))
    return small[:33] + chunk + small[33:]


@cache
def _squeezed() -> bytes:
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(2**20)) for _ in range(100)) + packer.flush()


def sized_jpeg(width: int, height: int) -> bytes:
    """Return a small image whose header claims a large size."""
    data = bytearray(IMAGES[0])
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def sized_webp(width: int, height: int) -> bytes:
    """Return a small image whose header claims a large size."""
    data = bytearray(image_file("WEBP", (40, 30)))
    at = data.index(b"VP8 ") + 8 + 6
    data[at : at + 4] = struct.pack("<HH", width, height)
    return bytes(data)


def wav(rate: int, samples: int, channels: int = 1, bits: int = 16, claimed: int | None = None) -> bytes:
    """Return a WAV file. ``claimed`` is the number of bytes in the header."""
    size = samples * channels * 2 if claimed is None else claimed
    head = struct.pack("<HHIIHH", 1, channels, rate, (rate * channels * 2) % 2**32, (channels * 2) % 65_536, bits)
    data = bytes(samples * channels * 2)
    total = struct.pack("<I", min(36 + size, 2**32 - 1))
    return b"RIFF" + total + b"WAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", size) + data


def float_wav(samples: np.ndarray[Any, Any]) -> bytes:
    """Return a WAV file with these values, even if they are invalid."""
    head = struct.pack("<HHIIHH", 3, 1, 16_000, 64_000, 4, 32)
    data = samples.tobytes()
    body = b"WAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body
