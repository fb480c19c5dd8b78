"""What brings blocks from other engines, as the connector sees it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from penstock_common.types.kv_transfer import BlockName
from penstock_enginecore.core.request import Request


class PeerBlock(NamedTuple):
    """A block that has come, and was checked. ``place``: among those that were asked for. ``data``: its bytes as
    ``BlockCopier.write`` takes them. They stay as they are until ``done`` was called, once, from any thread; only then more may
    come in their place.
    """

    place: int
    data: "bytes | memoryview"
    done: Callable[[], None]


class PeerTier(Protocol):
    """The sources of requests. Nothing waits in it, and it raises nothing: what it cannot bring does not come.

    All calls come from the thread of the busy loop. ``arrived`` and ``ended`` are called on another one, and return at once.
    """

    def opened(self, request: Request) -> None:
        """A request has come: if it has a source that may be asked, open a pull, which keeps the lease."""

    def closed(self, request: Request) -> None:
        """Its source is not needed any more: give the lease up, and end the pull and what it fetches. Nothing happens without a
        pull.
        """

    def num_blocks(self, request: Request) -> int:
        """Blocks from the first one on that its source is expected to have, in all groups that are needed behind them: 0 without
        a source, and once it has failed. Cheap.
        """

    def fetch(
        self,
        request: Request,
        names: Sequence[BlockName],
        arrived: Callable[[Sequence[PeerBlock]], None],
        ended: Callable[[], None],
    ) -> int:
        """Ask for blocks, each once, in the order in which they are wanted. Those that come are told in any order and any number
        at a time, then ``ended`` once, also where none has come. Returns the number of the fetch.
        """

    def abandon(self, fetch_id: int) -> None:
        """Nobody wants the rest of it: ``ended`` is called soon, if it was not yet, and nothing arrives behind that."""
