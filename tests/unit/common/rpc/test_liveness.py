"""A service is alive while its event loop keeps its beat and its essential tasks run."""

import asyncio

import pytest

from penstock_common.rpc.liveness import INTERVAL, MAX_LATE, Liveness
from penstock_common.rpc.server import LIVENESS


class Loop:
    """A loop whose beats are as late as the test says: its clock, its sleep, and the health that it told."""

    def __init__(self, *late: float) -> None:
        self.now = 0.0
        self.told: list[bool] = []
        self._late = list(late)

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if not self._late:
            raise asyncio.CancelledError
        self.now += seconds + self._late.pop(0)

    async def set_serving(self, serving: bool, *names: str) -> None:
        assert names == (LIVENESS,)
        self.told.append(serving)


async def told(loop: Loop, *tasks: asyncio.Task[None]) -> list[bool]:
    liveness = Liveness(loop, lambda: tasks, clock=loop.clock, sleep=loop.sleep)
    with pytest.raises(asyncio.CancelledError):
        await liveness.run()
    return loop.told


async def test_a_loop_that_keeps_its_beat_is_alive() -> None:
    assert await told(Loop(0.0, INTERVAL, MAX_LATE)) == []


async def test_a_loop_that_is_behind_is_not_alive_until_it_has_caught_up() -> None:
    assert await told(Loop(0.0, MAX_LATE + 0.1, MAX_LATE + 9.0, 0.0, 0.0)) == [False, True]


async def test_a_service_whose_essential_task_has_ended_is_not_alive_any_more() -> None:
    async def ends() -> None:
        return

    task = asyncio.create_task(ends(), name="coordinator")
    await task
    assert await told(Loop(0.0, 0.0), task) == [False]


async def test_tasks_that_run_say_nothing() -> None:
    task = asyncio.create_task(asyncio.Event().wait())
    try:
        assert await told(Loop(0.0, 0.0), task) == []  # type: ignore[arg-type]
    finally:
        task.cancel()
