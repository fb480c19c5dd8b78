"""Events of the prefix cache for routers: which blocks became findable and which were evicted, in order."""

from collections.abc import Collection, Iterable, Sequence

from penstock_common.block_hash import media_between
from penstock_common.types.kv_transfer import (
    AllBlocksCleared,
    BlockMedia,
    BlockRemoved,
    BlockStored,
    KvCacheEvent,
    KvMedium,
)
from penstock_enginecore.core.request import Request

_Open = tuple[type[BlockStored] | type[BlockRemoved] | None, KvMedium, list[bytes]]
_NOTHING: _Open = (None, KvMedium.DEVICE, [])


class KvEventLog:
    """Events since the last ``take``. A reader that applies all events in order knows the findable blocks of one KV
    cache group in each medium, such as the device or host memory.

    One group represents all groups. The hashes of that group's blocks are plain prefix hashes, so a router can look up
    prompts without information about groups. While ``recording`` is false, no events are recorded.
    """

    def __init__(self, block_size: int, group: int, *, in_full: bool) -> None:
        """Create an empty log. If ``in_full`` is true, events also contain tokens, adapters and media, and the log
        always records.
        """
        self.group = group
        self.recording = in_full
        self._in_full = in_full
        self._block_size = block_size
        self._events: list[KvCacheEvent] = []
        self._open: _Open = _NOTHING
        """The kind, medium and hashes of the last event, if more blocks may be added to that event."""
        self._kept: dict[KvMedium, dict[bytes, None]] = {}

    def stored(self, request: Request, indices: Sequence[int]) -> None:
        """Record that blocks of a request became findable. ``indices`` are the blocks' positions in the request, in
        ascending order. If the log is ``in_full``, each run of adjacent blocks is one event.
        """
        if not self.recording:
            return
        if not self._in_full:
            if indices:
                self._add(BlockStored, KvMedium.DEVICE, map(request.block_hashes.__getitem__, indices))
            return
        first = 0
        for i in range(1, len(indices) + 1):
            if i == len(indices) or indices[i] != indices[i - 1] + 1:
                self._add_run(request, indices[first], indices[i - 1] + 1)
                first = i

    def _add_run(self, request: Request, first: int, last: int) -> None:
        hashes, size = request.block_hashes, self._block_size
        self._open = _NOTHING
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
        """Return the media items of each block from ``first`` to ``last``."""
        size = self._block_size
        return [
            [
                BlockMedia(feature.identifier, feature.offset - start)
                for feature in media_between(request.mm_features, start, start + size)
            ]
            for start in range(first * size, last * size, size)
        ]

    def removed(self, blocks: Iterable[tuple[int, bytes, int]]) -> None:
        """Record that blocks were evicted. Each block is given as group, hash and id."""
        if self.recording and (hashes := [block_hash for group, block_hash, _ in blocks if group == self.group]):
            self._add(BlockRemoved, KvMedium.DEVICE, hashes)

    def kept(self, medium: KvMedium, block_hash: bytes) -> None:
        """Record that a block is findable in a medium outside the pool, such as host memory. The event has no
        tokens.
        """
        of_medium = self._kept.setdefault(medium, {})
        if block_hash in of_medium:
            return
        of_medium[block_hash] = None
        if self.recording:
            self._add(BlockStored, medium, (block_hash,))

    def lost(self, medium: KvMedium, block_hash: bytes) -> None:
        """Record that a block is no longer findable in a medium. The call is ignored if the block was not findable in
        that medium.
        """
        of_medium = self._kept.get(medium, {})
        if block_hash in of_medium:
            del of_medium[block_hash]
            if self.recording:
                self._add(BlockRemoved, medium, (block_hash,))

    def kept_in(self, medium: KvMedium) -> Collection[bytes]:
        """Return the hashes of the blocks that are findable in a medium outside the pool."""
        return self._kept.get(medium, {}).keys()

    def cleared(self) -> None:
        """Record that no block in the pool is findable, and drop pending events. The recorded event clears all media,
        so the log then records the blocks in the other media again.
        """
        if not self.recording:
            return
        self.take()
        self._events.append(AllBlocksCleared())
        for medium, hashes in self._kept.items():
            if hashes:
                self._add(BlockStored, medium, hashes)

    def record(self, on: bool) -> None:
        """Start or stop recording events. Stopping drops pending events. A log that is ``in_full`` always records."""
        self.recording = on or self._in_full
        if not self.recording:
            self.take()

    def take(self) -> list[KvCacheEvent]:
        """Return the events since the last call."""
        events, self._events, self._open = self._events, [], _NOTHING
        return events

    def _add(self, kind: type[BlockStored] | type[BlockRemoved], medium: KvMedium, hashes: Iterable[bytes]) -> None:
        """Record a change of blocks, by their hashes only. Consecutive changes of the same kind become one event."""
        last_kind, last_medium, block_hashes = self._open
        if kind is not last_kind or medium is not last_medium:
            block_hashes = []
            self._open = kind, medium, block_hashes
            size = self._block_size
            self._events.append(
                BlockRemoved(block_hashes=block_hashes, medium=medium)
                if kind is BlockRemoved
                else BlockStored(
                    block_hashes=block_hashes, parent_hash=b"", token_ids=[], block_size=size, medium=medium
                )
            )
        block_hashes.extend(hashes)
