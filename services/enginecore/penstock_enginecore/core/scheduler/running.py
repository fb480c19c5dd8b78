"""The requests that run."""

from collections.abc import Callable, Iterator

from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.queue import Rank


class RunningRequests:
    """In the order in which they started; each holds KV blocks.

    ``rank``: what is most urgent under the priority policy, the lowest first; None when those that started first are.
    """

    def __init__(self, rank: Callable[[Request], Rank] | None) -> None:
        self._rank = rank
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def add(self, request: Request) -> None:
        """Take in a request that starts."""
        self.requests.append(request)

    def remove(self, request: Request) -> None:
        """Take out a request that is among them."""
        if self.requests[-1] is request:
            self.requests.pop()
        else:
            self.requests.remove(request)

    def least_urgent(self) -> Request:
        """The one that makes room for others. There must be one."""
        return self.requests[-1] if self._rank is None else max(self.requests, key=self._rank)

    def drop_finished(self) -> None:
        """Take out those that have ended."""
        self.requests = [request for request in self.requests if not request.finished]

    def take_all(self) -> list[Request]:
        """Take all of them out."""
        requests, self.requests = self.requests, []
        return requests
