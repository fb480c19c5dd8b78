"""Hostile media items, each with the allowed answers."""

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np

from penstock_common.types.media import DTYPE_BYTES, EMBEDS, MODALITIES, Modality, TensorData
from penstock_frontend.call_types import EncodedFile, Features, Frame, Frames, Source, Url
from tests.fakes.hostile_media import IMAGES, OTHERS, SOUNDS, URLS, mutated
from tests.fakes.media_files import image_file, png
from tests.fuzz.media import files, hosts
from tests.fuzz.media.names import NAMES
from tests.fuzz.variants import Variant

UNREADABLE, TOO_LARGE, TOO_MANY = "MEDIA_UNREADABLE", "MEDIA_TOO_LARGE", "MEDIA_TOO_MANY"
NOT_ALLOWED, FETCH_FAILED = "MEDIA_NOT_ALLOWED", "MEDIA_FETCH_FAILED"
INVALID, NOT_SERVED = "INVALID_FIELD", "NOT_SERVED_YET"
MAX_PIXELS, MAX_BYTES, MAX_FRAMES, MAX_SECONDS = 4_000_000, 1_000_000, 32, files.MAX_SECONDS
"""Limits configured on the attacked frontends."""
_PATCH, _NUMBERS = 8, 3 * 2 * 8 * 8
"""Pixels per side of a patch, and numbers per patch, of the vision model."""


class Item(NamedTuple):
    """A media item.

    Attributes:
        reasons: Allowed reasons of a refusal.
        taken: Whether the request may succeed.
        arguments: Arguments of the processor.
    """

    attack: str
    modality: Modality
    source: Source
    reasons: frozenset[str]
    taken: bool
    arguments: dict[str, Any] = {}


def good(rng: Random, variant: Variant) -> Item:
    """Return an item that the frontend must accept."""
    if variant.media == ("audio",):
        return Item("good", "audio", EncodedFile(rng.choice(SOUNDS)), frozenset(), taken=True)
    return Item("good", "image", EncodedFile(rng.choice(IMAGES)), frozenset(), taken=True)


def slow(rng: Random, variant: Variant) -> Item:
    """Return an item that takes long to decode. All items differ.

    The frontend must accept images. Audio is longer than the model's limit.
    """
    if variant.media == ("audio",):
        sound = EncodedFile(files.long_sound() + rng.randbytes(8))
        return Item("slow", "audio", sound, frozenset({UNREADABLE, TOO_LARGE}), taken=False)
    return Item("slow", "image", EncodedFile(files.large_image() + rng.randbytes(8)), frozenset(), taken=True)


def hostile(rng: Random, variant: Variant, port: int) -> Item:
    """Return a random hostile item. ``port`` is the hostile host's port."""
    makers = [(weight, make) for weight, modality, make in _MAKERS if modality is None or modality in variant.media]
    make = rng.choices([make for _, make in makers], [weight for weight, _ in makers])[0]
    return make(rng, variant, port)


def _item(
    attack: str, modality: Modality, source: Source, *reasons: str, taken: bool = False, **arguments: Any
) -> Item:
    return Item(attack, modality, source, frozenset(reasons), taken, arguments)


def _broken(rng: Random, variant: Variant, _port: int) -> Item:
    modality: Modality = "audio" if variant.media == ("audio",) else "image"
    data = rng.choice(SOUNDS if modality == "audio" else IMAGES)
    if rng.random() < 0.4:
        return _item(
            "truncated",
            modality,
            _file(data[: rng.randrange(len(data))], rng),
            UNREADABLE,
            TOO_LARGE,
            INVALID,
            taken=True,
        )
    return _item("flipped", modality, _file(mutated(rng, data), rng), UNREADABLE, TOO_LARGE, taken=True)


def _joined(rng: Random, variant: Variant, _port: int) -> Item:
    """Return the beginning of one file joined with the end of another file."""
    one, other = rng.choice(IMAGES + SOUNDS), rng.choice(IMAGES + SOUNDS + OTHERS)
    data = one[: rng.randrange(64)] + other[rng.randrange(64) :]
    return _item(
        "joined", _any_of(rng, variant), _file(data, rng), UNREADABLE, TOO_LARGE, INVALID, NOT_SERVED, taken=True
    )


def _other_format(rng: Random, variant: Variant, _port: int) -> Item:
    data = rng.choice(OTHERS) + bytes(rng.randrange(9))
    modality = _any_of(rng, variant)
    return _item("other format", modality, _file(data, rng), UNREADABLE, INVALID, NOT_SERVED)


def _other_modality(rng: Random, variant: Variant, _port: int) -> Item:
    """Return audio declared as an image or the reverse, or a modality that the model does not support."""
    if rng.random() < 0.5:
        if variant.media == ("audio",):
            return _item("other medium", "audio", _file(rng.choice(IMAGES), rng), UNREADABLE)
        return _item("other medium", "image", _file(rng.choice(SOUNDS), rng), UNREADABLE)
    modality = rng.choice([each for each in MODALITIES if each not in variant.media])
    source = _file(rng.choice(SOUNDS if modality == "audio" else IMAGES), rng)
    return _item("other modality", modality, source, INVALID, NOT_SERVED, UNREADABLE)


def _image_bomb(rng: Random, _variant: Variant, _port: int) -> Item:
    width, height = rng.choice(
        ((30_000, 30_000), (65_535, 65_535), (2**31 - 1, 2**31 - 1), (5_000_000, 1), (1, 2**31 - 1))
    )
    lie = zlib.compress(bytes(rng.randrange(1000)))
    screen = struct.pack("<HHBBB", 65_535, rng.choice((65_535, 30_000)), 0x80, 0, 0)
    made: list[Callable[[], bytes]] = [
        lambda: png(width, height, lie),
        lambda: b"GIF89a" + screen + bytes(6) + b",\0\0\0\0\1\0\1\0\0",
        files.too_large,
        lambda: files.sized_jpeg(65_500, 65_500),
        lambda: files.sized_webp(16_383, 16_383),
    ]
    return _item("bomb", "image", _file(rng.choice(made)(), rng), TOO_LARGE, UNREADABLE)


def _hidden_bomb(rng: Random, _variant: Variant, _port: int) -> Item:
    """Return a small image with a huge chunk, or an image of the maximum size."""
    return rng.choice(
        (
            lambda: _item(
                "chunk bomb",
                "image",
                _file(files.chunk_bomb(rng.choice((b"zTXt", b"iTXt", b"iCCP", b"eXIf"))), rng),
                TOO_LARGE,
                UNREADABLE,
                taken=True,
            ),
            lambda: _item("largest picture", "image", _file(files.largest(), rng), TOO_LARGE, taken=True),
            lambda: _item("long GIF", "image", _file(files.long_gif(), rng), TOO_LARGE, UNREADABLE, taken=True),
        )
    )()


def _sound_bomb(rng: Random, _variant: Variant, _port: int) -> Item:
    data = rng.choice(
        (
            lambda: files.wav(rate=1, samples=400_000),
            lambda: files.wav(rate=2**32 - 1, samples=1000),
            lambda: files.wav(rate=16_000, channels=65_535, samples=10),
            lambda: files.wav(rate=16_000, samples=100, claimed=2**32 - 1),
            lambda: files.wav(rate=0, samples=100),
            lambda: files.wav(rate=16_000, samples=100, bits=rng.choice((0, 1, 7, 24, 64, 65_535))),
            files.silent_flac,
            lambda: files.claiming_flac(rng),
        )
    )()
    return _item("sound bomb", "audio", _file(data, rng), TOO_LARGE, UNREADABLE, taken=True)


def _strange_sound(rng: Random, _variant: Variant, _port: int) -> Item:
    """Return an audio file with invalid samples, or without samples."""
    samples = np.frombuffer(rng.randbytes(4000), "<f4").copy() if rng.random() < 0.5 else np.full(1000, math.nan, "<f4")
    if rng.random() < 0.3:
        samples = samples[:0]
    return _item("strange sound", "audio", _file(files.float_wav(samples), rng), UNREADABLE, TOO_LARGE, taken=True)


def _frames(rng: Random, variant: Variant, _port: int) -> Item:
    how = rng.randrange(6)
    times = [float(i) for i in range(4)]
    pictures = [image_file("JPEG", (40, 30), seed=i) for i in range(4)]
    reasons, taken = {UNREADABLE, TOO_LARGE, INVALID}, False
    if how == 0:
        times = [rng.choice((-1.0, math.nan, math.inf, 1e308, 0.0)) for _ in times]
        taken = True
    elif how == 1:
        pictures = [image_file("JPEG", (40 + 8 * i, 30), seed=i) for i in range(4)]
    elif how == 2:
        pictures = [mutated(rng, file) for file in pictures]
        taken = True
    elif how == 3:
        pictures, times = pictures * 9, [float(i) for i in range(36)]
    elif how == 4:
        pictures = [files.largest()] * MAX_FRAMES if rng.random() < 0.1 else [files.too_large()] * 4
        times, taken = [float(i) for i in range(len(pictures))], len(pictures) > 4
    else:
        pictures, times = [], []
    source = Frames([Frame(*each) for each in zip(pictures, times, strict=True)])
    return Item("frames", "video", source, frozenset(reasons), taken)


def _url(rng: Random, variant: Variant, port: int) -> Item:
    """Return a URL that must not be fetched."""
    text = rng.choice(URLS).format(rng.randrange(10**9))
    if rng.random() < 0.5:
        host = rng.choice(
            ("127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0", "[::]")
        )
        text = f"http://{host}:{port}/{rng.randrange(10**9)}"
    return _item("url", variant.media[0], Url(text), UNREADABLE, NOT_ALLOWED, FETCH_FAILED, INVALID)


def _name(rng: Random, variant: Variant, port: int) -> Item:
    """Return a URL with a host name whose addresses are private or change."""
    host = rng.choice([*NAMES, "unknown.test", "a.b.c.images.test", "images.test."])
    path = hosts.GOOD_SOUND if variant.media == ("audio",) else hosts.GOOD
    url = Url(f"http://{host}:{port}/{path}/{rng.randrange(10**6)}")
    taken = host in ("images.test", "cdn.images.test", "slow.images.test", "rebinding.images.test", "later.images.test")
    return _item("name", variant.media[0], url, NOT_ALLOWED, FETCH_FAILED, UNREADABLE, taken=taken)


def _host(rng: Random, variant: Variant, port: int) -> Item:
    """Return a URL of the hostile host."""
    path = rng.choice([*hosts.ANSWERS, "redirect", "redirect", "redirect", "redirect"])
    url = Url(f"http://images.test:{port}/{path}/{rng.randrange(10**6)}")
    return _item(f"host {path}", variant.media[0], url, NOT_ALLOWED, FETCH_FAILED, UNREADABLE, TOO_LARGE)


def _arguments(rng: Random, variant: Variant, _port: int) -> Item:
    arguments = rng.choice(
        (
            {"size": 10**30},
            {"size": {"height": -1, "width": 1e308}},
            {"size": {"shortest_edge": 10**9, "longest_edge": 10**9}},
            {"min_pixels": 10**12, "max_pixels": 10**12},
            {"min_pixels": -1},
            {"max_pixels": 1},
            {"fps": 1e-300, "num_frames": 10**9},
            {"do_resize": False},
            {"image_mean": [0.0, 0.0, 0.0], "image_std": [0.0, 0.0, 0.0]},
            {"patch_size": 1},
            {"__class__": "object", "trust_remote_code": True, "pretrained_model_name_or_path": "/etc/passwd"},
            {"device": "cuda", "return_tensors": "pt"},
            {"sampling_rate": 1, "padding": "longest", "truncation": False},
            {"a": "a" * 100_000},
            {"\0": -(2**63) - 1, "": None},
        )
    )
    return good(rng, variant)._replace(
        attack="arguments", arguments=arguments, reasons=frozenset({UNREADABLE, TOO_LARGE, INVALID}), taken=True
    )


def _too_long(rng: Random, variant: Variant, _port: int) -> Item:
    data = rng.choice(IMAGES + SOUNDS)[:64] + bytes(MAX_BYTES)
    return _item("too many bytes", variant.media[0], _file(data, rng), TOO_LARGE)


def _base64(rng: Random, variant: Variant, _port: int) -> Item:
    """Return an invalid ``data:`` URL, or one with whitespace, which some programs write."""
    encoded = base64.b64encode(rng.choice(IMAGES)).decode()
    url, taken = rng.choice(
        (
            (f"data:image/png;base64,{encoded[:-3]}", False),
            (f"data:image/png;base64,{encoded}!", False),
            (f"data:image/png;base64,{encoded[:20]} {encoded[20:]}", True),
            (f"data:image/png;base64,{encoded[:20]}%0A{encoded[20:]}", True),
            (f"data:image/png,{encoded}", False),
            (f"data:;base64;base64,{encoded[:40]}", False),
            ("data:image/png;base64,", False),
            ("data:image/png;base64,=", False),
            ("data:image/png;base64,AAAA====", False),
            ("data:" + "x" * 5000 + ";base64,AAAA", False),
            ("data:image/png;base64,\u0430\u0430\u0430\u0430", False),
            ("data:", False),
        )
    )
    return _item("base64", variant.media[0], Url(url), UNREADABLE, NOT_ALLOWED, INVALID, taken=taken)


def tensors(rng: Random, variant: Variant) -> Item:
    """Return a processed image with at most one error."""
    grid = [1, 4, 4]
    patches = np.frombuffer(Random(rng.random()).randbytes(16 * _NUMBERS), np.uint8).astype(np.float32) / 255
    pixels = _tensor("float32", (16, _NUMBERS), patches.astype("<f4").tobytes())
    sizes = _tensor("int64", (1, 3), np.array([grid], "<i8").tobytes())
    found = {"pixel_values": pixels, "image_grid_thw": sizes}
    how = rng.randrange(12)
    taken = False
    if how == 0:
        taken = True  # no error
    elif how == 1:
        wrong = patches.astype("<f4").copy()
        wrong[rng.randrange(len(wrong))] = rng.choice((math.nan, math.inf, -math.inf))
        found["pixel_values"] = _tensor("float32", (16, _NUMBERS), wrong.tobytes())
    elif how == 2:  # the numbers are finite, but their sums are not
        wrong = np.full(16 * _NUMBERS, rng.choice((3e38, -3e38, 1e-45, 1e30)), "<f4")
        found["pixel_values"], taken = _tensor("float32", (16, _NUMBERS), wrong.tobytes()), True
    elif how == 3:
        shape = rng.choice(
            (
                (15, _NUMBERS),
                (16, _NUMBERS + 1),
                (16 * _NUMBERS,),
                (1, 16, _NUMBERS),
                (0, _NUMBERS),
                (2**40, 2**40),
                (16, 3, 128),
            )
        )
        found["pixel_values"] = _tensor("float32", shape, pixels.data)
    elif how == 4:
        dtype = rng.choice(("int64", "int32", "uint8", "float16", "bfloat16"))
        found["pixel_values"] = _tensor(dtype, (16, _NUMBERS), rng.randbytes(16 * _NUMBERS * DTYPE_BYTES[dtype]))
        taken = dtype in ("uint8", "float16", "bfloat16")
    elif how == 5:
        grid = rng.choice(
            (
                [1, 4, 5],
                [1, 3, 3],
                [0, 4, 4],
                [-1, -4, 4],
                [1, 2**62, 4],
                [2**32, 2**32, 2**32],
                [4, 2, 2],
                [1, 2, 8],
                [1, 16, 1],
            )
        )
        found["image_grid_thw"] = _tensor("int64", (1, 3), np.array([grid], "<i8").tobytes())
        taken = True
    elif how == 6:
        found["image_grid_thw"] = rng.choice(
            (
                _tensor("float32", (1, 3), bytes(12)),
                _tensor("int64", (3,), sizes.data),
                _tensor("int64", (2, 3), sizes.data * 2),
                _tensor("int64", (1, 3), sizes.data[:-1]),
                _tensor("int32", (1, 3), np.array([grid], "<i4").tobytes()),
            )
        )
        taken = True
    elif how == 7:
        del found[rng.choice(list(found))]
    elif how == 8:
        found[rng.choice(("../../etc/passwd", "\0", "x" * 1000, "image_sizes", "forward", "pixel_values_videos"))] = (
            pixels
        )
    elif how == 9:
        found |= {f"t{number}": sizes for number in range(rng.choice((40, 100)))}
    elif how == 10:
        rows = np.frombuffer(rng.randbytes(4 * 64 * 4), "<f4") if rng.random() < 0.5 else np.zeros(256, "<f4")
        found = {EMBEDS: _tensor("float32", rng.choice(((4, 64), (4, 32), (256,), (1, 4, 64))), rows.tobytes())}
        taken = True
    else:  # too many patches
        count = 4096
        found["pixel_values"] = _tensor("uint8", (count, _NUMBERS), bytes(count * _NUMBERS))
        found["image_grid_thw"] = _tensor("int64", (1, 3), np.array([[1, 64, 64]], "<i8").tobytes())
    return _item(
        "tensors",
        "image",
        Features(found),
        UNREADABLE,
        TOO_LARGE,
        INVALID,
        NOT_ALLOWED,
        taken=taken and variant.name == "images",
    )


def _tensor_item(rng: Random, variant: Variant, _port: int) -> Item:
    return tensors(rng, variant)


def _any_of(rng: Random, variant: Variant) -> Modality:
    return rng.choice([each for each in variant.media if each != "video"])


def _file(data: bytes, rng: Random) -> Source:
    if data and rng.random() < 0.6:
        return EncodedFile(data)
    return Url("data:application/octet-stream;base64," + base64.b64encode(data).decode())


def _tensor(dtype: Any, shape: Sequence[int], data: bytes) -> TensorData:
    return TensorData(dtype, tuple(shape), data)


_MAKERS: tuple[tuple[float, Modality | None, Callable[[Random, Variant, int], Item]], ...] = (
    (12, None, _broken),
    (4, None, _joined),
    (5, None, _other_format),
    (4, None, _other_modality),
    (8, "image", _image_bomb),
    (2, "image", _hidden_bomb),
    (10, "audio", _sound_bomb),
    (4, "audio", _strange_sound),
    (5, "video", _frames),
    (10, None, _url),
    (8, None, _name),
    (12, None, _host),
    (5, None, _arguments),
    (2, None, _too_long),
    (4, None, _base64),
    (8, "image", _tensor_item),
)
"""Weight, modality that the model must support, and maker of the item."""
