"""Views of the cluster for frontends, with one channel for all frontends with the same subscription.

The module also decides when views are sent.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Generic, Protocol, TypeVar

import msgspec

from penstock_common.types.cluster import ClusterView, EngineStatus, ViewDelta, difference

# The class below computes the report interval of engines, and the interval between two views.

_STEP = 1.25
"""Ratio between two consecutive possible values of the report interval. The interval has only these values, so most
changes of a pool's size do not change the interval.
"""
_CHANGES_PER_VIEW = 10
_SHORTEST = 0.01
"""Minimum report interval in seconds."""
_MOST_BETWEEN_CHANGES = 0.1


class Pace(msgspec.Struct, frozen=True):
    """Report intervals and view intervals in seconds. Both intervals grow with the number of engines.

    Longer report intervals limit the number of reports per second. The coordinator sends views at most as often as the
    engines report.
    """

    view_interval: float
    """Seconds between two views in which only loads have changed, if there are few engines."""
    max_reports_per_second: float
    """Maximum number of reports per second from all engines of a pool."""

    def of_reports(self, num_engines: int) -> float:
        """Return the report interval of an engine in a pool of this size. 0 means that the engine chooses the interval."""
        interval = num_engines / self.max_reports_per_second
        if interval < _SHORTEST:
            return 0.0
        steps = math.ceil(round(math.log(interval / _SHORTEST, _STEP), 6))
        return _SHORTEST * _STEP**steps

    def of_views(self, num_engines: int) -> float:
        """Return the interval between two views with ``num_engines`` engines if only loads have changed."""
        return max(self.view_interval, num_engines / self.max_reports_per_second)

    def of_changes(self, num_engines: int) -> float:
        """Return the interval between two views with ``num_engines`` engines if members have changed.

        Because of this interval, engines that join shortly after each other are in the same view.
        """
        return min(num_engines / self.max_reports_per_second / _CHANGES_PER_VIEW, _MOST_BETWEEN_CHANGES)


# The class below decides when a view is sent.

_NEARLY = 0.9
"""Fraction of an interval that counts as the complete interval, because a check may run slightly too early."""


class ViewLimiter:
    """Decides when a view is due.

    If members or their states have changed, a view is due soon. If only loads may have changed, a view is due after the
    view interval. A view is never due before ``first_at``.

    The rule about ``first_at`` makes a restart of the coordinator safe. The coordinator stores nothing on disk, so
    engines must register again after a restart. If a view had only half of the engines, frontends would treat the other
    engines as lost. Before ``first_at``, frontends keep the view that they have.
    """

    def __init__(self, pace: Pace, *, first_at: float) -> None:
        """Create the limiter.

        ``first_at`` is the earliest time of the first view, on the same clock as the argument ``now`` of the methods.
        """
        self._pace = pace
        self._first_at = first_at
        self._sent_at: float | None = None
        self._changed_at: float | None = None
        self._num_engines = 0

    @property
    def interval(self) -> float:
        """Seconds until the next check whether a view is due."""
        return self._pace.of_views(self._num_engines)

    def members_changed(self, now: float) -> None:
        """Record that members or their states have changed since the last view."""
        if self._changed_at is None:
            self._changed_at = now

    def due(self, now: float) -> bool:
        """Return whether a view with the recorded changes is due."""
        if now < self._first_at:
            return False
        if self._sent_at is None:
            return True
        passed = now - self._sent_at
        if self._changed_at is not None and passed >= self._pace.of_changes(self._num_engines):
            return True
        return passed >= self.interval * _NEARLY

    def waits(self, now: float) -> float | None:
        """Return the seconds until a view with a pending change of members is due.

        Return None without a pending change.
        """
        if self._changed_at is None or now < self._first_at or self._sent_at is None:
            return None
        return max(self._sent_at + self._pace.of_changes(self._num_engines) - now, 0.0)

    def sent(self, now: float, num_engines: int) -> float:
        """Record that a view with ``num_engines`` engines was sent. Return the time at which the view became due."""
        since = now if self._changed_at is None else max(self._changed_at, self._first_at)
        self._sent_at, self._changed_at, self._num_engines = now, None, num_engines
        return since

    def only_loads(self) -> None:
        """Record that only loads have changed in this view, because the change of members is in another view."""
        self._changed_at = None


MAX_DELTAS = 16
"""Number of recent deltas that are stored for slow frontends. A frontend that needs older deltas gets a full view."""


class Subscription(msgspec.Struct, frozen=True):
    """Selection of the engines that a view contains."""

    model: str = ""
    """Model of the selected engines. Empty means all models."""
    pools: frozenset[str] = frozenset()
    """Pools of the selected engines. Empty means all pools."""

    def wants(self, engine: EngineStatus) -> bool:
        """Return whether the selection includes an engine."""
        return self._has(engine.model, engine.pool)

    def of(self, view: ClusterView) -> ClusterView:
        """Return a view with only the selected engines of a full view."""
        engines = tuple(engine for engine in view.engines if self.wants(engine))
        groups = tuple(group for group in view.groups if self._has(group.model, group.pool))
        return msgspec.structs.replace(view, engines=engines, groups=groups)

    def may_use(self, pool: str, models: Collection[str]) -> bool:
        """Return whether the selection may include engines of a pool. ``models`` are the models of the pool's engines,
        or empty if they are not known.
        """
        return (not self.pools or pool in self.pools) and (not self.model or not models or self.model in models)

    def _has(self, model: str, pool: str) -> bool:
        return self.model in ("", model) and (not self.pools or pool in self.pools)


class Encoder(Protocol):
    """Encodes views as bytes."""

    def whole(self, view: ClusterView, version: int) -> bytes:
        """Encode a view including all its engines."""

    def delta(self, view: ClusterView, delta: ViewDelta, version: int) -> bytes:
        """Encode the changes of a view since the previous version."""


class EncodedView(msgspec.Struct, frozen=True):
    """A view or a delta in encoded form."""

    version: int
    data: bytes
    whole: bool
    since: float
    """Time at which the view became due, in seconds of the coordinator's clock."""


class ViewChannel:
    """Versions of the view for one subscription, and the readers of the view. Versions are numbered from 1."""

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
        """If a view is due and its content has changed, create a new version, and wake the readers."""
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
        """Return the views that bring a reader from ``version`` to the newest version.

        The views are deltas, or one full view. The list is empty if the reader has the newest version.
        """
        if version == self.version:
            return []
        if deltas and version and self._deltas and self._deltas[0].version <= version + 1:
            return [delta for delta in self._deltas if delta.version > version]
        if self._whole is None:
            data = self._encoder.whole(self._view, self.version)
            self._whole = EncodedView(self.version, data, True, self._since)
        return [self._whole]


class ViewReader:
    """State of a frontend's stream in its channel."""

    def __init__(self, channel: ViewChannel, *, deltas: bool) -> None:
        """Create the reader. ``deltas`` is True if the frontend supports deltas."""
        self.channel = channel
        self.deltas = deltas
        self._version = 0
        self._woken = asyncio.Event()
        channel.readers.add(self)

    def wake(self) -> None:
        """Wake the reader, because there may be a view to send, or another reason to check the stream."""
        self._woken.set()

    async def woken(self) -> None:
        """Wait until ``wake`` is called."""
        await self._woken.wait()
        self._woken.clear()

    def take(self) -> Iterator[EncodedView]:
        """Yield the views to send now. Views that become due during this call are returned by the next call."""
        for view in self.channel.newer_than(self._version, deltas=self.deltas):
            self._version = view.version
            yield view


def _rest(view: ClusterView) -> ClusterView:
    return msgspec.structs.replace(view, engines=())


# The class below has the views of all subscriptions.


class Views:
    """View channels of all frontends, by subscription. A channel exists as long as the channel has readers."""

    def __init__(self, pace: Pace, encoder: Encoder, *, first_at: float) -> None:
        self._pace = pace
        self._encoder = encoder
        self._first_at = first_at
        self._channels: dict[Subscription, ViewChannel] = {}

    @property
    def interval(self) -> float:
        """Seconds until the next check whether loads have changed."""
        return min((channel.limiter.interval for channel in self._channels.values()), default=self._pace.view_interval)

    def subscribe(self, subscription: Subscription, view: ClusterView, now: float, *, deltas: bool) -> ViewReader:
        """Create and return a reader. ``view`` is the view of all engines. Remove the reader with ``unsubscribe``."""
        channel = self._channels.get(subscription)
        if channel is None:
            limiter = ViewLimiter(self._pace, first_at=self._first_at)
            channel = self._channels[subscription] = ViewChannel(subscription, limiter, self._encoder)
            channel.offer(view, now)
        reader = ViewReader(channel, deltas=deltas)
        reader.wake()
        return reader

    def unsubscribe(self, reader: ViewReader) -> None:
        """Remove a reader whose stream has ended."""
        channel = reader.channel
        channel.readers.discard(reader)
        if not channel.readers and self._channels.get(channel.subscription) is channel:
            del self._channels[channel.subscription]

    def members_changed(self, now: float) -> None:
        """Record that members or their states have changed."""
        for channel in self._channels.values():
            channel.limiter.members_changed(now)

    def offer(self, view: Callable[[], ClusterView], now: float) -> None:
        """Let each channel create a new version if a view is due. ``view`` returns the view of all engines."""
        due = [channel for channel in self._channels.values() if channel.limiter.due(now)]
        if due:
            whole = view()
            for channel in due:
                channel.offer(whole, now)

    def waits(self, now: float) -> float | None:
        """Return the seconds until a view with a pending change of members is due. Return None if no change of members
        is pending.
        """
        waiting = [
            seconds for channel in self._channels.values() if (seconds := channel.limiter.waits(now)) is not None
        ]
        return min(waiting, default=None)


# The class below passes the newest value of a series to several readers, which may be slow.

T = TypeVar("T")


class Broadcast(Generic[T]):
    """Passes the newest value to readers. A slow reader does not get values that were replaced before its next call."""

    def __init__(self) -> None:
        self._version = 0
        self._value: T | None = None
        self._changed = asyncio.Event()

    @property
    def newest(self) -> T | None:
        """Newest value, or None before the first value."""
        return self._value

    def publish(self, value: T) -> None:
        """Replace the value, and wake the readers."""
        self._value = value
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def newer_than(self, version: int) -> tuple[int, T]:
        """Wait for a version newer than ``version``.

        Return the newest version and its value. The first version is 1.
        """
        while self._value is None or self._version <= version:
            await self._changed.wait()
        return self._version, self._value
