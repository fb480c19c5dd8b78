"""Tenant labels for metrics, and numbers of refused requests by tenant for the log and ``penstock status``."""

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
"""Maximum number of tenants that have their own time series in metrics."""
OTHER = "other"
"""Label that stands for all tenants without their own label. ``own_label`` never returns this label for a tenant."""
_PREFIX = "tenant:"
_MAX_KNOWN = 1000
"""Maximum number of tenants whose traffic is tracked."""
_HALF_LIFE = 60.0
"""Number of seconds after which a counted request has half its weight in a tenant's traffic."""


def own_label(tenant: str) -> str:
    """Return a label that stands for one tenant only.

    The label is the tenant's name, with the prefix ``tenant:`` if the name is ambiguous.

    Clients choose tenant names, so a tenant may have the name ``other``, which gets the prefix. A name that already
    begins with ``tenant:`` gets the prefix a second time.
    """
    return f"{_PREFIX}{tenant}" if tenant == OTHER or tenant.startswith(_PREFIX) else tenant


class TenantLabels:
    """Gives a label of their own only to the tenants with the most traffic, so that the number of time series is
    bounded.

    A new tenant replaces a labelled tenant only if the new tenant has more than twice the traffic. Two tenants with
    similar traffic therefore do not replace each other again and again. Later requests of the new tenant count under
    its label. Earlier requests of the new tenant still count under ``OTHER``. The series of the replaced tenant is
    removed. A label therefore always stands for one tenant, and every request counts once.
    """

    def __init__(self, on_ended: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Create the labels. ``on_ended`` is called with each label whose series must be removed. ``clock`` returns
        monotonic seconds.
        """
        self._on_ended = on_ended
        self._clock = clock
        self._halved_at = clock()
        self._traffic: dict[str, float] = {}
        self._labelled: set[str] = set()

    def seen(self, tenant: str) -> None:
        """Count one request as traffic of a tenant. ``tenant`` is the value that ``own_label`` returned for the tenant."""
        if (now := self._clock()) - self._halved_at >= _HALF_LIFE:
            self._halve(now)
        if tenant not in self._traffic and len(self._traffic) >= _MAX_KNOWN:
            return  # ignore new tenants until ``_halve`` has dropped tenants with little traffic
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
        """Return the label under which requests of a tenant are counted now."""
        return tenant if tenant in self._labelled else OTHER

    def _halve(self, now: float) -> None:
        halvings = int((now - self._halved_at) / _HALF_LIFE)
        self._halved_at += halvings * _HALF_LIFE
        factor = 0.5**halvings
        # A labelled tenant without traffic keeps its label until another tenant needs a label.
        self._traffic = {name: count * factor for name, count in self._traffic.items() if count * factor >= 1.0}


LOG_INTERVAL = 10.0
"""Interval between two log lines about refused requests of the same tenant, in seconds."""
_WINDOW = 60.0
"""Number of past seconds that ``recent`` covers."""
_MAX_TENANTS = 1000
"""Maximum number of pairs of tenant and reason that are counted separately in one interval. All other pairs count as
tenant OTHER.
"""
_MAX_NAME = 256
"""Maximum number of characters of a tenant's name in counts and log lines."""
_SHOWN = 20
"""Maximum number of entries that ``recent`` returns, and maximum number of entries that are logged for one interval."""


class Refused(msgspec.Struct, frozen=True):
    """Number of requests of one tenant that were refused for one reason.

    ``tenant`` is the tenant's ``own_label``. ``tenant`` is empty for requests without a tenant, and OTHER for all
    tenants that are not listed separately.
    """

    tenant: str
    reason: str
    num_refused: int


class TenantRefusals:
    """Counts requests that were refused because a limit was reached (RESOURCE_EXHAUSTED), by tenant.

    A tenant is logged at most once per interval. Must be used on the event loop.
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
        """Number of refused requests in the current interval, by tenant and reason. These requests are not logged yet."""
        self._past: deque[tuple[float, Counter[tuple[str, str]]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def accepted(self, tenant: str) -> None:
        """Count an accepted request as traffic of its tenant."""
        self._labels.seen(own_label(tenant[:_MAX_NAME]))

    def refused(self, tenant: str, error: RequestFailed) -> None:
        """Count a request that was refused before it started, if it was refused because a limit was reached."""
        if error.code != "RESOURCE_EXHAUSTED":
            return
        tenant = own_label(tenant[:_MAX_NAME])  # cut the name, because its length may not have been checked yet
        self._labels.seen(tenant)
        label = self._labels.label_of(tenant)
        self._reasons.setdefault(label, set()).add(error.reason)
        self._metric.labels(self._model, label, error.reason).inc()
        if not self._now:
            self._since = self._clock()
        _count(self._now, (tenant, error.reason), 1)
        if self._timer is None:
            # Use an empty context, because these log lines do not belong to a single request.
            self._timer = asyncio.get_running_loop().call_later(LOG_INTERVAL, self.flush, context=contextvars.Context())

    def flush(self) -> None:
        """Write the log lines for the interval that has just ended."""
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
                "refused requests of a tenant, because a limit was reached",
                tenant=each.tenant,
                count=each.num_refused,
                seconds=seconds,
                reason=each.reason,
            )

    def recent(self) -> list[Refused]:
        """Return the numbers of requests refused in the last minute, largest number first.

        The tenants after the first ``_SHOWN`` entries are summed as OTHER.
        """
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
