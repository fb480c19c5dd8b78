"""KV transfer and offloading in the soak test: engines of all roles, small tiers, embeddings, a restarted frontend."""

import asyncio
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.admin.v1 import service_pb2_grpc as admin_rpc
from penstock_common.rpc.channel import make_channel
from tests.chaos.client import Client
from tests.chaos.contexts import PromptVectors, context_ones, next_turn
from tests.chaos.flow import catalogue
from tests.chaos.killing import address
from tests.chaos.outages import Known
from tests.chaos.outcome import Outcome
from tests.chaos.requests import Request
from tests.fakes.network.ports import free_port
from tests.fakes.systems.cluster import Cluster
from tests.soak.cluster import COUNT, STREAMS, SoakCluster
from tests.soak.havoc import Accidents, stopped_and_started
from tests.soak.memory import files_of, owners_of
from tests.soak.watch import gauge, metrics, total

ROLES = ("prefill", "decode", "prefill", "decode", "both")
"""Roles of the engines. The first prefill engine and the first decode engine are never ended."""
BY_MESSAGES = "both"
"""The role whose engines have no shared memory for blocks."""
POOL_BYTES = 16 * 2**20
"""Size of an engine's KV cache: 4096 tokens. All contexts together have ten thousand."""
HOST_BYTES, DISK_BYTES, ARENA_BYTES = 8 * 2**20, 24 * 2**20, 2 * 2**20
MIN_PREFILL_TOKENS = 256
ENDS_WITHIN = 10.0
"""Seconds that an engine may take to hand over its requests when it ends."""
FRONTEND_ENDS_WITHIN = 4.0
"""Seconds that a frontend may take to end while its clients keep their connections and send more requests."""
GONE = ("UNAVAILABLE", "CANCELLED")
"""Error codes of requests whose frontend ends."""
RECONNECTED = 3.0
"""Seconds until clients have reconnected to a restarted frontend."""
HELD = ("kv_leases", "kv_leased_blocks", "kv_pulls", "kv_arena_blocks", "num_requests_held")
"""Metrics of an engine that must be 0 when there are no requests."""
DONE: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "handed over": ("penstock:handover_gap_seconds_count", {}),
    "leases released": ("penstock:kv_lease_ends_total", {"end": "released"}),
    "blocks by shared memory": ("penstock:kv_transfer_blocks_total", {"direction": "in", "transport": "shared_memory"}),
    "blocks by gRPC": ("penstock:kv_transfer_blocks_total", {"direction": "in", "transport": "grpc"}),
    "blocks from the host": ("penstock:kv_tier_loaded_blocks_total", {"medium": "host"}),
    "blocks from the disk": ("penstock:kv_tier_loaded_blocks_total", {"medium": "disk"}),
    "bytes of vectors in shared memory": ("penstock:media_sent_bytes_total", {"transport": "shared_memory"}),
    "bytes of vectors in chunks": ("penstock:media_sent_bytes_total", {"transport": "chunks"}),
}
"""Events that must occur, by the counters that record them."""


class KvCluster(SoakCluster):
    """Cluster with engines of all roles and two frontends.

    Each engine has a small KV cache, little host memory and a disk tier. Accidents may end the second frontend.
    """

    lasting = 2
    fresh = 0.1

    def __init__(self, model: Path, *, engines: int, **flags: Any) -> None:
        self._model = model
        self._folder = tempfile.TemporaryDirectory()
        self._turns: dict[int, tuple[Request, Outcome]] = {}
        self._owners: set[str] = set()
        self._outages: list[tuple[float, float]] = []
        """Outages of the second frontend, as start and end times."""
        self._wrong: list[str] = []
        super().__init__(
            model,
            engines=engines,
            frontends=2,
            frontend_flags={
                "disaggregation__min_prefill_tokens": MIN_PREFILL_TOKENS,
                "drain_timeout": FRONTEND_ENDS_WITHIN,
            },
            cache__host_memory=HOST_BYTES,
            cache__disk_size=DISK_BYTES,
            kv_transfer__port=0,
            kv_transfer__arena=ARENA_BYTES,
            **flags | {"kv_cache_memory": POOL_BYTES, "drain_timeout": ENDS_WITHIN},
        )
        for number, engine in enumerate(self.engines):
            role = ROLES[number % len(ROLES)]
            engine.add_flag("role", role)
            engine.add_flag("kv-transfer.transport", "grpc" if role == BY_MESSAGES else "auto")
            engine.add_flag("cache.disk", self._disk(number))
        self._admin_port = free_port()
        self.frontend.add_flag("admin.port", self._admin_port)

    def _disk(self, number: int) -> Path:
        return Path(self._folder.name) / f"engine-{number}"

    async def __aenter__(self) -> Self:
        for number in range(len(self.engines)):
            self._disk(number).mkdir()
        await super().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.look()
        await super().__aexit__(kind, error, trace)
        if found := files_of(self._owners):
            self._wrong.append(f"when all had ended, in shared memory: {', '.join(path.name for path in found)}")
        self._folder.cleanup()

    @property
    def wrong(self) -> list[str]:
        """See ``SoakCluster``."""
        return self._wrong

    async def known(self, tokens: int) -> Known:
        """Return the answers of one engine without KV tiers and KV transfer."""
        requests = self.requests(tokens) + context_ones(PromptVectors(self._model), COUNT, tokens)
        async with Cluster(self._model, engines=1) as plain, Client(address(plain.frontend)) as client:
            known = await catalogue(client, requests, streams=STREAMS)
            firsts: dict[int, Request] = {}
            turns = []
            for request, outcome in known:
                if (turn := next_turn(request, outcome, tokens)) is not None:
                    firsts[id(turn)] = request
                    turns.append(turn)
            for turn, outcome in await catalogue(client, turns, streams=STREAMS):
                self._turns[id(firsts[id(turn)])] = turn, outcome
        return known

    def next_turn(self, request: Request) -> tuple[Request, Outcome] | None:
        """See ``SoakCluster``."""
        return self._turns.get(id(request))

    def accidents(self, rng: random.Random) -> Accidents:
        """Return the accidents: engines restart in turn, the second frontend ends, or all caches are cleared."""

        async def roll() -> None:
            for engine in self.engines[self.lasting :]:
                await stopped_and_started(engine)
                await self.until_engines_are_seen(len(self.engines))

        async def kill_frontend() -> None:
            frontend = self.frontends[1]
            await frontend.kill()
            await asyncio.sleep(rng.uniform(0, 3))
            await frontend.restart()

        async def stop_frontend() -> None:
            await stopped_and_started(self.frontends[1])

        return {
            "engines restarted in turn": (1, roll),
            "frontend killed": (1, partial(self._away, kill_frontend)),
            "frontend stopped": (1, partial(self._away, stop_frontend)),
            "caches emptied": (1, self._empty),
        }

    async def _away(self, accident: Callable[[], Awaitable[None]]) -> None:
        """Run an accident of the second frontend, and excuse failures of its requests meanwhile."""
        began = time.monotonic()
        self._outages.append((began, math.inf))
        await accident()
        await self.until_engines_are_seen(len(self.engines))
        self._outages[-1] = began, time.monotonic() + RECONNECTED

    def excuses(self, outcome: Outcome) -> bool:
        """See ``SoakCluster``. Only requests to the second frontend are excused."""
        ended = outcome.began + outcome.seconds
        return outcome.error in GONE and any(outcome.began <= end and begin <= ended for begin, end in self._outages)

    async def _empty(self) -> None:
        """Clear the prefix caches of all engines. Leases end, and running requests are preempted and recomputed."""
        async with make_channel(f"127.0.0.1:{self._admin_port}") as channel:
            request = admin_pb.ResetPrefixCacheRequest(preempt_running=True)
            await admin_rpc.AdminServiceStub(channel).ResetPrefixCache(request)

    def look(self) -> None:
        """Record the owners of shared memory before a process is ended, and check the size of each disk tier."""
        for service in (*self.engines, *self.frontends):
            self._owners |= owners_of(service)
        for number in range(len(self.engines)):
            sizes = {path.name: path.stat().st_size for path in self._disk(number).rglob("*")}
            if len(sizes) > 1 or sum(sizes.values()) > DISK_BYTES:
                self._wrong.append(f"engine-{number}: {sizes} on its disk, which may have {DISK_BYTES} bytes")

    async def left(self) -> str:
        """Return leases, pulls, blocks in flight and segments that exist although there are no requests."""
        self.look()
        async with httpx.AsyncClient(verify=False, trust_env=False) as http:
            for number, engine in enumerate(self.engines):
                text = await metrics(http, engine)
                for name in HELD:
                    if held := gauge(text, f"penstock:{name}"):
                        return f"engine-{number}: {name} is {held:g}"
        arenas = {f"penstock-{owner}-0" for engine in self.engines for owner in owners_of(engine)}
        locks = {f"penstock-{owner}.lock" for service in self.services for owner in owners_of(service)}
        for path in files_of(self._owners):
            if path.name in arenas:
                if (size := path.stat().st_size) > ARENA_BYTES:
                    return f"an arena of {size} bytes, which may have {ARENA_BYTES}"
            elif path.name not in locks:
                return f"{path} of {path.stat().st_size} bytes"
        return ""

    async def done(self) -> Mapping[str, float]:
        """See ``SoakCluster``."""
        found: Counter[str] = Counter()
        async with httpx.AsyncClient(verify=False, trust_env=False) as http:
            texts = [await metrics(http, service) for service in (*self.engines, *self.frontends)]
        for what, (name, labels) in DONE.items():
            found[what] = round(sum(total(text, name, **labels) for text in texts))
        return found
