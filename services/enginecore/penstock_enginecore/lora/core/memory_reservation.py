"""Room for adapters that are on their way."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from penstock_common.errors import RequestFailed
from penstock_enginecore.lora.core.cache import LoraCache


@dataclass(slots=True)
class Reservation:
    """What a load has in the cache. ``number``: of what workers were told last before they take it. ``ended``: it needs nothing
    any more.
    """

    num_bytes: int = 0
    number: int = 0
    ended: bool = False


class NotWantedError(Exception):
    """Nobody waits any more for an adapter, whose place would be that of another."""


class Want(NamedTuple):
    """A load that needs so many bytes. ``made``: ends when it has them, or cannot have them. ``is_wanted``: whether anybody waits
    for it.
    """

    reservation: Reservation
    num_bytes: int
    made: "Future[None]"
    is_wanted: Callable[[], bool]


class LoraRoom:
    """Makes room for those that want it, in their order: one that finds none waits for those on their way before it, of which
    some may fail. ``unload``: has workers let go of adapters, and gives the number of what they were told last.
    """

    def __init__(self, cache: LoraCache, unload: Callable[[list[bytes]], int]) -> None:
        self._cache = cache
        self._unload = unload
        self._wants: deque[Want] = deque()

    def want(self, want: Want) -> None:
        """Ask for room."""
        self._wants.append(want)
        self._serve()

    def end(self, reservation: Reservation) -> None:
        """A load has ended, however it did."""
        reservation.ended = True
        self._cache.cancel(reservation.num_bytes)
        reservation.num_bytes = 0
        self._serve()

    def _serve(self) -> None:
        while self._wants:
            reservation, num_bytes, made, is_wanted = self._wants[0]
            if reservation.ended:
                made.cancel()  # its workers have gone meanwhile
            elif not is_wanted() and not self._cache.has_room_for(num_bytes):
                made.set_exception(NotWantedError("nobody waits for the adapter any more"))
            elif self._cache.num_reserved and self._cache.is_full_for(num_bytes):
                return
            else:
                try:
                    reservation.number = self._unload(self._cache.reserve(num_bytes))
                except RequestFailed as e:
                    made.set_exception(e)
                else:
                    reservation.num_bytes += num_bytes
                    made.set_result(None)
            self._wants.popleft()
