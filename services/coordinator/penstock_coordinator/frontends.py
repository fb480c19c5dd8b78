"""Which frontends are connected and how many requests they hold."""

import msgspec


class Frontend(msgspec.Struct):
    """One frontend."""

    session: int
    """Number of its latest stream."""
    num_held_requests: int = 0
    """Requests that wait in it because no engine is up."""


class Frontends:
    """The connected frontends by id. Only the latest stream of a frontend counts; reports on older ones are ignored."""

    def __init__(self) -> None:
        self._frontends: dict[str, Frontend] = {}

    def __len__(self) -> int:
        return len(self._frontends)

    @property
    def num_held_requests(self) -> int:
        """Requests that wait in all frontends because no engine is up."""
        return sum(frontend.num_held_requests for frontend in self._frontends.values())

    def connect(self, session: int, frontend_id: str) -> None:
        """A frontend has sent its hello on a new stream."""
        self._frontends[frontend_id] = Frontend(session)

    def demand(self, session: int, frontend_id: str, num_held_requests: int) -> None:
        """A frontend has reported how many requests it holds."""
        frontend = self._frontends.get(frontend_id)
        if frontend is not None and frontend.session == session:
            frontend.num_held_requests = num_held_requests

    def disconnect(self, session: int, frontend_id: str) -> None:
        """A stream is over."""
        frontend = self._frontends.get(frontend_id)
        if frontend is not None and frontend.session == session:
            del self._frontends[frontend_id]
