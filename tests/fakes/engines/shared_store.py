"""KV connector of a plugin. For requests that ask for it, it keeps blocks in a store of this process."""

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from penstock_common.errors import InvalidArgument
from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.request import Request
from penstock_enginecore.kv_transfer.core.base import BlockCopier, BlockHolder, LoadEnded, Place
from penstock_enginecore.kv_transfer.core.registry import ConnectorContext, register_kv_connector

NAME = "shared_store"
STORES: dict[str, dict[BlockName, bytes]] = {}
"""Blocks by name of the store. ``kv_transfer_params`` contain the name."""


class StoreConnector:
    """Connector with the parameters ``{"store": NAME, "keep": BOOL}``.

    It reads blocks of a request from the store. If ``keep`` is set, it also writes the request's blocks to the store
    when the request has ended, and the answer names the store.
    """

    def __init__(self, context: ConnectorContext) -> None:
        self._wake = context.wake
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wanted: dict[bytes, str] = {}
        self._last = 0
        self._under_way: set[Future[Any]] = set()
        self.num_held_blocks = 0

    def attach(self, blocks: BlockHolder) -> None:
        self._blocks = blocks

    def begin(self, copier: BlockCopier, kv_cache: KVCacheConfig) -> None:
        self._copier = copier
        self._groups = len(kv_cache.groups)

    def check(self, params: Mapping[str, Any]) -> None:
        for name in params.keys() - {"store", "keep"}:
            raise InvalidArgument(f"kv_transfer_params.{name} is unknown", field=f"kv_transfer_params.{name}")

    def answer(self, request: Request) -> Mapping[str, Any] | None:
        params = request.kv_transfer_params
        if not params.get("keep"):
            return None
        self._wanted |= dict.fromkeys(request.block_hashes, params["store"])
        return {"store": params["store"]}

    def _store(self, request: Request) -> dict[BlockName, bytes]:
        return STORES.get(request.kv_transfer_params.get("store", ""), {})

    def lookup(self, request: Request, names: Sequence[Sequence[BlockName]]) -> int:
        store = self._store(request)
        there = [all(name in store for name in of_place) for of_place in names]
        return [*there, False].index(False)

    def seconds(self, request: Request, names: Sequence[BlockName]) -> float:
        return 0.0

    def load(self, request: Request, places: Sequence[Place]) -> int:
        self._last += 1
        contents = [self._store(request)[place.name] for place in places]
        self._follow(self._copier.write([place.block_id for place in places], contents), self._last, places)
        return self._last

    def _follow(self, future: "Future[Any]", what: Any, places: Sequence[Place]) -> None:
        def over(done: "Future[Any]") -> None:
            self._news.put((done, what, tuple(places)))
            self._wake()

        self._under_way.add(future)
        future.add_done_callback(over)

    def abandon(self, load_id: int) -> None:
        pass

    def opened(self, request: Request) -> None:
        pass

    def closed(self, request: Request) -> None:
        pass

    def on_cached(self, places: Sequence[Place]) -> None:
        pass

    def on_freed(self, places: Sequence[Place]) -> None:
        kept = [place for place in places if place.name.hash in self._wanted and self._blocks.hold(place)]
        if kept:
            self.num_held_blocks += len(kept)
            read = self._copier.read([place.block_id for place in kept])
            self._follow(read, partial(STORES.setdefault, self._wanted[kept[0].name.hash], {}), kept)

    def on_evicted(self, places: Sequence[Place]) -> None:
        pass

    def take_ended(self) -> list[LoadEnded]:
        ended = []
        while not self._news.empty():
            done, what, places = self._news.get()
            self._under_way.discard(done)
            if isinstance(what, int):
                ended.append(LoadEnded(what, tuple((place, KvMedium.PEER) for place in places)))
                continue
            what().update(zip((place.name for place in places), done.result(), strict=True))
            for place in places:
                self._blocks.release(place)
            self.num_held_blocks -= len(places)
        return ended

    @property
    def has_news(self) -> bool:
        return not self._news.empty()

    def settle(self) -> None:
        for future in list(self._under_way):
            future.result()

    def reset(self) -> None:
        STORES.clear()

    def shutdown(self) -> None:
        pass


def register() -> None:
    """Register the plugin."""
    register_kv_connector(NAME, f"{__name__}:StoreConnector")
