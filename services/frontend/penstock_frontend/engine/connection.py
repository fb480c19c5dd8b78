"""One engine's address, and the session to it, renewed whenever it breaks."""

import asyncio
from typing import Protocol

from penstock_common.errors import Unavailable
from penstock_common.logging import get_logger
from penstock_common.rpc.credentials import NO_TLS, ClientCredentials
from penstock_common.rpc.reconnect import Reconnector
from penstock_common.types.cluster import EngineState, EngineStatus
from penstock_common.types.outputs import EngineCoreOutputs, EngineReady, SchedulerStats
from penstock_frontend.processing.output import EngineFaultError
from penstock_frontend.rpc.engine_session import EngineSession

_MAX_RECONNECT_DELAY = 2.0


class ConnectionListener(Protocol):
    """Who is told what happens on a connection. All calls come on the event loop."""

    def on_up(self, connection: "EngineConnection") -> None:
        """The engine is ready."""

    def on_outputs(self, connection: "EngineConnection", outputs: EngineCoreOutputs) -> None:
        """A step is done. Raises EngineFaultError when the engine cannot be trusted any more."""

    def on_draining(self, connection: "EngineConnection") -> None:
        """The engine takes no new requests."""

    def on_down(self, connection: "EngineConnection", reason: str) -> None:
        """The session is over, and with it every request on it."""


class EngineConnection:
    """Keeps a session to one address until ``close``.

    ``status`` is what the coordinator says of the engine; its state counts only for the incarnation it speaks of.
    """

    def __init__(
        self,
        address: str,
        *,
        model: str,
        frontend_id: str,
        incarnation: str,
        listener: ConnectionListener,
        credentials: ClientCredentials = NO_TLS,
    ) -> None:
        self.address = address
        self.status: EngineStatus | None = None
        self.ready: EngineReady | None = None
        self.stats = SchedulerStats()
        """What the engine last said of its load."""
        self.session: EngineSession | None = None
        """The session while the engine is ready, else None."""
        self.draining = False
        self._model = model
        self._frontend_id = frontend_id
        self._incarnation = incarnation
        self._listener = listener
        self._credentials = credentials
        self._reconnector = Reconnector(self._serve, peer=f"engine at {address}", max_delay=_MAX_RECONNECT_DELAY)
        self._task = asyncio.create_task(self._reconnector.run(), name=f"engine {address}")

    @property
    def name(self) -> str:
        """How to call the engine in messages: its id, once it is known, and its address."""
        return f"{self.ready.engine_id} at {self.address}" if self.ready else f"at {self.address}"

    @property
    def state(self) -> EngineState:
        """What the engine does, as far as this frontend knows."""
        if self.ready is None:
            return EngineState.LOADING
        if self.session is None:
            return EngineState.DEAD
        if self.draining:
            return EngineState.DRAINING
        if self.status is not None and self.status.incarnation == self.ready.incarnation:
            return self.status.state
        return EngineState.SERVING

    @property
    def rank(self) -> int:
        """The coordinator's index of the engine, or else its own data-parallel rank."""
        if self.status is not None:
            return self.status.index
        return self.ready.data_parallel_rank if self.ready else 0

    async def close(self) -> None:
        """End the session for good."""
        await self._reconnector.close()
        await self._task

    async def _serve(self) -> None:
        """One session, from greeting to end."""
        session = EngineSession(
            self.address,
            frontend_id=self._frontend_id,
            incarnation=self._incarnation,
            on_outputs=lambda outputs: self._listener.on_outputs(self, outputs),
            on_draining=self._on_draining,
            credentials=self._credentials,
        )
        reason = "the session was closed"
        try:
            self._up(session, await session.open())
            reason = await session.run()
        except EngineFaultError as e:
            reason = str(e)
        except Exception as e:
            reason = f"{type(e).__name__}: {e}"
            raise
        finally:
            self._down(reason)  # first of all: no request may be sent on it any more
            await session.close(reason)

    def _up(self, session: EngineSession, ready: EngineReady) -> None:
        if ready.model != self._model:
            raise Unavailable(
                f"engine {ready.engine_id} at {self.address} serves model {ready.model!r}; "
                f"this frontend serves {self._model!r}"
            )
        self.ready, self.session, self.draining = ready, session, False
        self.stats = SchedulerStats()  # an earlier incarnation's mean nothing
        self._reconnector.established()
        get_logger().info(
            "engine ready", engine=self.name, max_model_len=ready.max_model_len, num_kv_blocks=ready.num_kv_blocks
        )
        self._listener.on_up(self)

    def _down(self, reason: str) -> None:
        if self.session is None:
            return  # it never was up
        self.session = None
        if not self._reconnector.closing:
            get_logger().warning("engine gone", engine=self.name, reason=reason)
        self._listener.on_down(self, reason)

    def _on_draining(self) -> None:
        self.draining = True
        get_logger().info("engine draining", engine=self.name)
        self._listener.on_draining(self)
