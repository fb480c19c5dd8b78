"""Which tenants have a series of their own in metrics."""

import time
from collections.abc import Callable

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
