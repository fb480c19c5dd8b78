"""Hostile media, generated from a number."""

import base64
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock_common.types.media import EMBEDS, Modality, TensorData
from penstock_frontend.call_types import EncodedFile, Features, Frame, Frames, MediaPart, Source, Url
from tests.fakes.media_files import image_file, png, png_bomb, sound_file

IMAGES = [image_file(kind, (40, 30), seed=n) for n, kind in enumerate(("JPEG", "PNG", "WEBP", "GIF"))]
SOUNDS = [sound_file(kind) for kind in ("WAV", "FLAC", "OGG", "MP3")]
OTHERS = [
    b"BM" + bytes(100),
    b"II*\0" + bytes(100),
    b"MM\0*" + bytes(100),
    b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    b"%PDF-1.7\n",
    b"%!PS-Adobe-3.0 EPSF-3.0\n",
    b"\0\0\0\x1cftypavif" + bytes(60),
    b"\0\0\0\x18ftypheic" + bytes(60),
    b"\0\0\0\x18ftypmp42" + bytes(60),
    b"\x1aE\xdf\xa3" + bytes(60),
    b"PK\x03\x04" + bytes(60),
    b"\x7fELF" + bytes(60),
    b"icns" + bytes(60),
    b"8BPS" + bytes(60),
    b"#!/bin/sh\n",
    b"",
]
URLS = [
    "http://127.0.0.1/{}",
    "http://localhost:8000/{}",
    "http://[::1]/{}",
    "http://2130706433/{}",
    "http://0x7f000001/{}",
    "http://0177.0.0.1/{}",
    "http://127.1/{}",
    "http://169.254.169.254/latest/meta-data?secret={}",
    "https://metadata.google.internal/{}",
    "https://images.test@127.0.0.1/{}",
    "https://127.0.0.1#@images.test/{}",
    "https://images.test.attacker.test/{}",
    "https://images.test\\@127.0.0.1/{}",
    "https://private.images.test/{}",
    "https://rebinding.images.test/{}",
    "https://mixed.images.test/{}",
    "https://mapped.images.test/{}",
    "https://nat64.images.test/{}",
    "https://nowhere.images.test/{}",
    "file:///etc/passwd?{}",
    "ftp://images.test/{}",
    "javascript:alert({})",
    "unix:/var/run/docker.sock?{}",
    "https://images.test:22/{}",
    "https://images.test\r\nX: y/{}",
    "https://\u0456mages.test/{}",
    "data:text/html;base64,{}",
    "data:image/png,{}",
    "data:image/png;base64,{}!",
    "data:{}",
    "",
]
"""URL templates. ``{}`` is replaced by a number, so that all URLs differ. ``addresses`` resolves names below
images.test.
"""

_ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"size": 10**30},
    {"size": float("nan"), "\0": -(2**63) - 1},
    {"size": {"height": -1, "width": 1e308}},
    {"__class__": "object", "trust_remote_code": True, "pretrained_model_name_or_path": "/etc/passwd"},
    {"fault": "wrong"},
    {"fault": "raise"},
]
_ADDRESSES = {
    "private.images.test": ["10.0.0.1"],
    "mixed.images.test": ["93.184.216.34", "192.168.0.1"],
    "mapped.images.test": ["::ffff:127.0.0.1"],
    "nat64.images.test": ["64:ff9b::7f00:1"],
}


class Addresses:
    """Resolver. One name has a public address at the first query, and private addresses after that."""

    def __init__(self) -> None:
        self._asked = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        if host == "rebinding.images.test":
            self._asked += 1
            return ["93.184.216.34", "127.0.0.1"] if self._asked == 1 else ["127.0.0.1"]
        if host not in _ADDRESSES:
            raise OSError(f"no such name: {host}")
        return _ADDRESSES[host]


def hostile(number: int) -> MediaPart:
    """Return hostile media item ``number``."""
    dice = random.Random(number)
    modality, source = dice.choice(_KINDS)(dice)
    return MediaPart(
        modality=modality,
        source=source,
        field=f"messages[0].content[{number}]",
        processor_kwargs=dice.choice(_ARGUMENTS),
    )


def mutated(dice: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8, 64))):
        made[dice.randrange(len(made))] = dice.randrange(256)
    return bytes(made)


def _broken_image(dice: random.Random) -> tuple[Modality, Source]:
    data = dice.choice(IMAGES)
    return "image", _file(dice, data[: dice.randrange(len(data))] if dice.random() < 0.3 else mutated(dice, data))


def _broken_sound(dice: random.Random) -> tuple[Modality, Source]:
    data = dice.choice(SOUNDS)
    return "audio", _file(dice, data[: dice.randrange(len(data))] if dice.random() < 0.3 else mutated(dice, data))


def _joined(dice: random.Random) -> tuple[Modality, Source]:
    """Return a file that consists of the beginning of one file and the end of another file."""
    one, other = dice.choice(IMAGES + SOUNDS), dice.choice(IMAGES + SOUNDS + OTHERS)
    return dice.choice(("image", "audio")), _file(dice, one[: dice.randrange(64)] + other[dice.randrange(64) :])


def _other_format(dice: random.Random) -> tuple[Modality, Source]:
    return dice.choice(("image", "audio", "video")), _file(dice, dice.choice(OTHERS) + bytes(dice.randrange(9)))


def _other_modality(dice: random.Random) -> tuple[Modality, Source]:
    return (
        ("image", _file(dice, dice.choice(SOUNDS)))
        if dice.random() < 0.5
        else ("audio", _file(dice, dice.choice(IMAGES)))
    )


def _bomb(dice: random.Random) -> tuple[Modality, Source]:
    width, height = (dice.choice((1, 5000, 30_000, 65_535, 2**31 - 1)) for _ in range(2))
    lie = png(width, height, zlib.compress(bytes(dice.randrange(1000))))
    gif = (
        b"GIF89a"
        + struct.pack("<HHBBB", width % 65_536, height % 65_536, 0x80, 0, 0)
        + bytes(6)
        + b",\0\0\0\0\1\0\1\0\0"
    )
    return "image", _file(dice, dice.choice((lie, lie, gif, _BOMB)))


def _bad_frames(dice: random.Random) -> tuple[Modality, Source]:
    files = [mutated(dice, dice.choice(IMAGES)) for _ in range(dice.randrange(6))]
    times = [dice.choice((0.0, 1.0, -1.0, float("nan"), float("inf"), 1e308)) for _ in files]
    return dice.choice(("image", "video", "video")), Frames([Frame(*each) for each in zip(files, times, strict=True)])


def _bad_tensors(dice: random.Random) -> tuple[Modality, Source]:
    values = np.array([dice.choice((0.0, 1.0, np.nan, np.inf, -np.inf)) for _ in range(4)], np.float32)
    shape = dice.choice(((4, 1), (2, 2), (5, 1), (-2, -2), (2**60, 2**60), (0,), ()))
    name = dice.choice((EMBEDS, "pixel_values", "../../etc/passwd", "\0", "x" * 1000))
    dtype = dice.choice(("float32", "float16", "bfloat16", "int64", "uint8"))
    return "image", Features({name: TensorData(dtype, shape, values.tobytes())})


def _url(dice: random.Random) -> tuple[Modality, Source]:
    return dice.choice(("image", "audio")), Url(dice.choice(URLS).format(dice.randrange(10**9)))


def _file(dice: random.Random, data: bytes) -> Source:
    if dice.random() < 0.5:
        return EncodedFile(data)
    return Url("data:image/png;base64," + base64.b64encode(data).decode())


_BOMB = png_bomb(3000, 3000)
_KINDS: list[Callable[[random.Random], tuple[Modality, Source]]] = [
    _broken_image,
    _broken_sound,
    _joined,
    _other_format,
    _other_modality,
    _bomb,
    _bad_frames,
    _bad_tensors,
    _url,
    _url,
]
