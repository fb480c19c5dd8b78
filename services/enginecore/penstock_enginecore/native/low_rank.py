"""Adapters' matrices in the layouts that the kernels read (``csrc/lora.h``)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from penstock_enginecore.lora.adapter import LowRankUpdate
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.structs import Piece, Segment, Update
from penstock_enginecore.native.weights import KINDS, fits_bfloat16, huge_empty

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
        return cls(torch.cat([update.a for update in updates if update is not None]), pieces, interleaved)

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
        half_a = fits_bfloat16(update.a)
        half_b = all(isinstance(each, int) or fits_bfloat16(each[0]) for each in update.pieces)
        a = F.pad(update.a, (0, -k % (2 * lanes)))
        stride = a.shape[1]
        a = a.view(rank, -1, 2, lanes)
        a = a.transpose(2, 3).bfloat16() if half_a else a
        whole = rank // _GROUP * _GROUP
        groups = [
            rows.reshape(-1, size, *rows.shape[1:]).transpose(1, 2).flatten()
            for rows, size in ((a[:whole], _GROUP), (a[whole:], rank - whole))
            if len(rows)
        ]
        a = torch.cat(groups)
        kinds = [KINDS[torch.bfloat16 if half else torch.float32] for half in (half_a, half_b)]
        pieces = [self._piece(each, half=half_b) for each in update.pieces]
        return Update(self._keep(a), stride, *kinds, k, rank, update.interleaved, len(pieces), (Piece * 3)(*pieces))

    def _piece(self, piece: tuple[torch.Tensor, int] | int, *, half: bool) -> Piece:
        lanes = self._lanes
        if isinstance(piece, int):
            return Piece(None, -(-piece // lanes), 0, 0)
        b, first = piece
        n, rank = b.shape
        padded = F.pad(b, (0, rank % 2 if half else 0, 0, -n % lanes))
        by_vector = padded.reshape(-1, lanes, padded.shape[1]).transpose(1, 2)
        if half:
            by_vector = by_vector.reshape(len(by_vector), -1, 2, lanes).transpose(2, 3).bfloat16()
        return Piece(self._keep(by_vector), len(by_vector), first, rank)

    def _keep(self, tensor: torch.Tensor) -> int:
        """Where it is copied to."""
        start = self.num_bytes
        self.num_bytes += tensor.nbytes + -tensor.nbytes % _ALIGNED
        place = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
        return place.data_ptr()

    def _numbers(self, update: MergedUpdate) -> int:
        """As many as there is memory for."""
        rank, k = update.a.shape
        of_b = (
            (each[0].shape[0] + self._lanes) * (each[0].shape[1] + 1)
            for each in update.pieces
            if not isinstance(each, int)
        )
        return rank * (k + 2 * self._lanes) + sum(of_b) + _ALIGNED * (1 + len(update.pieces))


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
