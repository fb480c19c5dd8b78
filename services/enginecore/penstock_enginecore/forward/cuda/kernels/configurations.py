"""How kernels are cut for a device and a shape, from ``tuned/*.json``: nothing is tuned while an engine serves."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock_enginecore.forward.cuda.kernel_api import Kind

_TUNED = Path(__file__).with_name("tuned")
MIN_BLOCK_SIZE = 16
"""Tokens of a block of the KV cache: of smaller ones tables are long and copies short."""
INVARIANT_ROWS = 64
INVARIANT_WARPS = 4
"""So many rows are multiplied by so many warps where a row must have the same bits whatever is computed beside it: the fewest
that ``wgmma`` takes. Tiles of 16 rows are multiplied by another instruction, which may round in another way.
"""
_FLOAT32 = 4
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


class Latent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attention over a latent of up to 512 numbers of ``bytes`` each, and 64 that turn: tiles of ``rows`` rows, a row a query's
    head. Decodes take ``piece`` keys, or a multiple; else as ``Decode``.
    """

    rows: int
    bytes: int
    block_n: int
    piece: int
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


class ExpertTiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Experts of up to ``rows`` rows each, on average, times weights of a ``kind``: as a ``Product``. Those of 4 bits take as
    many columns at a time as their layout says, whatever ``block_k`` is.
    """

    kind: Kind
    rows: int
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


class Invariant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Batch-invariant products with weights of up to ``features`` output features: what a row's sums depend on, and ``stages``.
    How many rows a program takes is not tuned, since no sum may depend on it.
    """

    features: int
    block_n: int
    block_k: int
    stages: int


class Tuned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file. ``measured``: whether its numbers come from runs on the ``device``, or are estimates."""

    device: str
    measured: bool
    decode: list[Decode]
    prefill: list[Prefill]
    latent: list[Latent]
    products: list[Product]
    experts: list[ExpertTiles]
    invariant: list[Invariant]


_Tiles = TypeVar("_Tiles", Decode, Prefill)


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Configurations of both kinds of attention."""

    decode: Decode
    prefill: Prefill


@dataclass(frozen=True, slots=True)
class InvariantTiles:
    """Of a batch-invariant product. ``block_m`` and ``warps`` go by the number of rows, 64 rows to each four warps; ``block_n``
    and ``block_k``, and with them the order of every sum, by the weight alone.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


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
def latent_tiles(rows: int, itemsize: int, device: str = "", *, invariant: bool = False) -> Latent:
    """For up to ``rows`` rows beside one another, and numbers of ``itemsize`` bytes: the first that hold them, or the largest.
    ``invariant``: the largest, for any number of rows.
    """
    fit = [one for one in load_tuned(device).latent if one.bytes == itemsize]
    return fit[-1] if invariant else next((one for one in fit if rows <= one.rows), fit[-1])


@cache
def product_tiles(rows: int, bits: int, device: str = "", *, invariant: bool = False) -> Product:
    """For ``rows`` rows and weights of ``bits`` per number: the first that is made for so many, or the largest. ``invariant``:
    those whose sums have one order for any number of rows, see ``INVARIANT_ROWS``.
    """
    fit = [one for one in load_tuned(device).products if one.bits == bits]
    if invariant:
        one = next(one for one in fit if one.block_m == INVARIANT_ROWS)
        return msgspec.structs.replace(one, **_rows_and_warps(rows))
    return next((one for one in fit if rows <= one.rows), fit[-1])


@cache
def expert_tiles(rows: int, kind: Kind, device: str = "", *, invariant: bool = False) -> ExpertTiles:
    """For ``rows`` rows of each expert, on average, and weights of ``kind``, as ``product_tiles``."""
    fit = [one for one in load_tuned(device).experts if one.kind == kind]
    if invariant:
        one = next(one for one in fit if one.block_m == INVARIANT_ROWS)
        return msgspec.structs.replace(one, **_rows_and_warps(rows))
    return next((one for one in fit if rows <= one.rows), fit[-1])


@cache
def invariant_tiles(rows: int, out_features: int, itemsize: int, device: str = "") -> InvariantTiles:
    """For ``rows`` rows of numbers of ``itemsize`` bytes times a weight of ``out_features``, see ``kernels/invariant.py``."""
    fit = load_tuned(device).invariant
    one = next((one for one in fit if out_features <= one.features), fit[-1])
    if itemsize == _FLOAT32:
        return InvariantTiles(INVARIANT_ROWS, one.block_n, one.block_k, INVARIANT_WARPS, 2)
    return InvariantTiles(**_rows_and_warps(rows), block_n=one.block_n, block_k=one.block_k, stages=one.stages)


def _rows_and_warps(rows: int) -> dict[str, int]:
    """``block_m`` and ``warps``: each four warps multiply 64 rows, by the same instruction in both cases."""
    times = 1 if rows <= INVARIANT_ROWS else 2
    return {"block_m": times * INVARIANT_ROWS, "warps": times * INVARIANT_WARPS}


def _fitting(kinds: Sequence[_Tiles], head_size: int, itemsize: int) -> _Tiles:
    fit = [one for one in kinds if one.bytes == itemsize and one.head_size >= head_size]
    if not fit:
        raise ValueError(f"attention has no tiles for heads of {head_size} numbers of {itemsize} bytes")
    return min(fit, key=lambda one: one.head_size)
