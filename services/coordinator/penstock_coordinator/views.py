"""All views that frontends subscribe to."""

from collections.abc import Callable

from penstock_common.types.cluster import ClusterView
from penstock_coordinator.pace import Pace
from penstock_coordinator.view import ViewLimiter
from penstock_coordinator.view_channel import Encoder, Subscription, ViewChannel, ViewReader


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
