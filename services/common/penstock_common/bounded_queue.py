"""Bounded queues: fair shares for tenants, and estimates of the time until there is room."""

import math

# Fair shares of a bounded queue, so that one tenant's flood does not exclude other tenants.


def reserve_of(limit: int) -> int:
    """Return the reserve beyond a limit for tenants below their fair share: a tenth of the limit, at least 1."""
    return max(limit // 10, 1)


class _Use:
    """Usage of one tenant."""

    __slots__ = ("count", "size", "weight")

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self.weight = 0.0


class TenantRoom:
    """Counts the usage of each tenant in a bounded queue, and decides which tenants may still enter when it is full.

    Below the limit, any tenant may enter, so a single tenant may use the whole queue. At the limit, a tenant may enter
    only within its fair share and within the reserve beyond the limit. The fair share is the limit times the tenant's
    weight, divided by the weights of all tenants in the queue.

    A tenant can use only as much of the reserve as it leaves to others. So a second flood takes half of the reserve, a
    third one a quarter, and a tenant with few requests can still enter. Requests that have entered are never removed.
    Tenants without requests are forgotten.
    """

    __slots__ = ("_tenants", "_weights", "count", "size")

    def __init__(self) -> None:
        self._tenants: dict[str, _Use] = {}
        self._weights = 0.0
        self.count = 0
        self.size = 0

    def __len__(self) -> int:
        """Return the number of tenants with requests."""
        return len(self._tenants)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._tenants

    def count_of(self, tenant: str) -> int:
        """Return the number of a tenant's requests."""
        return self._tenants[tenant].count if tenant in self._tenants else 0

    @property
    def named(self) -> bool:
        """Whether any request names a tenant."""
        return len(self._tenants) > ("" in self._tenants)

    def full(self, limit: int) -> bool:
        """Return whether the limit is reached, and also the reserve if any request names a tenant.

        Health checks use this, because one tenant's flood must not make the service unavailable to others.
        """
        return self.count >= self.most(limit)

    def most(self, limit: int) -> int:
        """Return the limit, plus the reserve if any request names a tenant."""
        return limit + (reserve_of(limit) if limit and self.named else 0)

    def enter(self, tenant: str, weight: float, size: int = 0) -> None:
        """Count one more request. ``weight`` is the tenant's weight from now on."""
        use = self._tenants.get(tenant)
        if use is None:
            use = self._tenants[tenant] = _Use()
        self._weights += weight - use.weight
        use.weight = weight
        use.count += 1
        use.size += size
        self.count += 1
        self.size += size

    def leave(self, tenant: str, size: int = 0) -> None:
        """Count one request less. ``size`` must be the same as for ``enter``."""
        use = self._tenants[tenant]
        use.count -= 1
        use.size -= size
        self.count -= 1
        self.size -= size
        if not use.count:
            del self._tenants[tenant]
            # Rounding errors of the sum must not accumulate.
            self._weights = self._weights - use.weight if self._tenants else 0.0

    def takes_count(self, tenant: str, weight: float, added: int, limit: int) -> bool:
        """Return whether ``added`` more requests of a tenant may enter, with a limit of ``limit`` requests."""
        use = self._tenants.get(tenant)
        return self._takes(self.count, 0 if use is None else use.count, added, limit, self._share(use, weight))

    def takes_size(self, tenant: str, weight: float, added: int, limit: int) -> bool:
        """Return whether requests of a tenant with size ``added`` may enter, with a limit of ``limit`` for the total
        size.
        """
        use = self._tenants.get(tenant)
        return self._takes(self.size, 0 if use is None else use.size, added, limit, self._share(use, weight))

    def _share(self, use: _Use | None, weight: float) -> float:
        return weight / (self._weights + weight - (0.0 if use is None else use.weight))

    @staticmethod
    def _takes(total: int, own: int, added: int, limit: int, share: float) -> bool:
        if total + added <= limit:
            return True
        if (own or not total) and own + added > limit * share:
            return False  # a tenant without requests is below its share, whatever it brings
        return own + added <= limit + reserve_of(limit) - total


# Speed at which work leaves a bounded queue, to estimate when there is room.

MIN_RETRY_AFTER = 0.1
MAX_RETRY_AFTER = 60.0
"""Bounds of the retry delay for clients, in seconds."""

_MEMORY = 10.0
"""Seconds of work after which the weight of an observation has dropped to 1/e."""


class DrainRate:
    """Requests and units (tokens, characters) that leave a queue per second, weighted towards recent ones.

    Rates are averages with exponentially decreasing weights: the work that left, divided by the time in which the queue
    was not empty. Idle time says nothing about the speed, so it neither counts nor ages observations. All times are
    seconds of one monotonic clock.
    """

    __slots__ = ("_last", "_requests", "_seconds", "_units")

    def __init__(self) -> None:
        self._last = 0.0
        self._seconds = 0.0
        self._requests = 0.0
        self._units = 0.0

    def begin(self, now: float) -> None:
        """Record that the empty queue got work."""
        self._last = now

    def left(self, now: float, units: float, requests: float = 1.0) -> None:
        """Record that ``requests`` requests with ``units`` units have left."""
        self._advance(now)
        self._requests += requests
        self._units += units

    def time_for(self, now: float, requests: float, units: float) -> float | None:
        """Return the seconds until this much work has left, or None without observations.

        If no work leaves the queue any more, its estimated speed decreases every second.
        """
        self._advance(now)
        if not self._requests:
            return None
        of_requests = requests * self._seconds / self._requests
        of_units = units * self._seconds / self._units if self._units else 0.0
        return max(of_requests, of_units)

    def _advance(self, now: float) -> None:
        elapsed, self._last = now - self._last, now
        if elapsed <= 0.0:
            return
        kept = math.exp(-elapsed / _MEMORY)
        self._seconds = self._seconds * kept + _MEMORY * (1.0 - kept)
        self._requests *= kept
        self._units *= kept


def retry_after(seconds: float) -> float:
    """Return the retry delay for a client, for an estimated wait in seconds."""
    return min(max(seconds, MIN_RETRY_AFTER), MAX_RETRY_AFTER)
