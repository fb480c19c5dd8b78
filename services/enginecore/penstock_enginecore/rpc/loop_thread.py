"""An asyncio loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_ENDING = 2.0
"""Seconds that tasks have to end when their loop does."""


class LoopThread:
    """Methods may be called from any other thread. A daemon: what its loop still waits for does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)

    @property
    def running(self) -> bool:
        """Whether it was started, and has not been stopped."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Run the loop."""
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop run this, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        """End what still runs, the loop and the thread, which must be running: nothing that is collected later needs its loop."""
        self.run(_end_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_ENDING)
    await asyncio.get_running_loop().shutdown_asyncgens()
