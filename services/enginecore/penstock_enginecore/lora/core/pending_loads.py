"""Adapters on their way, and who waits for them."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from penstock_enginecore.core.executor import Executor
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.base import Clock
from penstock_enginecore.lora.core.cache import Reservation, Want
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest


class HeldLora(msgspec.Struct, frozen=True, kw_only=True):
    """What operators are told of an adapter that the engine holds. ``rank``: the largest of its layers'."""

    digest: bytes
    rank: int
    modules: tuple[str, ...]
    num_bytes: int
    pinned: bool


class Call(NamedTuple):
    """Somebody who has asked for an adapter, and waits for what it is."""

    answer: "Future[HeldLora]"
    pinned: bool


@dataclass(slots=True)
class Load:
    """An adapter on its way. ``number``: of what the workers were told; ``began``: seconds. ``requests``: those that wait for it
    and have not ended, by key.
    """

    lora: LoraRequest
    number: int
    began: float
    reservation: Reservation = field(default_factory=Reservation)
    requests: dict[str, Request] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for it."""
        return bool(self.requests or self.calls)


class Loads:
    """Those of an engine's ``executor``: one for each adapter, however many wait for it. ``tell`` is called on any thread with a
    load that needs room, and with one that is over and what came of it.
    """

    def __init__(
        self,
        executor: Executor,
        tell: "Callable[[Want | tuple[Load, Future[LoadedLora]]], None]",
        clock: Clock = time.monotonic,
    ) -> None:
        self._executor = executor
        self._tell = tell
        self._clock = clock
        self._loads: dict[LoraRequest, Load] = {}
        self._waiting: dict[str, Load] = {}
        """By key of the request that waits for it."""
        self._let_go: dict[bytes, int] = {}
        """What workers were told to let go of while loads were under way, with the number that that had."""
        self.number = 0
        """Of what the workers were told last."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a load. Any thread."""
        return len(self._waiting)

    def digests(self) -> Iterator[bytes]:
        """Those on their way, as far as they are known. Any thread."""
        return (lora.digest for lora in list(self._loads) if lora.digest)

    def of(self, lora: LoraRequest) -> Load:
        """The load that reads ``lora``: one that is under way, or a new one."""
        load = self._loads.get(_what(lora))
        if load is None:
            load = Load(lora, 0, self._clock())
            self._begin(load)
        return load

    def again(self, load: Load) -> None:
        """Have what was loaded loaded once more, for those who wait for it."""
        known = self._loads.get(_what(load.lora))
        if known is None:
            known = load
            self._begin(load)
        else:
            known.calls += load.calls
        for request in load.requests.values():
            self.wait(request, known)

    def wait(self, request: Request, load: Load) -> None:
        """``request`` waits for it from now on."""
        load.requests[request.key] = request
        self._waiting[request.key] = load

    def give_up(self, request: Request) -> None:
        """A request has ended before its adapter was there."""
        if (load := self._waiting.pop(request.key, None)) is not None:
            del load.requests[request.key]

    def end(self, load: Load) -> None:
        """It is over. Those who waited for it are its own yet."""
        self._loads.pop(_what(load.lora))
        for key in load.requests:
            del self._waiting[key]

    def settle(self) -> None:
        """All that was over is taken care of."""
        if not self._loads:
            self._let_go.clear()

    def unload(self, digest: bytes) -> None:
        """Have the workers let go of an adapter."""
        self.number += 1
        if self._loads:
            self._let_go[digest] = self.number
        self._executor.unload_lora(digest)

    def was_let_go(self, digest: bytes, since: int = 0) -> bool:
        """Whether workers were told to let go of it while loads were under way, behind what had the number ``since``."""
        return self._let_go.get(digest, 0) > since

    def _begin(self, load: Load) -> None:
        self.number += 1
        load.number, load.reservation = self.number, Reservation()
        future = self._executor.load_lora(load.lora, partial(self._want, load, load.reservation))
        self._loads[_what(load.lora)] = load
        future.add_done_callback(lambda done: self._tell((load, done)))

    def _want(self, load: Load, reservation: Reservation, num_bytes: int, made: "Future[None]") -> None:
        """Any thread."""
        self._tell(Want(reservation, num_bytes, made, lambda: load.is_wanted))


def _what(lora: LoraRequest) -> LoraRequest:
    """What a load reads: names are labels."""
    return LoraRequest("", lora.path, lora.digest)
