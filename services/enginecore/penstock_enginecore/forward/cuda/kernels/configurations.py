"""How kernels are cut for a device and a shape, from ``tuned/*.json``: nothing is tuned while an engine serves."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

_TUNED = Path(__file__).with_name("tuned")
MIN_BLOCK_SIZE = 16
"""Tokens of a block of the KV cache: of smaller ones tables are long and copies short."""
_ANY = "nvidia_h200"
"""What other devices use as well, until they have a file."""


class Decode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Heads of up to ``head_size`` numbers, a number of the cache in ``bytes``. A program takes ``piece`` keys, or a multiple,
    ``block_n`` at a time, in ``warps`` warps that load ``stages`` tiles ahead.
    """

    head_size: int
    bytes: int
    block_n: int
    piece: int
    warps: int
    stages: int


class Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same for tiles of ``block_m`` rows, a row a query's head, and ``block_n`` keys."""

    head_size: int
    bytes: int
    block_m: int
    block_n: int
    warps: int
    stages: int


class Product(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Up to ``rows`` rows times weights of ``bits`` per number: a program makes ``block_m`` rows of ``block_n`` features, of
    ``block_k`` columns at a time (of 4 bits as many as the layout says), in ``warps`` warps that load ``stages`` tiles ahead.
    """

    rows: int
    bits: int
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


class Tuned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file. ``measured``: whether its numbers come from runs on the ``device``, or are estimates."""

    device: str
    measured: bool
    decode: list[Decode]
    prefill: list[Prefill]
    products: list[Product]


_Tiles = TypeVar("_Tiles", Decode, Prefill)


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Configurations of both kinds of attention."""

    decode: Decode
    prefill: Prefill


@cache
def load_tuned(device: str = "") -> Tuned:
    """The file of a ``device``, by CUDA's name of it."""
    path = _TUNED / f"{device.lower().replace(' ', '_')}.json"
    path = path if path.is_file() else _TUNED / f"{_ANY}.json"
    return msgspec.json.decode(path.read_bytes(), type=Tuned)


@cache
def attention_tiles(head_size: int, itemsize: int, device: str = "") -> AttentionTiles:
    """For heads of ``head_size`` numbers, padded, in a cache of ``itemsize`` bytes per number. ValueError where none fits."""
    tuned = load_tuned(device)
    return AttentionTiles(_fitting(tuned.decode, head_size, itemsize), _fitting(tuned.prefill, head_size, itemsize))


@cache
def product_tiles(rows: int, bits: int, device: str = "") -> Product:
    """For ``rows`` rows and weights of ``bits`` per number: the first that is made for so many, or the largest."""
    fit = [one for one in load_tuned(device).products if one.bits == bits]
    return next((one for one in fit if rows <= one.rows), fit[-1])


def _fitting(kinds: Sequence[_Tiles], head_size: int, itemsize: int) -> _Tiles:
    fit = [one for one in kinds if one.bytes == itemsize and one.head_size >= head_size]
    if not fit:
        raise ValueError(f"attention has no tiles for heads of {head_size} numbers of {itemsize} bytes")
    return min(fit, key=lambda one: one.head_size)
