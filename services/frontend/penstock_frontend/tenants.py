"""Which tenants have series of their own in metrics, and which are refused, for the log and for ``penstock status``."""

import asyncio
import contextvars
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as Metric

from penstock_common.errors import RequestFailed
from penstock_common.observability.logging import get_logger

MAX_LABELS = 20
"""Tenants with a series of their own."""
OTHER = "other"
"""The label of all other tenants. No tenant has it: see ``own_label``."""
_PREFIX = "tenant:"
_MAX_KNOWN = 1000
"""Tenants whose traffic is followed at once."""
_HALF_LIFE = 60.0
"""Seconds after which traffic counts half."""


def own_label(tenant: str) -> str:
    """Return the label that stands for one tenant alone: its name, behind ``tenant:`` where it could be mistaken.

    Names are the clients' to choose, ``other`` too. A name that begins with ``tenant:`` gets a further one.
    """
    return f"{_PREFIX}{tenant}" if tenant == OTHER or tenant.startswith(_PREFIX) else tenant


class TenantLabels:
    """Gives the tenants with the most traffic a label of their own, so that the number of series is bounded.

    A tenant takes the place of a labelled one only once it has more than twice its traffic, so that tenants of like traffic
    do not alternate. From then on its requests count under its name; those before stay under ``OTHER``. The series of the
    tenant that lost its place ends. So a label stands for one tenant at all times, and every request counts once.
    """

    def __init__(self, on_ended: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """``on_ended``: called with each label whose series has to end. ``clock``: seconds."""
        self._on_ended = on_ended
        self._clock = clock
        self._halved_at = clock()
        self._traffic: dict[str, float] = {}
        self._labelled: set[str] = set()

    def seen(self, tenant: str) -> None:
        """Count one request of a tenant. ``tenant``: as ``own_label`` returns it."""
        if (now := self._clock()) - self._halved_at >= _HALF_LIFE:
            self._halve(now)
        if tenant not in self._traffic and len(self._traffic) >= _MAX_KNOWN:
            return  # until those with a single request have been forgotten
        self._traffic[tenant] = traffic = self._traffic.get(tenant, 0.0) + 1.0
        if tenant in self._labelled:
            return
        if len(self._labelled) < MAX_LABELS:
            self._labelled.add(tenant)
            return
        least = min(self._labelled, key=lambda name: self._traffic.get(name, 0.0))
        if traffic > 2.0 * self._traffic.get(least, 0.0) + 1.0:
            self._labelled.remove(least)
            self._labelled.add(tenant)
            self._on_ended(least)

    def label_of(self, tenant: str) -> str:
        """The label that a tenant has now."""
        return tenant if tenant in self._labelled else OTHER

    def _halve(self, now: float) -> None:
        halvings = int((now - self._halved_at) / _HALF_LIFE)
        self._halved_at += halvings * _HALF_LIFE
        factor = 0.5**halvings
        # A labelled tenant keeps its label while nobody else needs it, also without traffic.
        self._traffic = {name: count * factor for name, count in self._traffic.items() if count * factor >= 1.0}


LOG_INTERVAL = 10.0
"""Seconds that one line of the log covers."""
_WINDOW = 60.0
"""Seconds that ``recent`` covers."""
_MAX_TENANTS = 1000
"""Tenants and reasons counted apart in one interval; those beyond count as OTHER."""
_MAX_NAME = 256
"""Characters of a tenant's name."""
_SHOWN = 20
"""Tenants in ``recent``, and in the log for one interval."""


class Refused(msgspec.Struct, frozen=True):
    """How many requests of a tenant were refused for a reason.

    ``tenant``: its ``own_label``; empty for requests that name none, OTHER for all tenants that are not shown apart.
    """

    tenant: str
    reason: str
    num_refused: int


class TenantRefusals:
    """Counts, by tenant, the requests that were refused because a limit was reached (RESOURCE_EXHAUSTED).

    Each tenant is logged once per interval, however often it was refused. Belongs to the event loop.
    """

    def __init__(self, model: str, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._metric = Metric(
            "penstock:tenant_requests_refused",
            "Requests refused because a limit was reached",
            ["model_name", "tenant", "reason"],
            registry=registry,
        )
        self._reasons: dict[str, set[str]] = {}
        self._labels = TenantLabels(self._end_series, clock)
        self._since = 0.0
        self._now: Counter[tuple[str, str]] = Counter()
        """Of the interval that is not logged yet."""
        self._past: deque[tuple[float, Counter[tuple[str, str]]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def accepted(self, tenant: str) -> None:
        """A request of a tenant was accepted."""
        self._labels.seen(own_label(tenant[:_MAX_NAME]))

    def refused(self, tenant: str, error: RequestFailed) -> None:
        """A request of a tenant ends with an error before it has begun. Only those at a limit count."""
        if error.code != "RESOURCE_EXHAUSTED":
            return
        tenant = own_label(tenant[:_MAX_NAME])  # it may not have been checked yet
        self._labels.seen(tenant)
        label = self._labels.label_of(tenant)
        self._reasons.setdefault(label, set()).add(error.reason)
        self._metric.labels(self._model, label, error.reason).inc()
        if not self._now:
            self._since = self._clock()
        _count(self._now, (tenant, error.reason), 1)
        if self._timer is None:
            # In a context of its own: the lines are of no one request.
            self._timer = asyncio.get_running_loop().call_later(LOG_INTERVAL, self.flush, context=contextvars.Context())

    def flush(self) -> None:
        """Write the lines of the interval that has passed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._now:
            return
        now, counts, self._now = self._clock(), self._now, Counter()
        self._past.append((now, counts))
        self._forget(now)
        seconds = round(now - self._since, 1)
        for each in _largest(counts):
            get_logger().warning(
                "tenant was refused requests",
                tenant=each.tenant,
                count=each.num_refused,
                seconds=seconds,
                reason=each.reason,
            )

    def recent(self) -> list[Refused]:
        """Refusals of the last minute, the most first; tenants beyond the first ones are summed as OTHER."""
        self._forget(self._clock())
        total: Counter[tuple[str, str]] = Counter(self._now)
        for _, counts in self._past:
            total.update(counts)
        return _largest(total)

    def _forget(self, now: float) -> None:
        while self._past and self._past[0][0] <= now - _WINDOW:
            self._past.popleft()

    def _end_series(self, label: str) -> None:
        for reason in self._reasons.pop(label, ()):
            self._metric.remove(self._model, label, reason)


def _largest(counts: Counter[tuple[str, str]]) -> list[Refused]:
    ordered = [Refused(tenant, reason, count) for (tenant, reason), count in counts.most_common()]
    rest: Counter[str] = Counter()
    for each in ordered[_SHOWN:]:
        rest[each.reason] += each.num_refused
    return ordered[:_SHOWN] + [Refused(OTHER, reason, count) for reason, count in rest.items()]


def _count(counts: Counter[tuple[str, str]], key: tuple[str, str], number: int) -> None:
    counts[key if key in counts or len(counts) < _MAX_TENANTS else (OTHER, key[1])] += number
