"""Which frontends are connected and how many requests they hold."""

import msgspec


class Frontend(msgspec.Struct):
    """One frontend. ``session`` is the number of the stream that speaks for it."""

    session: int
    num_held_requests: int = 0


class Frontends:
    """The connected frontends by id. The latest stream of a frontend speaks for it; older ones are ignored."""

    def __init__(self) -> None:
        self._frontends: dict[str, Frontend] = {}

    def __len__(self) -> int:
        return len(self._frontends)

    @property
    def num_held_requests(self) -> int:
        """Requests that wait in all frontends because no engine is up."""
        return sum(frontend.num_held_requests for frontend in self._frontends.values())

    def connect(self, session: int, frontend_id: str) -> None:
        """A frontend introduces itself on a new stream."""
        self._frontends[frontend_id] = Frontend(session)

    def demand(self, session: int, frontend_id: str, num_held_requests: int) -> None:
        """A frontend says how many requests it holds."""
        frontend = self._frontends.get(frontend_id)
        if frontend is not None and frontend.session == session:
            frontend.num_held_requests = num_held_requests

    def disconnect(self, session: int, frontend_id: str) -> None:
        """A stream is over."""
        frontend = self._frontends.get(frontend_id)
        if frontend is not None and frontend.session == session:
            del self._frontends[frontend_id]
