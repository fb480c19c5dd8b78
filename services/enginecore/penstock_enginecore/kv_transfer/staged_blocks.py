"""Copies of blocks between GPU memory and ordinary host memory, through a ring of page-locked memory.

One kernel gathers the blocks of a piece of the ring into contiguous GPU memory, and one copy moves the piece. The other
direction has the same steps in reverse order. While the GPU copies one piece, a CPU copies another piece.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.kv_transfer.core.base import Content
from penstock_enginecore.worker.staging import Piece, StagingRing, Work

NUM_PIECES = 2
PIECE_BYTES = 16 << 20
"""Size of a piece. A ring has ``NUM_PIECES`` pieces of page-locked host memory. While blocks are copied, GPU memory of
this size is used too.
"""
_ALIGNED = 16
"""Alignment of parts of blocks in a piece, in bytes. Kernels then copy words of eight bytes."""
_WORD = 8

Bytes = npt.NDArray[np.uint8]


class Part(NamedTuple):
    """Columns of consecutive blocks, which a piece contains as contiguous rows.

    Attributes:
        tensor: Index of the tensor of the pool.
        first: Index of the first block in the call's list of blocks.
        num_blocks: Number of blocks.
        column: First column in the tensor.
        width: Number of columns, which is also the number of bytes per block.
        offset: Offset of the columns in the content of a block.
        place: Offset of the rows in the piece.
    """

    tensor: int
    first: int
    num_blocks: int
    column: int
    width: int
    offset: int
    place: int

    @property
    def blocks(self) -> slice:
        """Indices of the blocks in the call's list of blocks."""
        return slice(self.first, self.first + self.num_blocks)

    @property
    def bytes(self) -> slice:
        """Bytes of a block's content."""
        return slice(self.offset, self.offset + self.width)

    @property
    def end(self) -> int:
        """Offset behind the rows in the piece."""
        return self.place + self.num_blocks * self.width


def plan_pieces(widths: Sequence[int], num_blocks: int, piece_bytes: int) -> Iterator[list[Part]]:
    """Yield the content of each piece for a copy of ``num_blocks`` blocks. A piece has as many blocks as fit. A block
    that is larger than a piece is in several pieces.

    Args:
        widths: Bytes of a block in each tensor of the pool.
        num_blocks: Number of blocks.
        piece_bytes: Size of a piece, at least 16.
    """
    group = max(1, piece_bytes // max(1, sum(-(-width // _ALIGNED) * _ALIGNED for width in widths)))
    for first in range(0, num_blocks, group):
        count = min(group, num_blocks - first)
        parts: list[Part] = []
        place = offset = 0
        for tensor, width in enumerate(widths):
            column = 0
            while column < width:
                room = (piece_bytes - place) // count
                if room < min(width - column, _ALIGNED):
                    yield parts
                    parts, place = [], 0
                    continue
                taken = width - column if room >= width - column else room // _ALIGNED * _ALIGNED
                parts.append(Part(tensor, first, count, column, taken, offset, place))
                place = -(-parts[-1].end // _ALIGNED) * _ALIGNED
                column += taken
                offset += taken
        if parts:
            yield parts


class StagedBlocks:
    """Copies blocks of a pool through ``ring``. Only one thread may use the object, in the context ``CopyStream.after``
    of the ring's stream.

    The pool's tensors are uint8 ``[num_blocks, bytes]``. The content of a block is the concatenation of its rows of all
    tensors.
    """

    def __init__(self, ring: StagingRing) -> None:
        self._ring = ring

    @torch.inference_mode()  # The pool's tensors may be of this mode.
    def read(self, memory: Sequence[torch.Tensor], block_ids: Sequence[int]) -> list[memoryview]:
        """Return the contents of blocks, each in memory of its own. When the method returns or raises an error, no work
        reads the blocks.
        """
        widths = [tensor.shape[1] for tensor in memory]
        if not block_ids:
            return []
        contents = [np.empty(sum(widths), dtype=np.uint8) for _ in block_ids]
        ids, scratch = self._on_device(memory, block_ids)
        running: deque[tuple[Piece, list[Part]]] = deque()
        try:
            for parts in plan_pieces(widths, len(block_ids), self._ring.piece_bytes):
                if len(running) == self._ring.num_pieces:  # The next piece still has bytes of earlier blocks.
                    _take_out(*running.popleft(), contents)
                piece = self._ring.take()
                gathers = [_gather(memory[part.tensor], ids, part, scratch) for part in parts]
                piece.launch(_in_order([*gathers, _copy(piece.memory, scratch, parts[-1].end)]))
                running.append((piece, parts))
            while running:
                _take_out(*running.popleft(), contents)
        finally:
            self._ring.settle()
        return [content.data for content in contents]

    @torch.inference_mode()  # The pool's tensors may be of this mode.
    def write(self, memory: Sequence[torch.Tensor], block_ids: Sequence[int], contents: Sequence[Content]) -> None:
        """Write ``contents`` to blocks. When the method returns or raises an error, no work writes the blocks.

        Raises ValueError if a content is shorter than a block, or if there are more or fewer contents than blocks.
        """
        widths = [tensor.shape[1] for tensor in memory]
        rows = [np.frombuffer(content, dtype=np.uint8) for _, content in zip(block_ids, contents, strict=True)]
        if not rows:
            return
        if (shortest := min(map(len, rows))) < sum(widths):
            raise ValueError(f"a block has {sum(widths)} bytes, but its content has only {shortest} bytes")
        ids, scratch = self._on_device(memory, block_ids)
        try:
            for parts in plan_pieces(widths, len(rows), self._ring.piece_bytes):
                piece = self._ring.take()
                for part in parts:
                    for row, staged in zip(rows[part.blocks], _rows(piece, part), strict=True):
                        staged[:] = row[part.bytes]
                scatters = [_scatter(memory[part.tensor], ids, part, scratch) for part in parts]
                piece.launch(_in_order([_copy(scratch, piece.memory, parts[-1].end), *scatters]))
        finally:
            self._ring.settle()

    def _on_device(self, memory: Sequence[torch.Tensor], block_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block IDs, int64 ``[blocks]``, and memory for one piece, on the device of the pool."""
        device = memory[0].device
        scratch = torch.empty(self._ring.piece_bytes, dtype=torch.uint8, device=device)
        return torch.tensor(block_ids, dtype=torch.int64).to(device), scratch


def _take_out(piece: Piece, parts: Sequence[Part], contents: Sequence[Bytes]) -> None:
    piece.wait()
    for part in parts:
        for content, staged in zip(contents[part.blocks], _rows(piece, part), strict=True):
            content[part.bytes] = staged


def _rows(piece: Piece, part: Part) -> Bytes:
    staged: Bytes = piece.memory[part.place : part.end].numpy()
    return staged.reshape(part.num_blocks, part.width)


def _in_order(works: Sequence[Work]) -> Work:
    def launch() -> None:
        for work in works:
            work()

    return launch


def _copy(target: torch.Tensor, source: torch.Tensor, end: int) -> Work:
    return lambda: target[:end].copy_(source[:end], non_blocking=True)


def _gather(tensor: torch.Tensor, ids: torch.Tensor, part: Part, scratch: torch.Tensor) -> Work:
    blocks, rows = _in_words(tensor, part, scratch)
    return lambda: torch.index_select(blocks, 0, ids[part.blocks], out=rows)


def _scatter(tensor: torch.Tensor, ids: torch.Tensor, part: Part, scratch: torch.Tensor) -> Work:
    blocks, rows = _in_words(tensor, part, scratch)
    return lambda: blocks.index_copy_(0, ids[part.blocks], rows)


def _in_words(tensor: torch.Tensor, part: Part, scratch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns of all blocks of a tensor, and the rows in ``scratch``, as words of eight bytes if possible."""
    blocks = tensor[:, part.column : part.column + part.width]
    rows = scratch[part.place : part.end].view(part.num_blocks, part.width)
    if tensor.shape[1] % _WORD or tensor.storage_offset() % _WORD:
        return blocks, rows
    return blocks.view(torch.int64), rows.view(torch.int64)
