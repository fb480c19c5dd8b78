"""Room for adapters on their way: in order, once, and given back."""

from concurrent.futures import CancelledError, Future

import pytest

from penstock_common.errors import FailedPrecondition, ResourceExhausted
from penstock_enginecore.lora.core.cache import LoraCache, LoraRoom, NotWantedError, Reservation, Want

HELD = b"held"


class Rooms:
    """A cache for 30 bytes, of which an adapter that is in use has 10."""

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
    third, behind = rooms.want(5)  # there would be room for it
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
