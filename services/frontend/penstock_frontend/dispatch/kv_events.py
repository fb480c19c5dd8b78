"""Feed of the engines' KV cache events, for external gateways that route prompts by cached prefix."""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from penstock_common.errors import DataLoss
from penstock_common.types.kv_transfer import AllBlocksCleared, BlockMedia, BlockRemoved, BlockStored, KvCacheEvent

FIRST_SEQUENCE = 1 << 20
"""Number after which the sequence numbers of changes begin. Batches that describe the state of a cache at the start of a
subscription have lower numbers than all later changes.
"""
MAX_BEHIND = 10_000
"""Maximum number of batches that may wait for a slow subscriber. If more batches wait, the subscription ends, and the
subscriber must subscribe again.
"""
_BATCH_BLOCKS = 256
"""Approximate maximum number of blocks in a batch that describes the initial state of a cache. Such a batch has about
100 KiB.
"""


class KvEventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Changes of one engine's prefix cache.

    ``timestamp`` is the time at which the frontend received the changes, in seconds since the Unix epoch.
    """

    rank: int
    sequence: int
    timestamp: float
    events: Sequence[KvCacheEvent]


class KvEventFeed:
    """Numbers the cache events of each engine, and sends the events to all subscribers.

    Engines are identified by address.

    The feed stores the blocks that each engine has reported, so every new subscriber first gets the current state of
    all caches. For subscribers, each engine is a rank with its own sequence numbers, without gaps. If two engines
    report the same rank, one of them gets an unused rank. If an engine gets the rank of a lost engine, it continues the
    sequence numbers of this rank.
    """

    def __init__(self) -> None:
        self._engines: dict[str, _Cache] = {}
        self._sequences: dict[int, int] = {}  # the last sequence number of each rank that an engine has ever used
        self._subscriptions: set[KvSubscription] = set()

    def publish(self, engine: str, rank: int, events: Sequence[KvCacheEvent]) -> None:
        """Record changes of an engine's prefix cache, and send them to all subscribers."""
        cache = self._engines.get(engine)
        if cache is None:
            cache = self._engines[engine] = _Cache(self._free_rank(rank))
        for event in events:
            cache.apply(event)
        self._send(cache.rank, events)

    def gone(self, engine: str) -> None:
        """Handle the loss of an engine.

        The feed reports each block of the engine as removed. The feed does not report that the cache was cleared,
        because some subscribers would then clear the caches of all engines.
        """
        cache = self._engines.pop(engine, None)
        if cache is not None and cache.blocks:
            self._send(cache.rank, [BlockRemoved(block_hashes=list(cache.blocks))])

    def subscribe(self) -> "KvSubscription":
        """Return a subscription that yields the current state of all caches, then all later events. The caller must
        close the subscription.
        """
        subscription = KvSubscription(self._state(), on_close=self._subscriptions.discard)
        self._subscriptions.add(subscription)
        return subscription

    def _send(self, rank: int, events: Sequence[KvCacheEvent]) -> None:
        sequence = self._sequences[rank] = self._sequences.get(rank, FIRST_SEQUENCE) + 1
        batch = KvEventBatch(rank=rank, sequence=sequence, timestamp=time.time(), events=events)
        for subscription in list(self._subscriptions):
            subscription.put(batch)

    def _state(self) -> Iterator[KvEventBatch]:
        for cache in self._engines.values():
            batches = list(_batches(cache.runs()))
            last = self._sequences[cache.rank]
            for index, runs in enumerate(batches):
                # the last batch gets the sequence number of the latest change
                sequence = last - len(batches) + 1 + index
                yield KvEventBatch(rank=cache.rank, sequence=sequence, timestamp=time.time(), events=runs)

    def _free_rank(self, wanted: int) -> int:
        taken = {cache.rank for cache in self._engines.values()}
        return wanted if wanted not in taken else min(set(range(len(taken) + 1)) - taken)


class KvSubscription:
    """Subscription of one subscriber to KV cache events. The subscription is an endless asynchronous iterator over
    batches.
    """

    def __init__(self, state: Iterable[KvEventBatch], on_close: "Callable[[KvSubscription], None]") -> None:
        self._batches = deque(state)
        self._limit = len(self._batches) + MAX_BEHIND
        self._on_close = on_close
        self._event = asyncio.Event()
        self._lost = False

    def __aiter__(self) -> "KvSubscription":
        return self

    async def __anext__(self) -> KvEventBatch:
        """Return the next batch of events. Raises DataLoss if more than ``MAX_BEHIND`` batches have waited for the
        subscriber.
        """
        while not self._batches:
            if self._lost:
                raise DataLoss(
                    f"the subscriber is more than {MAX_BEHIND} batches behind; subscribe again from sequence number 0"
                )
            self._event.clear()
            await self._event.wait()
        return self._batches.popleft()

    def put(self, batch: KvEventBatch) -> None:
        """Add a batch to the subscription. If too many batches wait, end the subscription."""
        if len(self._batches) < self._limit:
            self._batches.append(batch)
        else:
            self._lost = True
            self._batches.clear()
            self.close()
        self._event.set()

    def close(self) -> None:
        """Stop receiving batches of events. Idempotent."""
        self._on_close(self)


class _Block(NamedTuple):
    parent_hash: bytes
    token_ids: "array[int]"
    lora_name: str
    media: "list[BlockMedia]"


class _Cache:
    """Blocks in one engine's prefix cache, as reported by the engine's events."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.blocks: dict[bytes, _Block] = {}

    def apply(self, event: KvCacheEvent) -> None:
        """Apply an event to the recorded blocks."""
        match event:
            case BlockStored():
                parent, size = event.parent_hash, event.block_size
                for index, block_hash in enumerate(event.block_hashes):
                    token_ids = array("I", event.token_ids[index * size : (index + 1) * size])
                    media = event.extra_keys[index] if event.extra_keys else []
                    self.blocks[block_hash] = _Block(parent, token_ids, event.lora_name, media)
                    parent = block_hash
            case BlockRemoved():
                for block_hash in event.block_hashes:
                    self.blocks.pop(block_hash, None)
            case AllBlocksCleared():
                self.blocks.clear()

    def runs(self) -> Iterator[BlockStored]:
        """Yield all blocks as runs, in which each block is the parent of the next. A parent block comes before its
        children.
        """
        run: list[bytes] = []
        for chain in self._chains():
            if run and (self.blocks[chain[0]].parent_hash != run[-1] or len(run) >= _BATCH_BLOCKS):
                yield self._stored(run)
                run = []
            run += chain
        if run:
            yield self._stored(run)

    def _chains(self) -> Iterator[list[bytes]]:
        """Yield every block once, in chains from parent to child.

        A chain consists of a block, and of its ancestors that were not in an earlier chain.
        """
        seen: set[bytes] = set()
        for block_hash in self.blocks:
            chain = []
            while block_hash in self.blocks and block_hash not in seen:
                seen.add(block_hash)
                chain.append(block_hash)
                block_hash = self.blocks[block_hash].parent_hash
            if chain:
                yield chain[::-1]

    def _stored(self, run: Sequence[bytes]) -> BlockStored:
        blocks = [self.blocks[block_hash] for block_hash in run]
        return BlockStored(
            block_hashes=list(run),
            parent_hash=blocks[0].parent_hash,
            token_ids=[token_id for block in blocks for token_id in block.token_ids],
            block_size=len(blocks[0].token_ids),
            lora_name=blocks[0].lora_name,
            extra_keys=[block.media for block in blocks] if any(block.media for block in blocks) else [],
        )


def _batches(runs: Iterable[BlockStored]) -> Iterator[list[BlockStored]]:
    """Yield batches of runs of blocks. Each batch is small enough for one message."""
    batch: list[BlockStored] = []
    count = 0
    for run in runs:
        batch.append(run)
        count += len(run.block_hashes)
        if count >= _BATCH_BLOCKS:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch
