"""Which engines have which KV cache blocks."""

from collections.abc import Iterable, Sequence
from itertools import compress, islice

_STRIDE = 32
"""Blocks of which only the last is looked up while every engine that had the one before has it."""

_DIGITS = bytes.maketrans(b"01", b"\0\1")


class PrefixIndex:
    """From a block's hash to the engines that have it. Pure: whoever hears of changes tells it.

    An engine is a bit, so that one look-up answers for all of them. The index holds ``max_entries`` pairs of a block and an
    engine; what comes while it is full is left out, and so is what comes behind a block that is not known: engines evict
    a prompt's last blocks first, so whoever has a block has those before it.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._holders: dict[bytes, int] = {}
        self._blocks: dict[str, set[bytes]] = {}
        self._bits: dict[str, int] = {}
        self._engines: list[str] = []
        """By place of their bits; empty where there is none."""

    def __len__(self) -> int:
        """Pairs of a block and an engine."""
        return self._num_entries

    @property
    def full(self) -> bool:
        """Whether something more would be left out."""
        return self._num_entries >= self._max_entries

    def num_on(self, engine: str) -> int:
        """Blocks that an engine is known to have."""
        return len(self._blocks.get(engine, ()))

    def has(self, engine: str, block_hash: bytes) -> bool:
        """Whether an engine is known to have a block."""
        return block_hash in self._blocks.get(engine, ())

    def store(self, engine: str, block_hashes: Iterable[bytes], parent: bytes = b"") -> int:
        """An engine has these blocks from now on, which stand behind ``parent``; empty: at the beginning, or anywhere.
        Returns how many of them were left out.
        """
        blocks, bit, holders = self._blocks_of(engine), self._bits[engine], self._holders
        left_out = 0
        known = not parent or parent in blocks
        for block_hash in block_hashes:
            if block_hash in blocks:
                continue
            if not known or self._num_entries >= self._max_entries:
                left_out += 1
                continue
            blocks.add(block_hash)
            others = holders.get(block_hash)
            holders[block_hash] = bit if others is None else others | bit
            self._num_entries += 1
        return left_out

    def remove(self, engine: str, block_hashes: Iterable[bytes]) -> None:
        """An engine has these blocks no longer; those that it is not known to have do not matter."""
        blocks = self._blocks.get(engine)
        if blocks is None:
            return
        for block_hash in block_hashes:
            if block_hash in blocks:
                blocks.remove(block_hash)
                self._release(block_hash, self._bits[engine])

    def clear(self, engine: str) -> None:
        """An engine has no blocks any more, or it is gone."""
        blocks = self._blocks.pop(engine, None)
        if blocks is None:
            return
        bit = self._bits.pop(engine)
        self._engines[bit.bit_length() - 1] = ""
        for block_hash in blocks:
            self._release(block_hash, bit)

    def runs(self, block_hashes: Iterable[bytes], block_size: int = 1) -> dict[str, int]:
        """By engine, how many of a prompt's tokens are in the blocks that it has; engines without the first block are not there.
        ``block_hashes`` is read a few blocks further than any engine has them.
        """
        holders = self._holders
        runs: dict[str, int] = {}
        hashes = iter(block_hashes)
        first = next(hashes, b"")
        engines, count = holders.get(first, 0), 1
        while engines:
            stride = list(islice(hashes, _STRIDE))
            if not stride:
                self._end(runs, engines, count * block_size)
                break
            place = 0
            while engines and engines & ~holders.get(stride[-1], 0):
                place = self._first_lost(engines, stride, place)
                lost = engines & ~holders.get(stride[place], 0)
                self._end(runs, lost, (count + place) * block_size)
                engines ^= lost
            count += len(stride)
        return runs

    def _first_lost(self, engines: int, stride: Sequence[bytes], first: int) -> int:
        """The place from ``first`` on of the first block that not all of these engines have; they do not all have the last."""
        last = len(stride) - 1
        while first < last:
            middle = (first + last) // 2
            if engines & ~self._holders.get(stride[middle], 0):
                last = middle
            else:
                first = middle + 1
        return first

    def _end(self, runs: dict[str, int], engines: int, length: int) -> None:
        """The runs of these engines are so long."""
        if engines & (engines - 1):
            digits = f"{engines:b}"[::-1].encode().translate(_DIGITS)
            runs.update(dict.fromkeys(compress(self._engines, digits), length))
        else:
            runs[self._engines[engines.bit_length() - 1]] = length

    def _blocks_of(self, engine: str) -> set[bytes]:
        blocks = self._blocks.get(engine)
        if blocks is None:
            if "" not in self._engines:
                self._engines.append("")
            place = self._engines.index("")
            self._engines[place], self._bits[engine] = engine, 1 << place
            blocks = self._blocks[engine] = set()
        return blocks

    def _release(self, block_hash: bytes, bit: int) -> None:
        self._num_entries -= 1
        if left := self._holders[block_hash] & ~bit:
            self._holders[block_hash] = left
        else:
            del self._holders[block_hash]
