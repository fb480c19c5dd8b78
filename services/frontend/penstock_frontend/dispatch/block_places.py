"""In which media an engine has its blocks."""

from collections.abc import Callable, Iterable

from penstock_common.types.kv_transfer import KvMedium


class BlockPlaces:
    """Of the blocks that one engine has outside its KV cache, in which media they are, the KV cache among them. All others are in
    the KV cache alone, so an engine without host memory and disk takes no memory here. Pure.
    """

    def __init__(self) -> None:
        self._media: dict[bytes, int] = {}
        """A bit for each medium."""

    def stored(self, medium: KvMedium, block_hashes: Iterable[bytes], has: Callable[[bytes], bool]) -> None:
        """The engine has blocks in a medium from now on. ``has``: whether it was known to have one, wherever."""
        if medium is KvMedium.DEVICE:
            for block_hash in block_hashes if self._media else ():
                if block_hash in self._media:
                    self._media[block_hash] |= _DEVICE
            return
        for block_hash in block_hashes:
            before = self._media.get(block_hash)
            if before is None:
                before = _DEVICE if has(block_hash) else 0
            self._media[block_hash] = before | 1 << medium

    def removed(self, medium: KvMedium, block_hashes: Iterable[bytes]) -> list[bytes]:
        """It has them there no more. Returns those that it has nowhere now."""
        nowhere = []
        for block_hash in block_hashes:
            before = self._media.get(block_hash)
            if before is None:
                if medium is KvMedium.DEVICE:
                    nowhere.append(block_hash)
                continue
            left = before & ~(1 << medium)
            if left & ~_DEVICE:
                self._media[block_hash] = left
                continue
            del self._media[block_hash]
            if not left:
                nowhere.append(block_hash)
        return nowhere

    def clear(self) -> None:
        """It has none."""
        self._media.clear()


_DEVICE = 1 << KvMedium.DEVICE
