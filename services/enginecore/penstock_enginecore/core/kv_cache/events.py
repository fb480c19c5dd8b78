"""What has become findable in the prefix cache and what no longer is, in order, for routers that follow it."""

from collections.abc import Collection, Sequence

from penstock_common.block_hash import media_between
from penstock_common.types.kv_events import AllBlocksCleared, BlockMedia, BlockRemoved, BlockStored, KvCacheEvent
from penstock_common.types.kv_transfer import KvMedium
from penstock_enginecore.core.request import Request


class KvEventLog:
    """Events since the last ``take``. Applied in order, they give the findable blocks of one group, in each medium.

    One group stands for all: its blocks have the prefix's hash without more, so a router that knows nothing of groups can
    look prompts up in it.
    """

    def __init__(self, block_size: int, group: int) -> None:
        self.group = group
        self._block_size = block_size
        self._events: list[KvCacheEvent] = []
        self._kept: dict[KvMedium, dict[bytes, None]] = {}

    def stored(self, request: Request, indices: Sequence[int]) -> None:
        """Blocks of the request, by ascending place, have become findable. Each run of neighbours is an event."""
        first = 0
        for i in range(1, len(indices) + 1):
            if i == len(indices) or indices[i] != indices[i - 1] + 1:
                self._add_run(request, indices[first], indices[i - 1] + 1)
                first = i

    def _add_run(self, request: Request, first: int, last: int) -> None:
        hashes, size = request.block_hashes, self._block_size
        self._events.append(
            BlockStored(
                block_hashes=hashes[first:last],
                parent_hash=hashes[first - 1] if first else b"",
                token_ids=request.all_token_ids[first * size : last * size],
                block_size=size,
                lora_name="" if request.lora is None else request.lora.name,
                extra_keys=self._media(request, first, last) if first * size < request.media_end else [],
            )
        )

    def _media(self, request: Request, first: int, last: int) -> list[list[BlockMedia]]:
        """Of each of the blocks."""
        size = self._block_size
        return [
            [
                BlockMedia(feature.identifier, feature.offset - start)
                for feature in media_between(request.mm_features, start, start + size)
            ]
            for start in range(first * size, last * size, size)
        ]

    def removed(self, block_hash: bytes) -> None:
        """A block has been taken for something else."""
        self._add_removed(KvMedium.DEVICE, block_hash)

    def kept(self, medium: KvMedium, block_hash: bytes) -> None:
        """A block can be found outside the pool. Neighbouring news become one event, which repeats no tokens."""
        of_medium = self._kept.setdefault(medium, {})
        if block_hash in of_medium:
            return
        of_medium[block_hash] = None
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.medium is medium:
            last.block_hashes.append(block_hash)
        else:
            self._events.append(self._kept_event(medium, [block_hash]))

    def lost(self, medium: KvMedium, block_hash: bytes) -> None:
        """It cannot be found there any more. One that was not there is passed over."""
        of_medium = self._kept.get(medium, {})
        if block_hash in of_medium:
            del of_medium[block_hash]
            self._add_removed(medium, block_hash)

    def kept_in(self, medium: KvMedium) -> Collection[bytes]:
        """Blocks that can be found there, outside the pool."""
        return self._kept.get(medium, {}).keys()

    def cleared(self) -> None:
        """Nothing can be found in the pool any more, so nothing that was not taken yet matters. What can be found elsewhere still
        is told again: the event speaks of all media.
        """
        self._events = [AllBlocksCleared()]
        self._events += [self._kept_event(medium, list(hashes)) for medium, hashes in self._kept.items() if hashes]

    def take(self) -> list[KvCacheEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def _kept_event(self, medium: KvMedium, block_hashes: list[bytes]) -> BlockStored:
        return BlockStored(
            block_hashes=block_hashes, parent_hash=b"", token_ids=[], block_size=self._block_size, medium=medium
        )

    def _add_removed(self, medium: KvMedium, block_hash: bytes) -> None:
        """Neighbouring removals become one event."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium is medium:
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved(block_hashes=[block_hash], medium=medium))
