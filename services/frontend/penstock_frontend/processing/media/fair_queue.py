"""A queue that tenants share: each in turn gives the first of what it has waiting."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Who has much waiting delays nobody else: one of each tenant's is taken before the second of any. Of one tenant they go in
    the order in which they came.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        """By tenant, whose turn is next first; none is empty."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, tenant: str, item: T) -> None:
        """Behind the tenant's others. Who has none waiting is last in turn."""
        self._waiting.setdefault(tenant, deque()).append(item)
        self._count += 1

    def put_back(self, tenant: str, item: T) -> None:
        """Before all others: it was taken, and is to be taken again."""
        self._waiting.setdefault(tenant, deque()).appendleft(item)
        self._waiting.move_to_end(tenant, last=False)
        self._count += 1

    def take(self) -> T:
        """The next. IndexError when there is none."""
        if not self._waiting:
            raise IndexError("nothing waits")
        tenant, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[tenant] = items
        self._count -= 1
        return item

    def displace(self, tenant: str) -> T | None:
        """Take out the last of the tenant with most waiting, so that one of ``tenant`` has its place. None where that would leave
        ``tenant`` with as many as the other: then there is no room for it.
        """
        if not self._waiting:
            return None
        most = max(self._waiting, key=lambda each: len(self._waiting[each]))
        if len(self._waiting.get(tenant, ())) + 1 >= len(self._waiting[most]):
            return None
        item = self._waiting[most].pop()
        self._count -= 1
        return item
