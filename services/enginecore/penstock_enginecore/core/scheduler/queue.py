"""The queue of waiting requests."""

from collections import OrderedDict
from collections.abc import Iterator

from penstock_enginecore.core.request import Request


class RequestQueue:
    """First come, first served, with every operation in O(1), removal from the middle included."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def append(self, request: Request) -> None:
        """Add at the end."""
        self._requests[request.key] = request
        self.num_tokens += request.num_tokens

    def prepend(self, request: Request) -> None:
        """Add at the head: a preempted request goes first."""
        self.append(request)
        self._requests.move_to_end(request.key, last=False)

    def peek(self) -> Request:
        """The head."""
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        del self._requests[request.key]
        self.num_tokens -= request.num_tokens
