"""How much connections parse, and how often they discard, in one turn of the event loop."""

import asyncio

from penstock_frontend.api.http.request_parsing import (
    BYTES_PER_TURN,
    EVENTS_PER_TURN,
    SLICE,
    DiscardingTurns,
    ParsingTurns,
)


class Sender:
    """A connection with so many slices to parse."""

    def __init__(self, name: str, turns: ParsingTurns, slices: int, parsed: list[str], *, events: int = 1) -> None:
        self._name, self._turns, self._slices, self._parsed, self._events = name, turns, slices, parsed, events

    def parse_slice(self) -> bool:
        self._slices -= 1
        self._parsed.append(self._name)
        self._turns.spend(SLICE, self._events)
        return self._slices > 0


async def parsed_per_turn(turns: ParsingTurns, parsed: list[str]) -> list[int]:
    """How many slices each turn of the event loop has parsed, until one parses none."""
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
