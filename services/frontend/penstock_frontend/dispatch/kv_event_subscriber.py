"""Tracking of the contents of the engines' prefix caches, while the engines are connected."""

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock_common.errors import Internal, RequestFailed
from penstock_common.observability.logging import get_logger, incident
from penstock_common.types.kv_transfer import KvCacheEvent, KvMedium
from penstock_common.types.outputs import EngineReady
from penstock_frontend.dispatch.connection import EngineConnection
from penstock_frontend.dispatch.prefix_caches import PrefixCaches
from penstock_frontend.rpc.engine_session import EngineSession

_PART_BLOCKS = 131_072
"""Approximate number of blocks in each answer of an engine. Their digests have 2 MiB."""
_ANSWER_WITHIN = 30.0
"""Maximum number of seconds to wait for each answer with a part of the engine's blocks."""

_TELLING = frozenset({"followed_cache", "kv_events"})
"""Capabilities of engines that report changes of their prefix cache. An engine that reports changes has at least one of
them. Engines of version 0.1 report changes either to every frontend or to no frontend.
"""

_STATES = "states"
"""Capability of engines that report states, because their model has recurrent layers."""


class CacheFollower:
    """Keeps a ``PrefixCaches`` object up to date.

    When a session with an engine begins, this class requests the list of cached blocks. After that, it applies the
    engine's cache events.

    An error in this class ends no request and no session. After an error, the engine's cached prefixes are unknown, and
    the router rates the engine by load only.
    """

    def __init__(self, caches: PrefixCaches) -> None:
        self._caches = caches
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._told_full = False

    def up(self, connection: EngineConnection) -> None:
        """Start tracking the prefix cache of an engine whose session has begun."""
        ready, session = connection.ready, connection.session
        if ready is None or session is None or not _TELLING.intersection(ready.capabilities):
            return
        self._caches.begin(connection.address, ready.block_size, has_states=_STATES in ready.capabilities)
        task = asyncio.create_task(self._ask(connection, ready, session), name=f"cache of engine {connection.address}")
        self._asking[connection.address] = task

    def changed(self, connection: EngineConnection, events: Sequence[KvCacheEvent]) -> None:
        """Apply the cache events of an engine."""
        try:
            self._caches.apply(connection.address, events)
        except Exception as e:
            self._give_up(connection, e)
        self._warn_when_full()

    def down(self, connection: EngineConnection) -> None:
        """Stop tracking the prefix cache of an engine whose session has ended."""
        if (task := self._asking.pop(connection.address, None)) is not None:
            task.cancel()
        self._caches.gone(connection.address)

    async def _ask(self, connection: EngineConnection, ready: EngineReady, session: EngineSession) -> None:
        """Request the list of blocks that the engine had already cached when the session began."""
        try:
            answers = {KvMedium.DEVICE: await _cached_blocks(session, ready.num_kv_blocks)}
            if "kv_tier_events" in ready.capabilities:
                for medium in (KvMedium.HOST, KvMedium.DISK):
                    answers[medium] = await _kept_blocks(session, medium)
            if _STATES in ready.capabilities:
                answers[KvMedium.STATE] = await _kept_blocks(session, KvMedium.STATE)
            self._caches.settle(connection.address, answers)
        except (RequestFailed, TimeoutError) as e:
            get_logger().warning(
                "engine did not list its cached blocks; the router knows only the blocks that this engine caches from now on",
                engine=connection.name,
                reason=str(e) or f"no answer within {_ANSWER_WITHIN:g} s",
            )
            self._caches.settle(connection.address, None)
        except Exception as e:
            self._give_up(connection, e)
        self._warn_when_full()

    def _give_up(self, connection: EngineConnection, error: Exception) -> None:
        """Stop tracking the engine's cache until its next session."""
        incident(error, request="", doing=f"tracking the prefix cache of engine {connection.name}")
        self._caches.gone(connection.address)

    def _warn_when_full(self) -> None:
        if self._caches.full and not self._told_full:
            self._told_full = True
            get_logger().warning(
                "engines have more cached blocks than the router can track; increase routing.max_cached_blocks",
                max_cached_blocks=self._caches.num_blocks,
            )


async def _cached_blocks(session: EngineSession, num_blocks: int, *medium: KvMedium) -> bytes:
    """Fetch the digests of the blocks in the KV cache, or in another medium, in several calls. ``num_blocks`` is the
    approximate number of blocks.

    Raises RequestFailed if the engine refuses a call, and TimeoutError if it does not answer in time.
    """
    num_parts = -(-num_blocks // _PART_BLOCKS) or 1
    parts: list[bytes] = []
    for part in range(num_parts):
        answer = await _ask(session, "cached_blocks", [part, num_parts, *medium])
        if not isinstance(answer, bytes):
            raise Internal(f"the engine's answer to cached_blocks has type {type(answer).__name__}; expected bytes")
        parts.append(answer)
    return b"".join(parts)


async def _kept_blocks(session: EngineSession, medium: KvMedium) -> bytes:
    """Return the digests of all blocks in a medium. Ask the engine for the number of blocks first."""
    num_blocks = await _ask(session, "num_cached_blocks", [medium])
    if not isinstance(num_blocks, int):
        raise Internal(f"the engine's answer to num_cached_blocks has type {type(num_blocks).__name__}; expected int")
    return await _cached_blocks(session, num_blocks, medium) if num_blocks else b""


async def _ask(session: EngineSession, utility: str, arguments: list[int]) -> Any:
    async with asyncio.timeout(_ANSWER_WITHIN):
        return await session.call_utility(utility, arguments)
