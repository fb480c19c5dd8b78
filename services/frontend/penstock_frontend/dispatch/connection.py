"""One engine's address, and the session to it, renewed whenever it breaks."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from penstock_common.errors import Unavailable, quoted
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.credentials import ClientCredentials
from penstock_common.rpc.reconnect import Reconnector, refuses
from penstock_common.types.cluster import EngineState, EngineStatus
from penstock_common.types.data_parallel import StartWave, rank_name
from penstock_common.types.outputs import EngineCoreOutputs, EngineReady, SchedulerStats
from penstock_frontend.config import FrontendConfig
from penstock_frontend.dispatch.journal import EngineFaultError
from penstock_frontend.dispatch.watchdog import Watchdog, wedged
from penstock_frontend.loop_yield import loop_time
from penstock_frontend.rpc.engine_session import EngineSession, SessionEnd
from penstock_frontend.rpc.media_transport import MediaTransport

_CHECKS_PER_SILENCE = 4
_MAX_RECONNECT_DELAY = 2.0


class ConnectionListener(Protocol):
    """Who is told what happens on a connection. All calls come on the event loop."""

    def on_up(self, connection: "EngineConnection") -> None:
        """The engine is ready."""

    def on_outputs(self, connection: "EngineConnection", outputs: EngineCoreOutputs) -> None:
        """A step is done. Raises EngineFaultError when the engine cannot be trusted any more."""

    def on_draining(self, connection: "EngineConnection", time_left: float | None) -> None:
        """The engine takes no more requests, and ends what it has in ``time_left`` seconds; None: it does not say when."""

    def on_down(self, connection: "EngineConnection", end: SessionEnd) -> None:
        """The session is over, and the engine has none of its requests any more."""

    def on_fate(self, connection: "EngineConnection", *, lives: bool) -> None:
        """Of an engine whose session ended, and not by it, is known now whether it lives: the network was at fault then."""

    def on_start_wave(self, message: StartWave) -> None:
        """The engine, a rank of a data-parallel group, waits for the others."""

    def has_work(self, connection: "EngineConnection") -> bool:
        """Whether the engine has requests of this frontend."""


class EngineConnection:
    """Keeps a session to one address until ``close``.

    ``status`` is what the coordinator says of the engine; its state counts only for the incarnation it speaks of.
    """

    def __init__(
        self,
        address: str,
        config: FrontendConfig,
        *,
        incarnation: str,
        listener: ConnectionListener,
        on_lost: Callable[["EngineConnection"], None],
        credentials: ClientCredentials,
        media: MediaTransport,
    ) -> None:
        """``on_lost``: called when a session is over, after the listener has heard of it."""
        self.address = address
        self.status: EngineStatus | None = None
        self.rank: int | None = None
        """Under which requests may name the engine: the coordinator's index of it, or its place in the list of engines."""
        self.ready: EngineReady | None = None
        self.stats = SchedulerStats()
        """What the engine last said of its load."""
        self.session: EngineSession | None = None
        """The session while the engine is ready, else None."""
        self.draining = False
        self._config = config
        self._detection = config.detection
        self._lease_lost = False
        self._wedged = False
        self._in_doubt = False
        """Whether the last session ended, and not by the engine, of which nothing has been heard since."""
        self._watchdog = Watchdog(config.detection, loop_time())
        self._incarnation = incarnation
        self._listener = listener
        self._on_lost = on_lost
        self._credentials = credentials
        self._media = media
        self._reconnector = Reconnector(
            self._serve, peer=f"engine at {address}", max_delay=_MAX_RECONNECT_DELAY, logs_sessions=False
        )
        self._task = asyncio.create_task(self._reconnector.run(), name=f"engine {address}")

    @property
    def name(self) -> str:
        """How to call the engine in messages: its id, once it is known, and its address."""
        return f"{self.ready.engine_id} at {self.address}" if self.ready else f"at {self.address}"

    @property
    def closing(self) -> bool:
        """Whether this frontend ends the connection itself."""
        return self._reconnector.closing

    @property
    def group_rank(self) -> str | None:
        """The rank of a data-parallel group that the engine is; None where it computes alone, or nobody knows yet."""
        ready = self.ready
        if ready is None or ready.data_parallel_size < 2:
            return None
        return rank_name(ready.engine_id, ready.incarnation)

    @property
    def state(self) -> EngineState:
        """What the engine does, as far as this frontend knows."""
        if self.ready is None:
            return EngineState.LOADING
        if self.session is None:
            return EngineState.DEAD
        if self.draining:
            return EngineState.DRAINING
        if self.stats.wedged:
            return EngineState.WEDGED
        if self.status is not None and self.status.incarnation == self.ready.incarnation:
            return self.status.state
        return EngineState.SERVING

    def in_view(self, named: bool) -> None:
        """Whether the coordinator's view names the engine: one that it names no more has lost its lease, or the coordinator has
        started anew and has not heard of the engine yet.
        """
        if not named and not self._lease_lost and self.session is not None:
            get_logger().warning("the coordinator does not list the engine; its connection holds", engine=self.name)
        self._lease_lost = not named

    def heard(self) -> None:
        """The engine has not been silent until now."""
        self._watchdog.heard(loop_time())

    def presume_dead(self) -> None:
        """Nobody will hear of the engine any more."""
        self._settle(lives=False)

    def _settle(self, *, lives: bool) -> None:
        if self._in_doubt:
            self._in_doubt = False
            self._listener.on_fate(self, lives=lives)

    async def close(self) -> None:
        """End the session for good."""
        await self._reconnector.close()
        await self._task

    async def _serve(self) -> None:
        """One session, from greeting to end."""
        if self._in_doubt and await refuses(self.address, within=self._detection.probe_timeout):
            self._settle(lives=False)
        session = EngineSession(
            self.address,
            frontend_id=self._config.name,
            incarnation=self._incarnation,
            on_outputs=self._on_outputs,
            on_draining=self._on_draining,
            on_start_wave=self._on_start_wave,
            credentials=self._credentials,
            media=self._media,
            max_message_bytes=self._config.server.max_message_bytes,
            follows_cache=self._config.routing.policy == "prefix_aware",
        )
        end = SessionEnd("the session was closed", by_engine=False)
        try:
            ready = await session.open()
            if self._wedged and (load := await session.load(self._detection.probe_timeout)) and load.wedged:
                raise Unavailable(f"engine {self.name}: {wedged(load)}")
            self._up(session, ready)
            end = await self._run(session)
        except EngineFaultError as e:
            end = SessionEnd(str(e), by_engine=True)
        except Exception as e:
            end = SessionEnd(f"{type(e).__name__}: {e}", by_engine=True)
            raise
        finally:
            self._down(end)  # first of all: no request may be sent on it any more
            await session.close(end.why)

    def _up(self, session: EngineSession, ready: EngineReady) -> None:
        if ready.model != self._config.model.name:
            raise Unavailable(
                f"engine {ready.engine_id} at {self.address} serves model {quoted(ready.model)}; "
                f"this frontend serves {quoted(self._config.model.name)}"
            )
        lives = self.ready is not None and self.ready.incarnation == ready.incarnation
        self.ready, self.session, self.draining = ready, session, False
        self._wedged = False
        self.heard()
        self.stats = SchedulerStats()  # an earlier incarnation's mean nothing
        self._reconnector.established()
        get_logger().info(
            "engine ready", engine=self.name, max_model_len=ready.max_model_len, num_kv_blocks=ready.num_kv_blocks
        )
        self._listener.on_up(self)
        self._settle(lives=lives)

    def _down(self, end: SessionEnd) -> None:
        if self.session is None:
            return  # it never was up
        self.session = None
        self._in_doubt = not end.by_engine
        if self.draining:
            get_logger().info("engine left", engine=self.name, reason=end.why)
        elif not self.closing:
            get_logger().warning("engine lost", engine=self.name, reason=end.why)
        self._listener.on_down(self, end)
        self._on_lost(self)

    async def _run(self, session: EngineSession) -> SessionEnd:
        """Hand on what the engine says, and watch it. Returns why the session is over."""
        running = asyncio.create_task(session.run())
        watching = asyncio.create_task(self._watch(session))
        try:
            await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else watching.result()
        finally:
            running.cancel()
            watching.cancel()
            await asyncio.gather(running, watching, return_exceptions=True)

    async def _watch(self, session: EngineSession) -> SessionEnd:
        """Ask the engine how it is whenever there is reason to. Returns why it is lost."""
        while True:
            await asyncio.sleep(self._detection.silence / _CHECKS_PER_SILENCE)
            session.drop_stale()
            watchdog, has_work = self._watchdog, self._listener.has_work(self)
            if not (doubt := watchdog.doubt(loop_time(), has_work=has_work, lease_lost=self._lease_lost)):
                continue
            answer = await session.load(self._detection.probe_timeout)
            if problem := watchdog.verdict(doubt, answer):
                self._wedged = answer is not None
                return SessionEnd(problem, by_engine=self._wedged)
            self.heard()

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        self.heard()
        self._listener.on_outputs(self, outputs)

    def _on_start_wave(self, message: StartWave) -> None:
        if (rank := self.group_rank) is not None:
            self._listener.on_start_wave(msgspec.structs.replace(message, engine=rank))

    def _on_draining(self, time_left: float | None) -> None:
        self.draining = True
        get_logger().info("engine draining", engine=self.name, time_left=time_left)
        self._listener.on_draining(self, time_left)
