"""Bounded queues: fair shares for tenants, and estimates of the time until the queue accepts requests again."""

import math

# Fair shares of a bounded queue, so that one tenant's flood does not exclude other tenants.


def reserve_of(limit: int) -> int:
    """Return the size of the reserve: the number of requests above ``limit`` that a full queue accepts from tenants
    below their fair share. The reserve is a tenth of ``limit``, at least 1.
    """
    return max(limit // 10, 1)


class _Use:
    """Weight of one tenant, and number and total size of the tenant's requests in the queue."""

    __slots__ = ("count", "size", "weight")

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self.weight = 0.0


class TenantRoom:
    """Counts the usage of each tenant in a bounded queue, and decides which tenants may still enter when the queue is
    full.

    Below the limit, any tenant may enter, so a single tenant may use the whole queue. At the limit, a tenant may enter
    only within its fair share and within the reserve beyond the limit. The fair share is the limit times the tenant's
    weight, divided by the weights of all tenants in the queue.

    A tenant can use at most half of the reserve that other tenants have not used. So a second tenant with very many
    requests takes half of the reserve, a third such tenant takes a quarter, and a tenant with few requests can still
    enter. Requests that have entered are never removed. Tenants without requests are forgotten.
    """

    __slots__ = ("_tenants", "_weights", "count", "size")

    def __init__(self) -> None:
        self._tenants: dict[str, _Use] = {}
        self._weights = 0.0
        self.count = 0
        self.size = 0

    def __len__(self) -> int:
        """Return the number of tenants that have requests in the queue."""
        return len(self._tenants)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._tenants

    def count_of(self, tenant: str) -> int:
        """Return the number of a tenant's requests in the queue."""
        return self._tenants[tenant].count if tenant in self._tenants else 0

    @property
    def named(self) -> bool:
        """Whether any request in the queue names a tenant."""
        return len(self._tenants) > ("" in self._tenants)

    def full(self, limit: int) -> bool:
        """Return whether the queue is full. If any request names a tenant, the queue is full only when the reserve is
        also used up.

        Health checks use this method, because one tenant with many requests must not make the service unavailable to
        others.
        """
        return self.count >= self.most(limit)

    def most(self, limit: int) -> int:
        """Return the maximum number of requests: the limit, plus the reserve if any request names a tenant."""
        return limit + (reserve_of(limit) if limit and self.named else 0)

    def enter(self, tenant: str, weight: float, size: int = 0) -> None:
        """Record that one more request of a tenant is in the queue. From now on, ``weight`` is the tenant's weight."""
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
        """Record that one request of a tenant has left the queue. ``size`` must be the size that ``enter`` got for this
        request.
        """
        use = self._tenants[tenant]
        use.count -= 1
        use.size -= size
        self.count -= 1
        self.size -= size
        if not use.count:
            del self._tenants[tenant]
            # Reset the sum of the tenants' weights when the queue is empty, so that rounding errors do not accumulate.
            self._weights = self._weights - use.weight if self._tenants else 0.0

    def takes_count(self, tenant: str, weight: float, added: int, limit: int) -> bool:
        """Return whether ``added`` more requests of a tenant may enter a queue with a limit of ``limit`` requests."""
        use = self._tenants.get(tenant)
        return self._takes(self.count, 0 if use is None else use.count, added, limit, self._share(use, weight))

    def takes_size(self, tenant: str, weight: float, added: int, limit: int) -> bool:
        """Return whether requests of a tenant with the total size ``added`` may enter a queue whose size limit is
        ``limit``.
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
            return False  # a tenant without requests is below its share, whatever the size of its new requests
        return own + added <= limit + reserve_of(limit) - total


# Speed at which work leaves a bounded queue. The speed gives an estimate of when the queue accepts requests again.

MIN_RETRY_AFTER = 0.1
MAX_RETRY_AFTER = 60.0
"""Lower and upper bound of the retry delay for clients, in seconds."""

_MEMORY = 10.0
"""Time in seconds after which the weight of a departure has dropped to 1/e. Time in which the queue is empty does not
count.
"""


class DrainRate:
    """Number of requests and units (tokens or characters) that leave a queue per second. Recent departures count more
    than older departures.

    A rate is the work that has left the queue, divided by the time in which the queue was not empty. The weight of a
    departure decreases exponentially with time. Idle time does not show the speed, so idle time is left out and does
    not reduce weights. All times are seconds of one monotonic clock.
    """

    __slots__ = ("_last", "_requests", "_seconds", "_units")

    def __init__(self) -> None:
        self._last = 0.0
        self._seconds = 0.0
        self._requests = 0.0
        self._units = 0.0

    def begin(self, now: float) -> None:
        """Record that work has entered the empty queue."""
        self._last = now

    def left(self, now: float, units: float, requests: float = 1.0) -> None:
        """Record that ``requests`` requests with ``units`` units have left the queue."""
        self._advance(now)
        self._requests += requests
        self._units += units

    def time_for(self, now: float, requests: float, units: float) -> float | None:
        """Return the estimated seconds until ``requests`` requests and ``units`` units have left the queue, or None if
        no work has left yet.

        While no work leaves the queue, the estimated speed decreases every second.
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
