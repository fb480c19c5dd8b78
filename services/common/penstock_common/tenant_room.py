"""Fair shares of a bounded place, so that one tenant's flood does not keep the other tenants out."""


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
