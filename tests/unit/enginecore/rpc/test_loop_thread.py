"""A loop in a thread of its own."""

import asyncio

from penstock_enginecore.rpc.loop_thread import LoopThread


def test_what_still_runs_ends_with_the_loop() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("task")

    async def begin() -> asyncio.Task[None]:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        return task

    thread = LoopThread("test")
    thread.start()
    task = thread.run(begin())
    thread.stop()
    assert ended == ["task"]
    assert task.cancelled()
    assert thread.loop.is_closed()
