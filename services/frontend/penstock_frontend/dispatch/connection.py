"""Connection to one engine address. The connection opens a new session whenever its session breaks."""

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
from penstock_frontend.interfaces import LossCause
from penstock_frontend.loop_yield import loop_time
from penstock_frontend.rpc.engine_session import EngineSession, SessionEnd
from penstock_frontend.rpc.media_transport import MediaTransport

_CHECKS_PER_SILENCE = 4
_MAX_RECONNECT_DELAY = 2.0


class ConnectionListener(Protocol):
    """Receives the events of a connection to an engine. All methods are called on the event loop."""

    def on_up(self, connection: "EngineConnection") -> None:
        """Handle an engine whose session is ready for requests."""

    def on_outputs(self, connection: "EngineConnection", outputs: EngineCoreOutputs) -> None:
        """Handle the outputs of one step of the engine. Raises EngineFaultError if the engine can no longer be trusted."""

    def on_draining(self, connection: "EngineConnection", time_left: float | None) -> None:
        """Handle a draining engine. The engine stops in ``time_left`` seconds. None means that the time is unknown."""

    def on_down(self, connection: "EngineConnection", end: SessionEnd) -> None:
        """Handle the end of the session with an engine. The engine has dropped the requests of this session."""

    def on_fate(self, connection: "EngineConnection", *, lives: bool) -> None:
        """Handle the answer to the question whether an engine with a broken session is alive.

        ``lives`` is True if the engine is alive and only the network connection failed. ``lives`` is False if the
        engine has died.
        """

    def on_start_wave(self, message: StartWave) -> None:
        """Handle the start message of an engine that waits until the other ranks of its data-parallel group start a
        wave.
        """

    def has_work(self, connection: "EngineConnection") -> bool:
        """Return True if the engine currently has requests of this frontend."""


class EngineConnection:
    """Keeps a session to one engine address open until ``close`` is called.

    ``status`` is the engine's status in the coordinator's view. The state in ``status`` is valid only for the run of
    the engine process whose incarnation ``status`` names.
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
        """Create the connection. ``on_lost`` is called when a session has ended, after the listener's ``on_down``."""
        self.address = address
        self.status: EngineStatus | None = None
        self.rank: int | None = None
        """Rank by which requests may name the engine. The rank is the engine's index in the coordinator's view, or the
        engine's position in the fixed list of engines.
        """
        self.ready: EngineReady | None = None
        self.stats = SchedulerStats()
        """Latest load report of the engine."""
        self.session: EngineSession | None = None
        """Session with the engine while the engine is ready. None if there is no such session."""
        self.draining = False
        self._config = config
        self._detection = config.detection
        self._lease_lost = False
        self._wedged = False
        self._in_doubt = False
        """True if the last session broke, and the frontend does not know yet whether the engine died."""
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
        """Name of the engine in messages: the engine's id, if the id is known, and the engine's address."""
        return f"{self.ready.engine_id} at {self.address}" if self.ready else f"at {self.address}"

    @property
    def closing(self) -> bool:
        """True if this frontend is closing the connection."""
        return self._reconnector.closing

    @property
    def group_rank(self) -> str | None:
        """Name of the engine as a rank of its data-parallel group.

        None if the engine is in no data-parallel group, or if the engine has not reported its group yet.
        """
        ready = self.ready
        if ready is None or ready.data_parallel_size < 2:
            return None
        return rank_name(ready.engine_id, ready.incarnation)

    @property
    def state(self) -> EngineState:
        """State of the engine, as far as this frontend knows the state."""
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
        """Record whether the coordinator's latest view lists the engine.

        If the view does not list the engine, there are two possible reasons. The engine has lost its lease, or the
        coordinator has restarted and does not know the engine yet.
        """
        if not named and not self._lease_lost and self.session is not None:
            get_logger().warning(
                "the coordinator does not list an engine; the frontend uses the engine until a probe of the engine fails",
                engine=self.name,
            )
        self._lease_lost = not named

    def heard(self) -> None:
        """Record that the engine has just shown that it is alive. The time without a message is counted from now."""
        self._watchdog.heard(loop_time())

    def presume_dead(self) -> None:
        """Treat the engine as dead, because the frontend stops connecting to it."""
        self._settle(lives=False)

    def _settle(self, *, lives: bool) -> None:
        if self._in_doubt:
            self._in_doubt = False
            self._listener.on_fate(self, lives=lives)

    async def close(self) -> None:
        """Close the connection permanently."""
        await self._reconnector.close()
        await self._task

    async def _serve(self) -> None:
        """Run one session with the engine, from the greeting until the session ends."""
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
        end = SessionEnd("the session was closed", LossCause.DISCONNECTED)
        try:
            ready = await session.open()
            if self._wedged and (load := await session.load(self._detection.probe_timeout)) and load.wedged:
                raise Unavailable(f"engine {self.name}: {wedged(load)}")
            self._up(session, ready)
            end = await self._run(session)
        except EngineFaultError as e:
            end = SessionEnd(str(e), LossCause.FAILED)
        except Exception as e:
            end = SessionEnd(f"{type(e).__name__}: {e}", LossCause.FAILED)
            raise
        finally:
            self._down(end)  # do this before closing, so that no further request is sent in this session
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
        self.stats = SchedulerStats()  # drop the statistics of an earlier run of the engine
        self._reconnector.established()
        get_logger().info(
            "engine ready", engine=self.name, max_model_len=ready.max_model_len, num_kv_blocks=ready.num_kv_blocks
        )
        self._listener.on_up(self)
        self._settle(lives=lives)

    def _down(self, end: SessionEnd) -> None:
        if self.session is None:
            return  # the session ended before the engine was ready
        self.session = None
        self._in_doubt = not end.by_engine
        self._listener.on_down(self, end)
        self._on_lost(self)

    async def _run(self, session: EngineSession) -> SessionEnd:
        """Process the engine's messages, and watch whether the engine works. Return the reason for the end of the
        session.
        """
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
        """Probe the engine whenever the watchdog has a reason to doubt it. Return why the engine counts as lost."""
        while True:
            await asyncio.sleep(self._detection.silence / _CHECKS_PER_SILENCE)
            session.drop_stale()
            watchdog, has_work = self._watchdog, self._listener.has_work(self)
            if not (doubt := watchdog.doubt(loop_time(), has_work=has_work, lease_lost=self._lease_lost)):
                continue
            answer = await session.load(self._detection.probe_timeout)
            if problem := watchdog.verdict(doubt, answer):
                self._wedged = answer is not None
                return SessionEnd(problem, LossCause.WEDGED if self._wedged else LossCause.UNRESPONSIVE)
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
