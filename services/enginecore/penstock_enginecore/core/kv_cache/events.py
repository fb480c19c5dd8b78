"""What has become findable in the prefix cache and what no longer is, in order, for routers that follow it."""

from collections.abc import Sequence

from penstock_common.block_hash import media_between
from penstock_common.types.kv_events import AllBlocksCleared, BlockMedia, BlockRemoved, BlockStored, KvCacheEvent
from penstock_enginecore.core.request import Request


class KvEventLog:
    """Events since the last ``take``. Applied in order, they give the set of findable blocks of one group.

    One group stands for all: its blocks have the prefix's hash without more, so a router that knows nothing of groups can
    look prompts up in it.
    """

    def __init__(self, block_size: int, group: int) -> None:
        self.group = group
        self._block_size = block_size
        self._events: list[KvCacheEvent] = []

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
        """A block has been taken for something else. Neighbouring removals become one event."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved(block_hashes=[block_hash]))

    def cleared(self) -> None:
        """Nothing can be found any more, so nothing that was not taken yet matters."""
        self._events = [AllBlocksCleared()]

    def take(self) -> list[KvCacheEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events
