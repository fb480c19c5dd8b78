"""The newest of a series of values, for many readers of different speed."""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Broadcast(Generic[T]):
    """Readers get the newest value. A slow reader misses the values that were replaced before it asked again."""

    def __init__(self) -> None:
        self._version = 0
        self._value: T | None = None
        self._changed = asyncio.Event()

    @property
    def newest(self) -> T | None:
        """The newest value; None before the first."""
        return self._value

    def publish(self, value: T) -> None:
        """Replace the value and wake the readers."""
        self._value = value
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def newer_than(self, version: int) -> tuple[int, T]:
        """The newest version and its value, as soon as it is newer than ``version``. The first has version 1."""
        while self._value is None or self._version <= version:
            await self._changed.wait()
        return self._version, self._value
