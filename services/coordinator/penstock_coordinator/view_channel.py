"""One view for all frontends that want the same: encoded once per version, whatever their number."""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import msgspec

from penstock_common.types.cluster import ClusterView, EngineStatus
from penstock_common.types.view_delta import ViewDelta, difference
from penstock_coordinator.view import ViewLimiter

MAX_DELTAS = 16
"""Deltas that are kept for frontends that fall behind; who is further behind gets a whole view."""


class Subscription(msgspec.Struct, frozen=True):
    """Whose engines a view has."""

    model: str = ""
    """Empty: of every model."""
    pools: frozenset[str] = frozenset()
    """Empty: of every pool."""

    def wants(self, engine: EngineStatus) -> bool:
        """Whether the engine is in the view."""
        return self._has(engine.model, engine.pool)

    def of(self, view: ClusterView) -> ClusterView:
        """What the view has of a whole one."""
        engines = tuple(engine for engine in view.engines if self.wants(engine))
        groups = tuple(group for group in view.groups if self._has(group.model, group.pool))
        return msgspec.structs.replace(view, engines=engines, groups=groups)

    def _has(self, model: str, pool: str) -> bool:
        return self.model in ("", model) and (not self.pools or pool in self.pools)


class Encoder(Protocol):
    """Makes the bytes that go over the wire."""

    def whole(self, view: ClusterView, version: int) -> bytes:
        """A view with all its engines."""

    def delta(self, view: ClusterView, delta: ViewDelta, version: int) -> bytes:
        """A view whose engines are told by what has changed since the version before."""


class EncodedView(msgspec.Struct, frozen=True):
    """A view as it is sent."""

    version: int
    data: bytes
    whole: bool
    since: float
    """The time from which on it was due, in seconds of the coordinator's clock."""


class ViewChannel:
    """The versions of one view, from 1, and who reads them."""

    def __init__(self, subscription: Subscription, limiter: ViewLimiter, encoder: Encoder) -> None:
        self.subscription = subscription
        self.limiter = limiter
        self.readers: set[ViewReader] = set()
        self.version = 0
        self._encoder = encoder
        self._view = ClusterView()
        self._since = 0.0
        self._whole: EncodedView | None = None
        self._deltas: deque[EncodedView] = deque(maxlen=MAX_DELTAS)

    def offer(self, view: ClusterView, now: float) -> None:
        """Make a version of the view where one is due and anything has changed, and wake its readers."""
        if not self.limiter.due(now):
            return
        if self.subscription != Subscription():
            view = self.subscription.of(view)
        delta = difference(self._view.engines, view.engines)
        if self.version and not delta.of_members and _rest(view) == _rest(self._view):
            self.limiter.only_loads()
            if delta.empty or not self.limiter.due(now):
                return
        self._since = self.limiter.sent(now, len(view.engines))
        self.version += 1
        self._view, self._whole = view, None
        if self.version > 1 and any(reader.deltas for reader in self.readers):
            data = self._encoder.delta(view, delta, self.version)
            self._deltas.append(EncodedView(self.version, data, False, self._since))
        else:
            self._deltas.clear()
        for reader in self.readers:
            reader.wake()

    def newer_than(self, version: int, *, deltas: bool) -> list[EncodedView]:
        """What leads from this version to the newest: nothing, deltas, or a whole view."""
        if version == self.version:
            return []
        if deltas and version and self._deltas and self._deltas[0].version <= version + 1:
            return [delta for delta in self._deltas if delta.version > version]
        if self._whole is None:
            data = self._encoder.whole(self._view, self.version)
            self._whole = EncodedView(self.version, data, True, self._since)
        return [self._whole]


class ViewReader:
    """A frontend's stream, as the channel knows it."""

    def __init__(self, channel: ViewChannel, *, deltas: bool) -> None:
        """``deltas``: whether it understands them."""
        self.channel = channel
        self.deltas = deltas
        self._version = 0
        self._woken = asyncio.Event()
        channel.readers.add(self)

    def wake(self) -> None:
        """There may be something to send, or another reason to look."""
        self._woken.set()

    async def woken(self) -> None:
        """Wait for ``wake``."""
        await self._woken.wait()
        self._woken.clear()

    def take(self) -> Iterator[EncodedView]:
        """What is to be sent now. What becomes due meanwhile is for the next time."""
        for view in self.channel.newer_than(self._version, deltas=self.deltas):
            self._version = view.version
            yield view


def _rest(view: ClusterView) -> ClusterView:
    return msgspec.structs.replace(view, engines=())
