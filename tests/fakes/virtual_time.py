"""Event loop with virtual time: the clock stops while work is ready, and jumps to the next timer when no work is ready."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop with virtual time, for code that uses timers and does no I/O."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_NeverWaits(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _NeverWaits(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen: no timer is set, and virtual time has no I/O")
        self._loop.jump(timeout)
        return super().select(0)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` in virtual time, in which waits take no real time. Return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
