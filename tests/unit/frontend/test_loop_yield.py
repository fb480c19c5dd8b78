"""Work that is spread over turns of the event loop."""

import asyncio
from collections import Counter

from penstock_frontend.loop_yield import Pace
from tests.fakes.patience import PATIENCE


class Turns:
    """Counts the turns of the running event loop until the test ends."""

    def __init__(self) -> None:
        self.count = 0
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self.count += 1
        asyncio.get_running_loop().call_soon(self._next)


async def test_what_is_beyond_a_turns_room_waits_in_its_order() -> None:
    turns, pace = Turns(), Pace(4)
    done: list[tuple[int, int]] = []

    async def work(index: int) -> None:
        await pace.take()
        done.append((index, turns.count))

    await asyncio.gather(*(work(index) for index in range(50)))
    assert [index for index, _ in done] == list(range(50))
    assert max(Counter(turn for _, turn in done).values()) <= 2 * 4


async def test_a_piece_larger_than_a_turns_room_has_a_turn_of_its_own() -> None:
    turns, pace = Turns(), Pace(4)
    done: list[int] = []

    async def work() -> None:
        await pace.take(100)
        done.append(turns.count)

    await asyncio.gather(*(work() for _ in range(10)))
    assert max(Counter(done).values()) <= 2


async def test_a_little_work_waits_for_nothing() -> None:
    turns, pace = Turns(), Pace(4)
    for _ in range(4):
        await pace.take()
    assert turns.count == 0


async def test_cancelled_tasks_take_no_room() -> None:
    pace = Pace(1)
    _, gone, waiting = (asyncio.create_task(pace.take()) for _ in range(3))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait_for(waiting, PATIENCE)
    assert gone.cancelled()
