"""Bounded queues: fair shares for tenants, and when there will be room."""

import math

# Fair shares of a bounded place, so that one tenant's flood does not keep the other tenants out.


def reserve_of(limit: int) -> int:
    """The room beyond a limit that is kept for tenants below their fair share: a tenth of the limit, at least 1."""
    return max(limit // 10, 1)


class _Use:
    """What one tenant has in the place."""

    __slots__ = ("count", "size", "weight")

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self.weight = 0.0


class TenantRoom:
    """Counts what each tenant has in a bounded place, and decides who may still enter when the place is full.

    Below the limit anyone enters, so one tenant alone may use the whole place. At the limit a tenant enters only if it stays
    within its fair share (the limit times its weight, divided by the weights of all tenants in the place) and within the
    reserve beyond the limit. Of the reserve, a tenant can use only as much as it leaves to others. So a second flood
    takes half of the reserve, a third one a quarter, and a tenant with few requests still enters. Nothing that has
    entered is ever removed. Tenants without anything in the place are forgotten.
    """

    __slots__ = ("_tenants", "_weights", "count", "size")

    def __init__(self) -> None:
        self._tenants: dict[str, _Use] = {}
        self._weights = 0.0
        self.count = 0
        self.size = 0

    def __len__(self) -> int:
        """Tenants that have something in the place."""
        return len(self._tenants)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._tenants

    def count_of(self, tenant: str) -> int:
        """Requests of a tenant in the place."""
        return self._tenants[tenant].count if tenant in self._tenants else 0

    @property
    def named(self) -> bool:
        """Whether a request in the place names a tenant."""
        return len(self._tenants) > ("" in self._tenants)

    def full(self, limit: int) -> bool:
        """Whether ``limit`` requests are in the place, and the reserve is used up where any of them names a tenant.

        Health checks go by this: one tenant's flood must not take a whole service away from the others.
        """
        return self.count >= self.most(limit)

    def most(self, limit: int) -> int:
        """The limit, and the reserve beyond it where a request in the place names a tenant."""
        return limit + (reserve_of(limit) if limit and self.named else 0)

    def enter(self, tenant: str, weight: float, size: int = 0) -> None:
        """Count one more request. ``weight`` is the tenant's from now on."""
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
        """Count one request less. ``size``: as it entered."""
        use = self._tenants[tenant]
        use.count -= 1
        use.size -= size
        self.count -= 1
        self.size -= size
        if not use.count:
            del self._tenants[tenant]
            # Rounding errors of the sum must not add up over the life of the process.
            self._weights = self._weights - use.weight if self._tenants else 0.0

    def takes_count(self, tenant: str, weight: float, added: int, limit: int) -> bool:
        """Whether ``added`` more requests of a tenant may enter, where ``limit`` requests may be."""
        use = self._tenants.get(tenant)
        return self._takes(self.count, 0 if use is None else use.count, added, limit, self._share(use, weight))

    def takes_size(self, tenant: str, weight: float, added: int, limit: int) -> bool:
        """Whether requests of a tenant of the size ``added`` may enter, where ``limit`` is the largest size of all."""
        use = self._tenants.get(tenant)
        return self._takes(self.size, 0 if use is None else use.size, added, limit, self._share(use, weight))

    def _share(self, use: _Use | None, weight: float) -> float:
        return weight / (self._weights + weight - (0.0 if use is None else use.weight))

    @staticmethod
    def _takes(total: int, own: int, added: int, limit: int, share: float) -> bool:
        if total + added <= limit:
            return True
        if (own or not total) and own + added > limit * share:
            return False  # a tenant that has nothing in a place of others is below its share, whatever it brings
        return own + added <= limit + reserve_of(limit) - total


# How fast work leaves a bounded queue, and so when there will be room in it.

MIN_RETRY_AFTER = 0.1
MAX_RETRY_AFTER = 60.0
"""Bounds of what clients are told to wait, in seconds."""

_MEMORY = 10.0
"""Seconds of work after which an observation counts a third (1/e)."""


class DrainRate:
    """Requests and units (tokens, characters) that leave a queue per second, weighted towards the latest.

    Rates are averages with weights that fall exponentially with age: what has left, over the time in which there was
    something to leave. Time with nothing there says nothing about the speed, so it neither counts nor ages what was
    observed. All times are seconds of one monotonic clock.
    """

    __slots__ = ("_last", "_requests", "_seconds", "_units")

    def __init__(self) -> None:
        self._last = 0.0
        self._seconds = 0.0
        self._requests = 0.0
        self._units = 0.0

    def begin(self, now: float) -> None:
        """Something has come into the empty queue."""
        self._last = now

    def left(self, now: float, units: float, requests: float = 1.0) -> None:
        """A request, or so many, with so many units has left."""
        self._advance(now)
        self._requests += requests
        self._units += units

    def time_for(self, now: float, requests: float, units: float) -> float | None:
        """Seconds until so many requests and so many units have left; None when nothing has been observed.

        A queue that nothing leaves any more gets slower with every second.
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
    """What a client is told for a wait of so many seconds."""
    return min(max(seconds, MIN_RETRY_AFTER), MAX_RETRY_AFTER)
