"""Linear layers with packed weights, and LoRA matrices in the kernels' layout."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from penstock_enginecore.huge_pages import huge_empty
from penstock_enginecore.lora.adapter import LowRankUpdate
from penstock_enginecore.native.ffi_structs import Piece, Segment, Update
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.weights import KINDS, PackedWeight, fits_bfloat16, multiply

# LoRA matrices A and B in the layouts that the kernels read (``csrc/lora.h``).

_ALIGNED = 64
"""Alignment of each matrix in bytes."""
_GROUP = 4
"""Number of rows of the LoRA matrix A that are stored together."""


@dataclass(frozen=True, slots=True)
class MergedUpdate:
    """LoRA update of a merged weight, which has the rows of several projections with the same input.

    Attributes:
        a: float32 ``[rank, k]``, the concatenated rows of the projections' LoRA matrices A.
        pieces: For each projection, its LoRA matrix B, float32 ``[out features, rank]``, and the row of ``a`` that
            belongs to the first column of B. For a projection without an update, its number of output features.
        interleaved: Whether the output features of the projections alternate, in groups of the SIMD vector length.
    """

    a: torch.Tensor
    pieces: Sequence[tuple[torch.Tensor, int] | int]
    interleaved: bool = False

    @classmethod
    def of(
        cls, updates: Sequence[LowRankUpdate | None], features: Sequence[int], *, interleaved: bool = False
    ) -> "MergedUpdate":
        """Return the merged update of layers with ``features`` outputs, whose weights are joined or interleaved. At
        least one layer must have an update.
        """
        pieces: list[tuple[torch.Tensor, int] | int] = []
        rank = 0
        for update, count in zip(updates, features, strict=True):
            pieces.append(count if update is None else (update.b, rank))
            rank += 0 if update is None else update.rank
        of_a = [update.a for update in updates if update is not None]
        return cls(torch.cat(of_a) if len(of_a) > 1 else of_a[0], pieces, interleaved)

    @classmethod
    def halves(cls, update: LowRankUpdate) -> "MergedUpdate":
        """Return the update, with interleaved outputs, of one layer whose rows are the rows of a gate, followed by the
        rows of an up projection.
        """
        return cls(update.a, [(half, 0) for half in update.b.chunk(2)], interleaved=True)


class PackedUpdates:
    """LoRA updates of one adapter for all matrix products of a decoder, in the kernels' layout. In ``updates``, None
    means that a product has no update.

    ``struct`` is an array of structs that point into this object's memory of ``num_bytes`` bytes. Elements that
    bfloat16 represents exactly are stored as bfloat16.
    """

    def __init__(self, library: NativeLibrary, updates: Sequence[MergedUpdate | None]) -> None:
        self._lanes = library.lanes
        # Reserve enough memory for float32. If the elements are stored as bfloat16, half of the memory's pages are
        # never used.
        numbers = sum(self._numbers(update) for update in updates if update is not None)
        self._memory = huge_empty(4 * numbers, dtype=torch.uint8)
        self.num_bytes = 0
        self.width = max((len(update.a) for update in updates if update is not None), default=0)
        self.struct = (Update * len(updates))(*(Update() if each is None else self._update(each) for each in updates))

    def segment(self, first: int, end: int) -> Segment:
        """Return the struct that applies these updates to rows ``first`` to ``end``."""
        return Segment(ctypes.addressof(self.struct), first, end, self.width)

    def _update(self, update: MergedUpdate) -> Update:
        lanes, (rank, k) = self._lanes, update.a.shape
        if len(update.pieces) > 1 and any(
            (each if isinstance(each, int) else len(each[0])) % lanes for each in update.pieces
        ):
            raise ValueError(f"output features of a merged weight's projections must be multiples of {lanes}")
        half_a = _fits_bfloat16(update.a)
        half_b = all(isinstance(each, int) or _fits_bfloat16(each[0]) for each in update.pieces)
        kinds = [torch.bfloat16 if half else torch.float32 for half in (half_a, half_b)]
        a = _filled(update.a, rank, k + -k % (2 * lanes))
        place, stride, whole = self._place(a.shape, kinds[0]), a.shape[1], rank // _GROUP * _GROUP
        for rows, size, kept in ((a[:whole], _GROUP, place[:whole]), (a[whole:], rank - whole, place[whole:])):
            if len(rows):
                vectors = rows.reshape(-1, size, stride // (2 * lanes), 2, lanes)
                together = (vectors.transpose(3, 4) if half_a else vectors).transpose(1, 2)
                kept.view(together.shape).copy_(together)
        pieces = [self._piece(each, kinds[1]) for each in update.pieces]
        codes = [KINDS[kind] for kind in kinds]
        return Update(place.data_ptr(), stride, *codes, k, rank, update.interleaved, len(pieces), (Piece * 4)(*pieces))

    def _piece(self, piece: tuple[torch.Tensor, int] | int, kind: torch.dtype) -> Piece:
        lanes, half = self._lanes, kind == torch.bfloat16
        if isinstance(piece, int):
            return Piece(None, -(-piece // lanes), 0, 0)
        b, first = piece
        n, rank = b.shape
        filled = _filled(b, n + -n % lanes, rank + rank % 2 if half else rank)
        pairs = 2 if half else 1
        by_vector = filled.reshape(-1, lanes, filled.shape[1] // pairs, pairs).transpose(1, 2)
        place = self._place(by_vector.shape, kind)
        place.copy_(by_vector)
        return Piece(place.data_ptr(), len(by_vector), first, rank)

    def _place(self, shape: Sequence[int], kind: torch.dtype) -> torch.Tensor:
        """Return a tensor of this shape and dtype in the next unused part of this object's memory."""
        start, size = self.num_bytes, math.prod(shape) * kind.itemsize
        self.num_bytes += size + -size % _ALIGNED
        return self._memory[start : start + size].view(kind).view(*shape)

    def _numbers(self, update: MergedUpdate) -> int:
        """Return the number of float32 elements to reserve for an update."""
        rank, k = update.a.shape
        of_b = (
            (each[0].shape[0] + self._lanes) * (each[0].shape[1] + 1)
            for each in update.pieces
            if not isinstance(each, int)
        )
        return rank * (k + 2 * self._lanes) + sum(of_b) + _ALIGNED * (1 + len(update.pieces))


def _fits_bfloat16(tensor: torch.Tensor) -> bool:
    """Return whether bfloat16 represents all elements exactly. The first row is checked first, because usually its
    elements already show that bfloat16 does not.
    """
    return fits_bfloat16(tensor[:1]) and fits_bfloat16(tensor)


def _filled(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the tensor padded with zeros to ``rows`` rows and ``columns`` columns."""
    if tensor.shape == (rows, columns):
        return tensor
    return F.pad(tensor, (0, columns - tensor.shape[1], 0, rows - len(tensor)))


class PackedAddition:
    """``Addition`` of a LoRA update by the kernels. The result of a row does not depend on the other rows."""

    def __init__(self, library: NativeLibrary, update: LowRankUpdate) -> None:
        self._library = library
        self._n = len(update.b)
        self._packed = PackedUpdates(library, [MergedUpdate.of([update], [self._n])])

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the update's output for the input ``x`` to ``out``. Both tensors are float32 with contiguous rows."""
        segment = self._packed.segment(0, len(x))
        self._library.call(
            "low_rank", ctypes.byref(segment), 1, self._n, x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0)
        )


class PackedLinear(torch.nn.Linear):
    """Replacement for the module ``linear``, with a packed weight and the same hooks.

    The module's ``weight`` is empty, so code that reads the weight does not work with this module.
    """

    def __init__(
        self,
        library: NativeLibrary,
        linear: torch.nn.Linear,
        *,
        apart: bool = False,
        packed: PackedWeight | None = None,
    ) -> None:
        """Pack the weight of ``linear``, or use ``packed`` if its weight is already packed. For ``apart``, see
        ``multiply``.
        """
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.register_parameter("bias", None)
        self._forward_pre_hooks, self._forward_hooks = linear._forward_pre_hooks, linear._forward_hooks
        self._library, self._apart = library, apart
        self.packed = PackedWeight(library, linear.weight, linear.bias) if packed is None else packed

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the packed weight."""
        return self.packed.num_bytes

    def addition(self, update: LowRankUpdate) -> PackedAddition:
        """Return an object that adds the output of a LoRA update of this layer, computed by the kernels."""
        return PackedAddition(self._library, update)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, float32 ``[..., out_features]``, for float32 inputs ``[..., in_features]``."""
        return multiply(self._library, self.packed, x, apart=self._apart)


class PackedEmbedding(torch.nn.Module):
    """Replacement for an embedding module whose table is also the weight of the output head (tied weights). It reads
    its rows from the head's packed weight, so that memory contains the table once.

    ``weight`` has no rows, so code that reads the weight does not work with this module.

    Args:
        packed: The packed weight of the head.
        scale: Factor by which the replaced module multiplies its rows.
        dtype: Dtype of the replaced module's output.
    """

    def __init__(self, library: NativeLibrary, packed: PackedWeight, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0, packed.k, dtype=dtype), requires_grad=False)
        self.packed, self.scale = packed, scale
        self._library = library

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``[..., hidden size]`` of int64 ``token_ids`` ``[...]``. Raises IndexError if a token id
        is out of range.
        """
        rows = self.packed.rows(self._library, token_ids)
        return (rows * self.scale if self.scale != 1 else rows).to(self.weight.dtype)
