"""When the frontends are sent a view."""

import msgspec

from penstock_common.types.cluster import ClusterView


class ViewLimiter:
    """Decides which views are sent: one at once when members or their states change, one every ``interval`` seconds at most
    when only counts change, and none before ``first_at``.

    The last rule makes a restart of the coordinator safe. The coordinator keeps nothing on disk and learns of the engines as they
    register again; a view with half of them would tell the frontends that the others are gone. Until then the frontends keep
    the view they have.
    """

    def __init__(self, *, interval: float, first_at: float) -> None:
        """``interval`` in seconds; ``first_at``: a time of the clock whose ``now`` is passed to ``offer``, in seconds."""
        self._interval = interval
        self._first_at = first_at
        self._sent: ClusterView | None = None
        self._sent_at = first_at

    def offer(self, view: ClusterView, now: float) -> bool:
        """Whether ``view`` has to be sent now, in which case it counts as sent. A view that is not sent may be offered again."""
        if now < self._first_at or view == self._sent:
            return False
        due = now - self._sent_at >= self._interval
        if self._sent is not None and not due and _without_counts(view) == _without_counts(self._sent):
            return False
        self._sent, self._sent_at = view, now
        return True


def _without_counts(view: ClusterView) -> ClusterView:
    engines = tuple(
        msgspec.structs.replace(
            engine, num_waiting_reqs=0, num_running_reqs=0, kv_cache_usage=0.0, seconds_since_last_step=0.0
        )
        for engine in view.engines
    )
    return msgspec.structs.replace(view, engines=engines)
