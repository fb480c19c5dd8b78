"""The requests that have not ended."""

from collections.abc import Iterable, Mapping

from penstock_common.errors import InvalidArgument, quoted
from penstock_enginecore.core.request import Request


class RequestTable:
    """Living requests, by key and by client and id. Every operation costs what it returns."""

    def __init__(self) -> None:
        self._by_key: dict[str, Request] = {}
        self._by_client: dict[str, dict[str, Request]] = {}
        self.num_constrained = 0
        """Those whose tokens a grammar decides on: mostly none, and then a step need not look for them."""

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def by_key(self) -> Mapping[str, Request]:
        """All of them."""
        return self._by_key

    def check_unused(self, client_id: str, request_id: str) -> None:
        """Raise InvalidArgument when the client has a living request with this id."""
        if request_id in self._by_client.get(client_id, ()):
            raise InvalidArgument(f"request_id {quoted(request_id)} is already in use", field="request_id")

    def add(self, request: Request) -> None:
        """Take in a request whose id is unused."""
        self._by_key[request.key] = request
        self.num_constrained += request.constrained
        self._by_client.setdefault(request.client_id, {})[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Forget an ended request."""
        del self._by_key[request.key]
        self.num_constrained -= request.constrained
        of_client = self._by_client[request.client_id]
        del of_client[request.request_id]
        if not of_client:
            del self._by_client[request.client_id]

    def of_client(self, client_id: str) -> list[Request]:
        """The requests of a client."""
        return list(self._by_client.get(client_id, {}).values())

    def find(self, client_id: str, request_ids: Iterable[str]) -> list[Request]:
        """Those of the client's requests that are alive, each once."""
        of_client = self._by_client.get(client_id, {})
        return [of_client[request_id] for request_id in dict.fromkeys(request_ids) if request_id in of_client]
