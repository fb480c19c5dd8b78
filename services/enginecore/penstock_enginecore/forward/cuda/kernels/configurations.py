"""Tile sizes of kernels by device and shape, read from ``tuned/*.json``. An engine that serves requests never tunes
kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from penstock_enginecore.forward.cuda.kernel_api import Kind

_TUNED = Path(__file__).with_name("tuned")
MIN_BLOCK_SIZE = 16
"""Smallest supported size of a KV cache block, in tokens. With smaller blocks, the block tables would be long and each
copy would be small.
"""
INVARIANT_ROWS = 64
INVARIANT_WARPS = 4
"""Number of warps for every ``INVARIANT_ROWS`` rows of a batch-invariant matrix product. The instruction ``wgmma``
needs at least 64 rows. Tiles of 16 rows would use another instruction, which may round differently.
"""
_FLOAT32 = 4
_ANY = "nvidia_h200"
"""Name of the device whose configurations are used for devices that have no file in ``tuned``."""


class Decode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of decode attention for heads of up to ``head_size`` elements.

    Attributes:
        head_size: Largest head size.
        bytes: Size in bytes of an element of the KV cache.
        block_n: Number of keys per tile.
        piece: Number of keys in a piece, which one program computes. Longer requests have pieces of a multiple of
            ``piece`` keys.
        warps: Number of warps per program.
        stages: Number of tiles that are loaded ahead.
    """

    head_size: int
    bytes: int
    block_n: int
    piece: int
    warps: int
    stages: int


class Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of prefill attention for tiles of ``block_m`` rows and ``block_n`` keys. A row is one head of one
    query.

    The other fields are as in ``Decode``.
    """

    head_size: int
    bytes: int
    block_m: int
    block_n: int
    warps: int
    stages: int


class Latent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of attention over a latent of up to 512 elements, of ``bytes`` bytes each, plus 64 rotated
    elements.

    A tile has ``rows`` rows. A row is one head of one query. In decodes, a program computes ``piece`` keys, or a
    multiple of ``piece``. The other fields are as in ``Decode``.
    """

    rows: int
    bytes: int
    block_n: int
    piece: int
    warps: int
    stages: int


class Product(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of a matrix product of up to ``rows`` rows with weights of ``bits`` bits per element.

    A program with ``warps`` warps computes ``block_m`` rows of ``block_n`` output features, and loads ``stages`` tiles
    ahead. The layout of the weight determines the number of columns of a tile.
    """

    rows: int
    bits: int
    block_m: int
    block_n: int
    warps: int
    stages: int


class ExpertTiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of the matrix products of experts, for weights of a ``kind`` and up to ``rows`` rows per expert on
    average. The other fields are as in ``Product``.
    """

    kind: Kind
    rows: int
    block_m: int
    block_n: int
    warps: int
    stages: int


class DenseExpertTiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of the matrix products of experts with 16-bit weights, for up to ``rows`` rows per expert on
    average. The program multiplies ``block_k`` columns at a time. The other fields are as in ``Product``.
    """

    rows: int
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


class Invariant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of batch-invariant matrix products with weights of up to ``features`` output features.

    All fields except ``stages`` determine the order in which a row's products are summed. The number of rows per
    program is not tuned, because no sum may depend on it.
    """

    features: int
    block_n: int
    block_k: int
    stages: int


class Tuned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of one file in ``tuned``. ``measured`` is true if the configurations were tuned by measurements on
    ``device``, and false if they are estimates.
    """

    device: str
    measured: bool
    decode: list[Decode]
    prefill: list[Prefill]
    latent: list[Latent]
    products: list[Product]
    experts: list[ExpertTiles]
    dense_experts: list[DenseExpertTiles]
    invariant: list[Invariant]


_Tiles = TypeVar("_Tiles", Decode, Prefill)


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Configurations of decode and prefill attention for one head size."""

    decode: Decode
    prefill: Prefill


@dataclass(frozen=True, slots=True)
class InvariantTiles:
    """Configuration of a batch-invariant product.

    ``block_m`` and ``warps`` depend on the number of rows: four warps for every 64 rows. ``block_n`` and ``block_k``
    determine the order of every sum, so they depend only on the weight.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


@cache
def device_name(device: torch.device) -> str:
    """Return the CUDA device name of ``device``, or an empty string for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@cache
def load_tuned(device: str = "") -> Tuned:
    """Return the configurations for the device whose CUDA device name is ``device``."""
    path = _TUNED / f"{device.lower().replace(' ', '_')}.json"
    path = path if path.is_file() else _TUNED / f"{_ANY}.json"
    return msgspec.json.decode(path.read_bytes(), type=Tuned)


@cache
def attention_tiles(head_size: int, itemsize: int, device: str = "") -> AttentionTiles:
    """Return tiles for heads of ``head_size`` elements, including padding, with ``itemsize`` bytes per element. Raises
    ValueError if no configuration fits.
    """
    tuned = load_tuned(device)
    return AttentionTiles(_fitting(tuned.decode, head_size, itemsize), _fitting(tuned.prefill, head_size, itemsize))


@cache
def latent_tiles(rows: int, itemsize: int, device: str = "", *, invariant: bool = False) -> Latent:
    """Return the smallest tiles that are large enough for ``rows`` rows of elements with ``itemsize`` bytes, or the
    largest tiles if all are too small.

    If ``invariant`` is true, return the largest tiles for any number of rows.
    """
    fit = [one for one in load_tuned(device).latent if one.bytes == itemsize]
    return fit[-1] if invariant else next((one for one in fit if rows <= one.rows), fit[-1])


@cache
def product_tiles(rows: int, bits: int, device: str = "", *, invariant: bool = False) -> Product:
    """Return the smallest tiles that are large enough for ``rows`` rows and weights of ``bits`` bits per element, or
    the largest tiles if all are too small.

    If ``invariant`` is true, return the same tiles for any number of rows, so that sums have the same order.
    """
    fit = [one for one in load_tuned(device).products if one.bits == bits]
    if invariant:
        return next(one for one in fit if one.block_m == INVARIANT_ROWS)
    return next((one for one in fit if rows <= one.rows), fit[-1])


@cache
def expert_tiles(rows: int, kind: Kind, device: str = "", *, invariant: bool = False) -> ExpertTiles:
    """Return tiles for ``rows`` rows per expert on average and weights of ``kind``, like ``product_tiles``."""
    fit = [one for one in load_tuned(device).experts if one.kind == kind]
    if invariant:
        return next(one for one in fit if one.block_m == INVARIANT_ROWS)
    return next((one for one in fit if rows <= one.rows), fit[-1])


@cache
def dense_expert_tiles(
    rows: int, out_features: int, itemsize: int, device: str = "", *, invariant: bool = False
) -> DenseExpertTiles | InvariantTiles:
    """Return tiles for ``rows`` rows per expert on average, of ``itemsize``-byte elements, and dense weights with
    ``out_features`` output features. Elements of 4 bytes always use the tiles of batch-invariant products.
    """
    if invariant or itemsize == _FLOAT32:
        return invariant_tiles(rows, out_features, itemsize, device)
    fit = load_tuned(device).dense_experts
    return next((one for one in fit if rows <= one.rows), fit[-1])


@cache
def invariant_tiles(rows: int, out_features: int, itemsize: int, device: str = "") -> InvariantTiles:
    """Return tiles for the product of ``rows`` rows of ``itemsize``-byte elements and a weight with ``out_features``
    output features; see ``kernels/invariant.py``.
    """
    fit = load_tuned(device).invariant
    one = next((one for one in fit if out_features <= one.features), fit[-1])
    if itemsize == _FLOAT32:
        return InvariantTiles(INVARIANT_ROWS, one.block_n, one.block_k, INVARIANT_WARPS, 2)
    return InvariantTiles(**_rows_and_warps(rows), block_n=one.block_n, block_k=one.block_k, stages=one.stages)


def _rows_and_warps(rows: int) -> dict[str, int]:
    """Return ``block_m`` and ``warps`` for a batch-invariant product. Every four warps multiply 64 rows with the same
    instruction.
    """
    times = 1 if rows <= INVARIANT_ROWS else 2
    return {"block_m": times * INVARIANT_ROWS, "warps": times * INVARIANT_WARPS}


def _fitting(kinds: Sequence[_Tiles], head_size: int, itemsize: int) -> _Tiles:
    fit = [one for one in kinds if one.bytes == itemsize and one.head_size >= head_size]
    if not fit:
        raise ValueError(f"no attention tiles for heads of {head_size} elements of {itemsize} bytes")
    return min(fit, key=lambda one: one.head_size)
