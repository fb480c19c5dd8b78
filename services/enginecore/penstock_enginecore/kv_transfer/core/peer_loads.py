"""Blocks that come from the sources of requests, and are written into the pool as they come."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from penstock_common.types.kv_transfer import BlockName
from penstock_enginecore.core.request import Request
from penstock_enginecore.kv_transfer.core.base import Place
from penstock_enginecore.kv_transfer.core.copier import BlockCopier
from penstock_enginecore.kv_transfer.core.peer import PeerBlock, PeerTier

logger = logging.getLogger(__name__)

Over = Callable[[list[Place]], None]
"""Called once on any thread, with what has arrived whole: nobody writes to the blocks of the load any more."""


class PeerLoads:
    """What a connector has of a ``PeerTier``. Methods belong to the thread of the busy loop."""

    def __init__(self, peers: PeerTier, copier: BlockCopier) -> None:
        self._peers = peers
        self._copier = copier
        self._had: dict[str, set[bytes]] = {}
        """By key of a request, hashes of what its source had."""
        self._missing: dict[str, set[BlockName]] = {}
        """What its source was asked for, and did not bring."""
        self._asked: dict[int, tuple[set[BlockName], Sequence[Place]]] = {}
        """By load, where that is noted, and what it is to bring."""

    def opened(self, request: Request) -> None:
        """A request has come."""
        self._peers.opened(request)

    def closed(self, request: Request) -> None:
        """It has ended or gone on."""
        self._had.pop(request.key, None)
        self._missing.pop(request.key, None)
        self._peers.closed(request)

    def has(self, request: Request, name: BlockName) -> bool:
        """Whether its source is expected to bring a block."""
        count = self._peers.num_blocks(request)
        if not count:
            return False
        had = self._had.get(request.key)
        if had is None:
            had = self._had[request.key] = set(request.block_hashes[:count])
        return name.hash in had and name not in self._missing.get(request.key, ())

    def load(self, request: Request, places: Sequence[Place], over: Over) -> int:
        """Begin to bring blocks. Returns the number of the load, for ``abandon``."""
        missing = self._missing.setdefault(request.key, set())
        missing.update(place.name for place in places)  # what comes is in the pool

        def all_over(arrived: list[Place]) -> None:
            missing.difference_update(place.name for place in arrived)
            over(arrived)

        load = _PeerLoad(self._copier, places, all_over)
        number = self._peers.fetch(request, [place.name for place in places], load.arrived, load.ended)
        self._asked[number] = missing, places
        return number

    def abandon(self, number: int) -> None:
        """Nobody wants the rest of a load: it is over soon. It may be asked for again."""
        missing, places = self._asked.pop(number, (set(), ()))
        missing.difference_update(place.name for place in places)
        self._peers.abandon(number)

    def taken(self, number: int) -> None:
        """That a load is over has been taken note of."""
        self._asked.pop(number, None)


class _PeerLoad:
    """One write is under way at a time; what comes meanwhile is written together behind it. Any thread."""

    def __init__(self, copier: BlockCopier, places: Sequence[Place], over: Over) -> None:
        self._copier = copier
        self._places = places
        self._over = over
        self._lock = threading.Lock()
        self._waiting: list[PeerBlock] = []
        self._writing = False
        self._has_ended = False
        self._arrived: list[int] = []

    def arrived(self, blocks: Sequence[PeerBlock]) -> None:
        """Blocks have come."""
        with self._lock:
            self._waiting += blocks
            if self._writing:
                return
            self._writing = True
        self._write()

    def ended(self) -> None:
        """No more will."""
        with self._lock:
            self._has_ended = True
            if self._writing:
                return
        self._tell()

    def _write(self) -> None:
        with self._lock:
            blocks, self._waiting = self._waiting, []
        try:
            future = self._copier.write(
                [self._places[block.place].block_id for block in blocks], [block.data for block in blocks]
            )
        except Exception as e:  # of a copier that cannot be told anything
            self._written(blocks, e)
        else:
            future.add_done_callback(partial(self._is_written, blocks))

    def _is_written(self, blocks: Sequence[PeerBlock], done: "Future[None]") -> None:
        self._written(blocks, done.exception())

    def _written(self, blocks: Sequence[PeerBlock], error: BaseException | None) -> None:
        for block in blocks:
            block.done()
        with self._lock:
            if error is None:
                self._arrived += [block.place for block in blocks]
            more = bool(self._waiting)
            self._writing = more
            tell = self._has_ended and not more
        if error is not None:
            logger.warning("blocks of another engine cannot be written: %s: %s", type(error).__name__, error)
        if more:
            self._write()
        elif tell:
            self._tell()

    def _tell(self) -> None:
        self._over([self._places[place] for place in sorted(self._arrived)])
