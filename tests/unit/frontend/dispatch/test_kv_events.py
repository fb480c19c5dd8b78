"""Engines' cache changes handed to subscribers: states, numbers, slow readers."""

import pytest

from penstock_common.errors import DataLoss
from penstock_common.types.kv_transfer import AllBlocksCleared, BlockMedia, BlockRemoved, BlockStored, KvCacheEvent
from penstock_frontend.dispatch import kv_events
from penstock_frontend.dispatch.kv_events import FIRST_SEQUENCE, KvEventBatch, KvEventFeed, KvSubscription


def stored(*numbers: int, parent: int | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=[name(n) for n in numbers],
        parent_hash=b"" if parent is None else name(parent),
        token_ids=[n * 10 + i for n in numbers for i in range(2)],
        block_size=2,
    )


def name(number: int) -> bytes:
    return number.to_bytes(4, "big")


async def take(subscription: KvSubscription, count: int) -> list[KvEventBatch]:
    return [await anext(subscription) for _ in range(count)]


def numbers(events: list[KvCacheEvent]) -> list[list[int]]:
    return [[int.from_bytes(h, "big") for h in e.block_hashes] for e in events if isinstance(e, BlockStored)]


async def test_a_state_lists_parents_before_children_in_any_order_of_storing() -> None:
    feed = KvEventFeed()
    feed.publish("a", 0, [stored(1), stored(2, parent=1), stored(3, parent=2)])
    feed.publish("a", 0, [BlockRemoved(block_hashes=[name(1)]), stored(1), stored(9)])
    (state,) = await take(feed.subscribe(), 1)
    assert numbers(list(state.events)) == [[1, 2, 3], [9]]
    assert state.sequence == FIRST_SEQUENCE + 2


async def test_blocks_with_one_parent_are_rows_of_their_own() -> None:
    feed = KvEventFeed()
    feed.publish("a", 0, [stored(1, 2), stored(3, parent=1), stored(4, parent=3)])
    (state,) = await take(feed.subscribe(), 1)
    runs = [event for event in state.events if isinstance(event, BlockStored)]
    assert numbers(list(runs)) == [[1, 2], [3, 4]]
    assert [run.parent_hash for run in runs] == [b"", name(1)]
    assert runs[1].token_ids == [30, 31, 40, 41]


async def test_a_child_whose_parent_is_gone_is_told_with_that_parent() -> None:
    feed = KvEventFeed()
    feed.publish("a", 0, [stored(1, 2), BlockRemoved(block_hashes=[name(1)])])
    (state,) = await take(feed.subscribe(), 1)
    (run,) = state.events
    assert isinstance(run, BlockStored)
    assert run.parent_hash == name(1)


async def test_a_large_state_is_several_batches_that_end_at_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_BATCH_BLOCKS", 2)
    feed = KvEventFeed()
    feed.publish("a", 0, [stored(n) for n in range(1, 6)])
    subscription = feed.subscribe()
    feed.publish("a", 0, [stored(7)])
    batches = await take(subscription, 4)
    assert [len(batch.events) for batch in batches] == [2, 2, 1, 1]
    assert [batch.sequence - FIRST_SEQUENCE for batch in batches] == [-1, 0, 1, 2]


async def test_an_emptied_cache_has_no_state() -> None:
    feed = KvEventFeed()
    feed.publish("a", 0, [stored(1), AllBlocksCleared()])
    subscription = feed.subscribe()
    feed.publish("a", 0, [stored(2)])
    (batch,) = await take(subscription, 1)
    assert numbers(list(batch.events)) == [[2]]


async def test_a_replacement_rank_continues_the_sequence_numbers() -> None:
    feed = KvEventFeed()
    subscription = feed.subscribe()
    feed.publish("a", 3, [stored(1)])
    feed.gone("a")
    feed.publish("b", 3, [stored(1)])
    batches = await take(subscription, 3)
    assert [(batch.rank, batch.sequence - FIRST_SEQUENCE) for batch in batches] == [(3, 1), (3, 2), (3, 3)]


async def test_an_engine_that_goes_with_an_empty_cache_goes_without_a_word() -> None:
    feed = KvEventFeed()
    feed.publish("a", 0, [stored(1), BlockRemoved(block_hashes=[name(1)])])
    subscription = feed.subscribe()
    feed.gone("a")
    feed.gone("never there")
    feed.publish("b", 0, [stored(2)])
    (batch,) = await take(subscription, 1)
    assert numbers(list(batch.events)) == [[2]]


async def test_a_subscriber_too_far_behind_is_told_to_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_BEHIND", 2)
    feed = KvEventFeed()
    slow, quick = feed.subscribe(), feed.subscribe()
    for number in range(4):
        feed.publish("a", 0, [stored(number)])
        await take(quick, 1)
    with pytest.raises(DataLoss, match="from sequence number 0"):
        await anext(slow)
    feed.publish("a", 0, [stored(9)])
    assert numbers(list((await take(quick, 1))[0].events)) == [[9]]


async def test_a_state_says_which_media_are_in_blocks() -> None:
    feed = KvEventFeed()
    media = [[BlockMedia("i", 1)], [BlockMedia("i", -1)]]
    event = BlockStored(
        block_hashes=[name(1), name(2)], parent_hash=b"", token_ids=[0] * 4, block_size=2, extra_keys=media
    )
    feed.publish("a", 0, [event, stored(9)])
    (state,) = await take(feed.subscribe(), 1)
    assert [e.extra_keys for e in state.events if isinstance(e, BlockStored)] == [media, []]
