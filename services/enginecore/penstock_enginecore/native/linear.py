"""Linear layers that multiply with packed weights, and the LoRA matrices that add to them."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from penstock_enginecore.lora.adapter import LowRankUpdate
from penstock_enginecore.native.ffi_structs import Piece, Segment, Update
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.weights import KINDS, PackedWeight, fits_bfloat16, huge_empty, multiply

# Adapters' matrices in the layouts that the kernels read (``csrc/lora.h``).

_ALIGNED = 64
"""Bytes."""
_GROUP = 4
"""Rows of A that lie together."""


@dataclass(frozen=True, slots=True)
class MergedUpdate:
    """What an adapter adds to a weight of several projections, which share an input, with as many inputs as ``a`` float32
    ``[rank, k]`` has columns. ``pieces``: float32 ``[out features, rank]`` of each, and the row of ``a`` that the first of their
    columns is for; None for as many output features as get nothing. ``interleaved``: vectors of output features take turns.
    """

    a: torch.Tensor
    pieces: Sequence[tuple[torch.Tensor, int] | int]
    interleaved: bool = False

    @classmethod
    def of(
        cls, updates: Sequence[LowRankUpdate | None], features: Sequence[int], *, interleaved: bool = False
    ) -> "MergedUpdate":
        """Of layers with ``features`` outputs whose weights come one after the other, or in turn; one has an update at least."""
        pieces: list[tuple[torch.Tensor, int] | int] = []
        rank = 0
        for update, count in zip(updates, features, strict=True):
            pieces.append(count if update is None else (update.b, rank))
            rank += 0 if update is None else update.rank
        of_a = [update.a for update in updates if update is not None]
        return cls(torch.cat(of_a) if len(of_a) > 1 else of_a[0], pieces, interleaved)

    @classmethod
    def halves(cls, update: LowRankUpdate) -> "MergedUpdate":
        """Of one layer whose rows are a gate's and then an up projection's."""
        return cls(update.a, [(half, 0) for half in update.b.chunk(2)], interleaved=True)


class PackedUpdates:
    """``updates`` in a row, None for those that are nothing; ``struct`` is an array of them and points into memory kept here,
    of ``num_bytes``. Numbers that bfloat16 holds are kept in it.
    """

    def __init__(self, library: NativeLibrary, updates: Sequence[MergedUpdate | None]) -> None:
        self._lanes = library.lanes
        # Float32, of which bfloat16 leaves half of the pages untouched.
        numbers = sum(self._numbers(update) for update in updates if update is not None)
        self._memory = huge_empty(4 * numbers, torch.uint8)
        self.num_bytes = 0
        self.width = max((len(update.a) for update in updates if update is not None), default=0)
        self.struct = (Update * len(updates))(*(Update() if each is None else self._update(each) for each in updates))

    def segment(self, first: int, end: int) -> Segment:
        """Rows ``first`` to before ``end`` have these."""
        return Segment(ctypes.addressof(self.struct), first, end, self.width)

    def _update(self, update: MergedUpdate) -> Update:
        lanes, (rank, k) = self._lanes, update.a.shape
        if len(update.pieces) > 1 and any(
            (each if isinstance(each, int) else len(each[0])) % lanes for each in update.pieces
        ):
            raise ValueError(f"a merged weight's projections have multiples of {lanes} output features")
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
        return Update(place.data_ptr(), stride, *codes, k, rank, update.interleaved, len(pieces), (Piece * 3)(*pieces))

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
        """Memory for a tensor."""
        start, size = self.num_bytes, math.prod(shape) * kind.itemsize
        self.num_bytes += size + -size % _ALIGNED
        return self._memory[start : start + size].view(kind).view(*shape)

    def _numbers(self, update: MergedUpdate) -> int:
        """As many as there is memory for."""
        rank, k = update.a.shape
        of_b = (
            (each[0].shape[0] + self._lanes) * (each[0].shape[1] + 1)
            for each in update.pieces
            if not isinstance(each, int)
        )
        return rank * (k + 2 * self._lanes) + sum(of_b) + _ALIGNED * (1 + len(update.pieces))


def _fits_bfloat16(tensor: torch.Tensor) -> bool:
    """Most that does not shows it in its first row."""
    return fits_bfloat16(tensor[:1]) and fits_bfloat16(tensor)


def _filled(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """With zeros behind its rows and columns, where it has fewer."""
    if tensor.shape == (rows, columns):
        return tensor
    return F.pad(tensor, (0, columns - tensor.shape[1], 0, rows - len(tensor)))


class PackedAddition:
    """An ``Addition`` of the kernels, whose every row's numbers do not depend on the rows beside it."""

    def __init__(self, library: NativeLibrary, update: LowRankUpdate) -> None:
        self._library = library
        self._n = len(update.b)
        self._packed = PackedUpdates(library, [MergedUpdate.of([update], [self._n])])

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """float32, both with rows that are one piece of memory each."""
        segment = self._packed.segment(0, len(x))
        self._library.call(
            "low_rank", ctypes.byref(segment), 1, self._n, x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0)
        )


class PackedLinear(torch.nn.Linear):
    """Stands for ``linear``, whose weight it has packed, with its hooks. Its own ``weight`` is empty: who needs that cannot be
    packed.
    """

    def __init__(self, library: NativeLibrary, linear: torch.nn.Linear, *, apart: bool = False) -> None:
        """``apart``: see ``multiply``."""
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.register_parameter("bias", None)
        self._forward_pre_hooks, self._forward_hooks = linear._forward_pre_hooks, linear._forward_hooks
        self._library, self._apart = library, apart
        self.packed = PackedWeight(library, linear.weight, linear.bias)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is packed."""
        return self.packed.num_bytes

    def addition(self, update: LowRankUpdate) -> PackedAddition:
        """An adapter's, by the kernels."""
        return PackedAddition(self._library, update)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, float32."""
        return multiply(self._library, self.packed, x, apart=self._apart)
