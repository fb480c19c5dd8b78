"""Limits for the head of a request, and for the framing of its body."""

import asyncio

import pytest

from penstock_frontend.api.http.request_parsing import (
    BYTES_PER_TURN,
    EVENTS_PER_TURN,
    SLICE,
    DiscardingTurns,
    ParsingTurns,
    RequestLimits,
    RequestSize,
)
from penstock_frontend.api.openai.errors import HttpError

LIMITS = RequestLimits(max_header_bytes=1000, max_headers=3)


@pytest.fixture
def size() -> RequestSize:
    return RequestSize(LIMITS)


def test_a_head_may_have_its_limit(size: RequestSize) -> None:
    size.add(1000)
    with pytest.raises(HttpError, match=r"the headers have more than 1000 bytes; http\.max_header_bytes") as caught:
        size.add(1)
    assert (caught.value.status, caught.value.code) == (431, "headers_too_large")


def test_headers_are_counted_with_trailers(size: RequestSize) -> None:
    for _ in range(2):
        size.add_header()
    size.complete_head()
    size.add_header()
    with pytest.raises(HttpError, match=r"more than 3 headers; http\.max_headers is 3") as caught:
        size.add_header()
    assert caught.value.status == 431


def test_a_body_in_large_chunks_may_have_any_length(size: RequestSize) -> None:
    size.add(900)
    size.complete_head()
    for _ in range(1000):
        size.body += 10
        size.add(18)


def test_a_body_in_chunks_of_one_byte_is_refused(size: RequestSize) -> None:
    size.add(100)
    size.complete_head()
    for _ in range(225):  # 900 bytes of room, of which a chunk takes five and brings one
        size.body += 1
        size.add(6)
    with pytest.raises(
        HttpError, match="1225 bytes in addition to its body of 225|in addition to its body of 226 bytes"
    ) as caught:
        size.body += 1
        size.add(6)
    assert (caught.value.status, caught.value.code) == (400, "chunks_too_small")


def test_bytes_that_are_no_body_are_refused_wherever_they_are(size: RequestSize) -> None:
    size.complete_head()
    with pytest.raises(HttpError, match="chunk extensions"):
        size.add(1001)  # of an extension, or a trailer, that does not end


def test_each_request_is_counted_anew(size: RequestSize) -> None:
    for _ in range(3):
        size.begin()
        size.add(1000)
        for _ in range(3):
            size.add_header()


# How much connections parse, and how often they discard, in one turn of the event loop.


class Sender:
    """A connection that has a number of slices to parse."""

    def __init__(self, name: str, turns: ParsingTurns, slices: int, parsed: list[str], *, events: int = 1) -> None:
        self._name, self._turns, self._slices, self._parsed, self._events = name, turns, slices, parsed, events

    def parse_slice(self) -> bool:
        self._slices -= 1
        self._parsed.append(self._name)
        self._turns.spend(SLICE, self._events)
        return self._slices > 0


async def parsed_per_turn(turns: ParsingTurns, parsed: list[str]) -> list[int]:
    """Return the number of slices parsed in each turn of the event loop, until a turn parses none."""
    counts: list[int] = []
    while not counts or counts[-1]:
        before = len(parsed)
        await asyncio.sleep(0)
        counts.append(len(parsed) - before)
    return counts[:-1]


async def test_a_turn_parses_a_limited_number_of_bytes() -> None:
    turns = ParsingTurns()
    parsed: list[str] = []
    per_turn = BYTES_PER_TURN // SLICE
    turns.wait(Sender("a", turns, 2 * per_turn + 1, parsed))
    assert await parsed_per_turn(turns, parsed) == [per_turn, per_turn, 1]


async def test_a_turn_parses_a_limited_number_of_events_however_many_connections_there_are() -> None:
    turns = ParsingTurns()
    parsed: list[str] = []
    for name in "abcd":
        turns.wait(Sender(name, turns, 2, parsed, events=EVENTS_PER_TURN // 2))
    assert await parsed_per_turn(turns, parsed) == [2, 2, 2, 2]


async def test_connections_take_turns() -> None:
    turns = ParsingTurns()
    parsed: list[str] = []
    for name in "abc":
        turns.wait(Sender(name, turns, 2, parsed))
    await parsed_per_turn(turns, parsed)
    assert parsed == list("abcabc")


async def test_a_connection_may_parse_at_once_while_there_is_room() -> None:
    turns = ParsingTurns()
    room = [turns.has_room]
    turns.spend(SLICE, EVENTS_PER_TURN)
    room.append(turns.has_room)
    await asyncio.sleep(0)
    assert [*room, turns.has_room] == [True, False, True]


async def test_a_connection_that_comes_later_does_not_overtake_those_that_wait() -> None:
    turns = ParsingTurns()
    turns.wait(Sender("a", turns, 1, []))
    assert not turns.has_room


async def test_connections_that_discard_read_one_after_the_other() -> None:
    turns, read = DiscardingTurns(), asyncio.Queue[str]()

    class Refused:
        def __init__(self, name: str) -> None:
            self._name = name

        def discard_more(self) -> None:
            read.put_nowait(self._name)
            if self._name == "a":
                turns.wait(self)

    for name in "ab":
        turns.wait(Refused(name))
    assert [await read.get() for _ in range(4)] == ["a", "b", "a", "a"]
