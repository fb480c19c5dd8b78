"""Requests that wait for something of their own."""

from collections.abc import Iterator

from penstock_enginecore.core.request import Request


class HeldRequests:
    """In the order in which they came. Every operation costs O(1)."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Take in a request that is not held."""
        self._requests[request.key] = request

    def remove(self, request: Request) -> None:
        """Let go of a request that is held."""
        del self._requests[request.key]
