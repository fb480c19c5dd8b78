"""Adapters in host memory: evicted and kept adapters, and the error when none can be evicted."""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock_common.errors import FailedPrecondition, NotFound, ResourceExhausted
from penstock_enginecore.lora.core.cache import LoraCache, LoraRoom, NotWantedError, Reservation, Want

A, B, C = b"a", b"b", b"c"


def test_the_least_recently_used_goes_first() -> None:
    cache = LoraCache(30)
    for digest in (A, B, C):
        assert cache.add(digest, 10) == []
    cache.acquire(A)
    cache.release(A)
    assert cache.add(b"d", 20) == [B, C]
    assert cache.digests == (A, b"d")
    assert cache.num_evictions == 2


def test_used_and_pinned_adapters_stay() -> None:
    cache = LoraCache(30)
    for digest in (A, B, C):
        cache.add(digest, 10)
    cache.acquire(A)
    cache.pin(B)
    assert cache.add(b"d", 10) == [C]


def test_a_cache_of_adapters_in_use_is_full_and_says_when_to_come_back() -> None:
    cache = LoraCache(20)
    cache.add(A, 10)
    cache.add(B, 5)
    cache.acquire(A)
    with pytest.raises(
        ResourceExhausted, match=r"16 bytes.*only 10 bytes.*1 adapters in lora\.cpu_memory \(20 bytes\)"
    ) as e:
        cache.add(C, 16)
    assert e.value.reason == "LORA_CACHE_FULL"
    assert e.value.retry_after == 1.0
    assert cache.digests == (B, A)  # nothing was evicted needlessly


def test_an_adapter_larger_than_the_budget_is_refused_for_good() -> None:
    with pytest.raises(FailedPrecondition, match=r"31 bytes, but lora\.cpu_memory is only 30") as e:
        LoraCache(30).add(A, 31)
    assert e.value.reason == "LORA_TOO_LARGE"


def test_a_removed_adapter_leaves_with_its_last_user() -> None:
    cache = LoraCache(30)
    cache.add(A, 10)
    cache.pin(A)
    cache.acquire(A)
    cache.acquire(A)
    assert cache.remove(A) == []
    assert not cache.is_pinned(A)
    assert cache.release(A) == []
    assert cache.release(A) == [A]
    assert len(cache) == cache.num_bytes == 0


def test_one_that_is_wanted_again_before_it_has_left_stays() -> None:
    cache = LoraCache(30)
    cache.add(A, 10)
    cache.acquire(A)
    cache.remove(A)
    cache.add(A, 10)
    assert cache.release(A) == []
    assert cache.num_bytes == 10


def test_a_missing_adapter_cannot_be_pinned() -> None:
    with pytest.raises(NotFound, match="61"):
        LoraCache(30).pin(A)


def test_a_release_too_many_is_a_defect() -> None:
    cache = LoraCache(30)
    cache.add(A, 10)
    with pytest.raises(ValueError, match="not in use"):
        cache.release(A)


def test_room_is_kept_for_an_adapter_that_is_on_its_way() -> None:
    cache = LoraCache(30)
    for digest in (A, B, C):
        cache.add(digest, 10)
    assert cache.reserve(15) == [A, B]
    assert (cache.num_bytes, cache.num_reserved) == (10, 15)
    with pytest.raises(ResourceExhausted, match="has 16 bytes, but only 15 bytes are available"):
        cache.add(b"d", 16)  # although the reserved adapters are not loaded yet
    assert cache.add(b"d", 12, 15) == []
    assert (cache.num_bytes, cache.num_reserved) == (22, 0)
    assert cache.num_evictions == 2


def test_more_than_was_reserved_needs_room_as_ever() -> None:
    cache = LoraCache(30)
    cache.add(A, 20)
    assert cache.reserve(10) == []
    assert cache.add(B, 11, 10) == [A]


def test_room_that_is_not_needed_is_given_back_once() -> None:
    cache = LoraCache(30)
    cache.add(A, 10)
    cache.reserve(20)
    assert cache.add(A, 10, 5) == []  # the adapter was already loaded by another request
    cache.cancel(15)
    assert cache.num_reserved == 0
    with pytest.raises(ValueError, match="only 0 bytes are reserved, so a reservation of 1"):
        cache.cancel(1)


SIZES = {bytes([i]): 1 + i % 5 for i in range(12)}
digests = st.sampled_from(sorted(SIZES))


class CacheMachine(RuleBasedStateMachine):
    """Compares the cache with a plain list of its adapters, in the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = LoraCache(12)
        self.order: list[bytes] = []
        self.users = dict.fromkeys(SIZES, 0)
        self.pinned: set[bytes] = set()
        self.leaving: set[bytes] = set()
        self.reserved: list[int] = []

    def used(self, digest: bytes) -> None:
        self.order.remove(digest)
        self.order.append(digest)
        self.leaving.discard(digest)

    def gone(self, digest: bytes) -> None:
        self.order.remove(digest)
        self.pinned.discard(digest)
        self.leaving.discard(digest)

    def make_room(self, size: int, reserved: int, make: Callable[[], list[bytes]]) -> bool:
        """Return whether there is free memory after evictions. ``reserved`` bytes of the reservations belong to this
        adapter.
        """
        may_go = [d for d in self.order if not self.users[d] and d not in self.pinned]
        free = 12 - sum(SIZES[d] for d in self.order) - sum(self.reserved) + reserved
        if free + sum(SIZES[d] for d in may_go) < size:
            with pytest.raises(ResourceExhausted):
                make()
            return False
        evicted = make()
        assert evicted == may_go[: len(evicted)]
        room = free + sum(SIZES[d] for d in evicted)
        assert room >= size
        assert not evicted or room - SIZES[evicted[-1]] < size  # no adapter was evicted unnecessarily
        for other in evicted:
            self.gone(other)
        return True

    @rule(size=st.integers(0, 5))
    def reserve(self, size: int) -> None:
        if self.make_room(size, 0, lambda: self.cache.reserve(size)):
            self.reserved.append(size)

    @rule()
    def cancel(self) -> None:
        if self.reserved:
            self.cache.cancel(self.reserved.pop())

    @rule(digest=digests, on_its_way=st.booleans())
    def add(self, digest: bytes, on_its_way: bool) -> None:
        reserved = self.reserved[0] if on_its_way and self.reserved else 0
        size = SIZES[digest]
        if digest in self.order:
            assert self.cache.add(digest, size, reserved) == []
            self.used(digest)
        elif self.make_room(size, reserved, lambda: self.cache.add(digest, size, reserved)):
            self.order.append(digest)
        else:
            return
        if reserved:
            self.reserved.pop(0)

    @rule(digest=digests)
    def acquire(self, digest: bytes) -> None:
        if digest in self.order:
            self.cache.acquire(digest)
            self.users[digest] += 1
            self.used(digest)

    @rule(digest=digests)
    def release(self, digest: bytes) -> None:
        if self.users[digest]:
            self.users[digest] -= 1
            leaves = digest in self.leaving and not self.users[digest]
            assert self.cache.release(digest) == ([digest] if leaves else [])
            if leaves:
                self.gone(digest)

    @rule(digest=digests, pinned=st.booleans())
    def pin(self, digest: bytes, pinned: bool) -> None:
        if digest not in self.order:
            with pytest.raises(NotFound):
                self.cache.pin(digest, pinned=pinned)
            return
        self.cache.pin(digest, pinned=pinned)
        (self.pinned.add if pinned else self.pinned.discard)(digest)
        if pinned:
            self.leaving.discard(digest)

    @rule(digest=digests)
    def remove(self, digest: bytes) -> None:
        removed = self.cache.remove(digest)
        if digest not in self.order:
            assert removed == []
        elif self.users[digest]:
            assert removed == []
            self.pinned.discard(digest)
            self.leaving.add(digest)
        else:
            assert removed == [digest]
            self.gone(digest)

    @invariant()
    def holds_what_it_should(self) -> None:
        assert list(self.cache.digests) == self.order
        assert self.cache.num_bytes == sum(SIZES[d] for d in self.order)
        assert self.cache.num_reserved == sum(self.reserved)
        assert self.cache.num_bytes + self.cache.num_reserved <= 12
        assert {d for d in SIZES if self.cache.is_pinned(d)} == self.pinned
        assert {d for d in SIZES if self.cache.is_used(d)} == {d for d in SIZES if self.users[d]}


TestCacheMachine = CacheMachine.TestCase


# Memory for adapters in the process of loading: reserved in order, once per adapter, and released afterwards.

HELD = b"held"


class Rooms:
    """A cache of 30 bytes, of which an adapter in use takes 10."""

    def __init__(self) -> None:
        self.cache = LoraCache(30)
        self.cache.add(HELD, 10)
        self.cache.acquire(HELD)
        self.gone: list[bytes] = []
        self.wanted = True
        self.room = LoraRoom(self.cache, self.unload)

    def unload(self, digests: list[bytes]) -> int:
        self.gone += digests
        return len(self.gone)

    def want(self, num_bytes: int) -> tuple[Reservation, Future[None]]:
        want = Want(Reservation(), num_bytes, Future(), lambda: self.wanted)
        self.room.want(want)
        return want.reservation, want.made


def test_what_fits_is_reserved_at_once() -> None:
    rooms = Rooms()
    reservation, made = rooms.want(20)
    assert made.result(0) is None
    assert reservation.num_bytes == rooms.cache.num_reserved == 20
    rooms.room.end(reservation)
    assert reservation.num_bytes == rooms.cache.num_reserved == 0


def test_others_go_for_it() -> None:
    rooms = Rooms()
    rooms.cache.release(HELD)
    reservation, _ = rooms.want(25)
    assert rooms.gone == [HELD]
    assert reservation.number == 1


def test_what_finds_no_room_fails_where_nothing_is_on_its_way() -> None:
    rooms = Rooms()
    _, made = rooms.want(21)
    with pytest.raises(ResourceExhausted):
        made.result(0)
    _, large = rooms.want(31)
    with pytest.raises(FailedPrecondition):
        large.result(0)


def test_it_waits_for_those_on_their_way_and_later_ones_wait_behind_it() -> None:
    rooms = Rooms()
    first, _ = rooms.want(15)
    second, waits = rooms.want(10)
    third, behind = rooms.want(5)  # there would be enough memory for the last one
    assert not waits.done()
    assert not behind.done()
    rooms.room.end(first)
    assert waits.done()
    assert behind.done()
    assert (second.num_bytes, third.num_bytes) == (10, 5)
    assert rooms.cache.num_reserved == 15


def test_what_those_before_it_have_taken_is_gone() -> None:
    rooms = Rooms()
    first, _ = rooms.want(15)
    _, waits = rooms.want(10)
    rooms.cache.add(b"first", 15, first.num_bytes)
    first.num_bytes = 0
    rooms.cache.acquire(b"first")
    rooms.room.end(first)
    with pytest.raises(ResourceExhausted):
        waits.result(0)


def test_one_that_has_ended_meanwhile_gets_none() -> None:
    rooms = Rooms()
    first, _ = rooms.want(15)
    second, waits = rooms.want(10)
    rooms.room.end(second)
    rooms.room.end(first)
    with pytest.raises(CancelledError):
        waits.result(0)
    assert rooms.cache.num_reserved == 0


def test_what_nobody_waits_for_takes_no_others_place() -> None:
    rooms = Rooms()
    rooms.cache.release(HELD)
    rooms.wanted = False
    _, made = rooms.want(25)
    with pytest.raises(NotWantedError):
        made.result(0)
    assert not rooms.gone
    _, made = rooms.want(20)
    assert made.result(0) is None
