"""Views of the cluster for frontends: how often they are sent, and one channel for frontends that want the same view."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import msgspec

from penstock_common.types.cluster import ClusterView, EngineStatus, ViewDelta, difference

# How often engines report and frontends are sent views.

_STEP = 1.25
"""Between two intervals of reports that engines are told: a pool that grows by one engine tells nobody anything new."""
_CHANGES_PER_VIEW = 10
_SHORTEST = 0.01
"""Seconds; no engine reports more often."""
_MOST_BETWEEN_CHANGES = 0.1


class Pace(msgspec.Struct, frozen=True):
    """Intervals in seconds, which grow with the number of engines: so many reports a second are taken, and no view is sent more
    often than the engines in it report.
    """

    view_interval: float
    """Between two views in which nothing but loads has changed, of few engines."""
    max_reports_per_second: float
    """Of all engines of a pool."""

    def of_reports(self, num_engines: int) -> float:
        """Between two reports of an engine of a pool of so many; 0: as the engine likes."""
        interval = num_engines / self.max_reports_per_second
        if interval < _SHORTEST:
            return 0.0
        steps = math.ceil(round(math.log(interval / _SHORTEST, _STEP), 6))
        return _SHORTEST * _STEP**steps

    def of_views(self, num_engines: int) -> float:
        """Between two views of so many engines in which nothing but loads has changed."""
        return max(self.view_interval, num_engines / self.max_reports_per_second)

    def of_changes(self, num_engines: int) -> float:
        """Between two views of so many engines whose members change: many that join at once are told of together."""
        return min(num_engines / self.max_reports_per_second / _CHANGES_PER_VIEW, _MOST_BETWEEN_CHANGES)


# When the frontends are sent a view.

_NEARLY = 0.9
"""Part of an interval that counts as all of it, for who looks once per interval and is early by a hair."""


class ViewLimiter:
    """Decides when a view is due: soon when members or their states have changed, after the interval of views when only loads
    can have changed, and never before ``first_at``.

    The last rule makes a restart of the coordinator safe. The coordinator keeps nothing on disk and learns of the engines as they
    register again; a view with half of them would tell the frontends that the others are gone. Until then the frontends keep
    the view they have.
    """

    def __init__(self, pace: Pace, *, first_at: float) -> None:
        """``first_at``: a time of the clock whose ``now`` is passed in, in seconds."""
        self._pace = pace
        self._first_at = first_at
        self._sent_at: float | None = None
        self._changed_at: float | None = None
        self._num_engines = 0

    @property
    def interval(self) -> float:
        """Seconds after which to look again."""
        return self._pace.of_views(self._num_engines)

    def members_changed(self, now: float) -> None:
        """What is not in the last view is more than loads."""
        if self._changed_at is None:
            self._changed_at = now

    def due(self, now: float) -> bool:
        """Whether to send what has changed."""
        if now < self._first_at:
            return False
        if self._sent_at is None:
            return True
        passed = now - self._sent_at
        if self._changed_at is not None and passed >= self._pace.of_changes(self._num_engines):
            return True
        return passed >= self.interval * _NEARLY

    def waits(self, now: float) -> float | None:
        """Seconds until a change of the members is due that is not yet; None: there is none."""
        if self._changed_at is None or now < self._first_at or self._sent_at is None:
            return None
        return max(self._sent_at + self._pace.of_changes(self._num_engines) - now, 0.0)

    def sent(self, now: float, num_engines: int) -> float:
        """A view of so many engines was sent. Returns the time since which it was due."""
        since = now if self._changed_at is None else max(self._changed_at, self._first_at)
        self._sent_at, self._changed_at, self._num_engines = now, None, num_engines
        return since

    def only_loads(self) -> None:
        """What changed turned out to be in another view: nothing in this one has changed but loads."""
        self._changed_at = None


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


# All views that frontends subscribe to.


class Views:
    """A channel per subscription, for as long as somebody reads it."""

    def __init__(self, pace: Pace, encoder: Encoder, *, first_at: float) -> None:
        self._pace = pace
        self._encoder = encoder
        self._first_at = first_at
        self._channels: dict[Subscription, ViewChannel] = {}

    @property
    def interval(self) -> float:
        """Seconds after which loads are looked at again."""
        return min((channel.limiter.interval for channel in self._channels.values()), default=self._pace.view_interval)

    def subscribe(self, subscription: Subscription, view: ClusterView, now: float, *, deltas: bool) -> ViewReader:
        """A new reader; ``view``: the whole cluster. To be ended with ``unsubscribe``."""
        channel = self._channels.get(subscription)
        if channel is None:
            limiter = ViewLimiter(self._pace, first_at=self._first_at)
            channel = self._channels[subscription] = ViewChannel(subscription, limiter, self._encoder)
            channel.offer(view, now)
        reader = ViewReader(channel, deltas=deltas)
        reader.wake()
        return reader

    def unsubscribe(self, reader: ViewReader) -> None:
        """The reader's stream is over."""
        channel = reader.channel
        channel.readers.discard(reader)
        if not channel.readers and self._channels.get(channel.subscription) is channel:
            del self._channels[channel.subscription]

    def members_changed(self, now: float) -> None:
        """More than loads has changed."""
        for channel in self._channels.values():
            channel.limiter.members_changed(now)

    def offer(self, view: Callable[[], ClusterView], now: float) -> None:
        """Let the channels take what is due; ``view``: the whole cluster."""
        due = [channel for channel in self._channels.values() if channel.limiter.due(now)]
        if due:
            whole = view()
            for channel in due:
                channel.offer(whole, now)

    def waits(self, now: float) -> float | None:
        """Seconds until a change of the members is due that is not yet; None: there is none."""
        waiting = [
            seconds for channel in self._channels.values() if (seconds := channel.limiter.waits(now)) is not None
        ]
        return min(waiting, default=None)


# The newest of a series of values, for many readers of different speed.

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
