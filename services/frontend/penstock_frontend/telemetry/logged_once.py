"""Which things have been logged of which client, so that each is logged once."""

from collections import OrderedDict
from collections.abc import Iterable

_MAX_CLIENTS = 1024
_MAX_THINGS = 64
"""Things that are logged of one client, at most."""


class LoggedOnce:
    """Remembers what was logged of each client, within bounds: it forgets the client that was heard of longest ago."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, set[str]] = OrderedDict()

    def new(self, client: str, things: Iterable[str]) -> list[str]:
        """Return those of ``things`` that are to be logged now, and remember them. A client has at most 64."""
        told = self._told.setdefault(client, set())
        self._told.move_to_end(client)
        if len(self._told) > _MAX_CLIENTS:
            self._told.popitem(last=False)
        found = [thing for thing in dict.fromkeys(things) if thing not in told][: _MAX_THINGS - len(told)]
        told.update(found)
        return found
