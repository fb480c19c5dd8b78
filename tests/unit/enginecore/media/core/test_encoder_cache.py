"""Cached embeddings of media, and their eviction."""

import pytest

from penstock_enginecore.media.core.encoder_cache import EncoderCache


def cache_of(**items):
    cache = EncoderCache(10)
    for name, num_embeds in items.items():
        cache.add(name, num_embeds)
    return cache


def test_items_go_in_the_order_of_their_last_use_and_no_more_than_needed():
    cache = cache_of(a=3, b=3, c=3)
    cache.pin("a")
    cache.unpin("a")
    assert cache.room_for(1, urgent=False) == []
    assert cache.room_for(2, urgent=False) == ["b"]
    assert cache.room_for(5, urgent=False) == ["b", "c"]
    assert cache.room_for(10, urgent=False) == ["b", "c", "a"]


def test_embeddings_of_running_requests_stay():
    cache = cache_of(a=4, b=4)
    cache.pin("a")
    assert cache.room_for(6, urgent=True) == ["b"]
    assert cache.room_for(7, urgent=True) is None
    with pytest.raises(ValueError, match="because a running request needs the item"):
        cache.remove("a")
    cache.unpin("a")
    with pytest.raises(ValueError, match="not pinned"):
        cache.unpin("a")


def test_a_place_of_each_of_two_requests_pins_an_item_twice():
    cache = cache_of(a=4)
    cache.pin("a")
    cache.pin("a")
    cache.unpin("a")
    assert cache.not_pinned == []
    cache.unpin("a")
    assert cache.not_pinned == ["a"]


def test_items_of_waiting_requests_are_evicted_last_and_only_for_running_ones():
    cache = cache_of(a=4, b=4)
    cache.claim("a", "r1")
    cache.claim("a", "r2")
    assert cache.room_for(6, urgent=False) == ["b"]
    assert cache.room_for(7, urgent=False) is None
    assert cache.room_for(6, urgent=True) == ["b"]
    assert cache.room_for(7, urgent=True) == ["b", "a"]
    cache.unclaim("a", "r1")
    assert cache.claims("a") == ("r2",)
    assert cache.is_wanted("a")
    cache.unclaim("a", "r2")
    assert not cache.is_wanted("a")
    assert cache.room_for(7, urgent=False) == ["b", "a"]


def test_room_is_counted_in_embeddings():
    cache = cache_of(a=4, b=6)
    assert (cache.num_embeds, cache.usage, len(cache)) == (10, 1.0, 2)
    with pytest.raises(ValueError, match="too little space"):
        cache.add("c", 1)
    cache.remove("a")
    assert ("a" in cache, cache.usage) == (False, 0.6)
    with pytest.raises(ValueError, match="already in the encoder cache"):
        cache.add("b", 1)
