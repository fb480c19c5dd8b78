"""Oracle engine as a process, with the methods of ``Service``, control of its knobs, and a connection that tests can
cut.
"""

import signal
from typing import Any

import msgspec

from tests.fakes.engines.oracle_engine import control
from tests.fakes.network.ports import free_port
from tests.fakes.network.tcp_proxy import TcpProxy
from tests.fakes.processes import Service


class OracleProcess(Service):
    """Oracle engine process. ``reached_at``: address for frontends, which is the address of a proxy once it was
    started.
    """

    def __init__(
        self, engine_id: str, *, drain_timeout: float = 30.0, receiver_cache_bytes: int = -1, **knobs: Any
    ) -> None:
        """Args:
        knobs: Knobs that apply at every start.
        receiver_cache_bytes: Size of the media cache. Below 0: the engine accepts no media.
        """
        self.engine_id = engine_id
        self.control_port = free_port()
        super().__init__(
            "tests.fakes.engines.oracle_engine",
            engine_id=engine_id,
            control_port=self.control_port,
            drain_timeout=drain_timeout,
            receiver_cache_bytes=receiver_cache_bytes,
            knobs=msgspec.json.encode(knobs).decode(),
        )
        self.proxy = TcpProxy(self.port)

    @property
    def reached_at(self) -> str:
        """Address (host:port) of the proxy."""
        return f"127.0.0.1:{self.proxy.port}"

    async def set(self, **knobs: Any) -> dict[str, Any]:
        """Set knobs. Returns the engine's state."""
        return await control.call(self.control_port, set=knobs)

    async def until(self, **state: int) -> dict[str, Any]:
        """Wait until the state has at least these sizes, and return it. Raises ControlError after ``control.TIMEOUT``."""
        return await control.call(self.control_port, until=state)

    async def call(self, name: str) -> dict[str, Any]:
        """Call ``fail``, ``break`` or ``close``. See ``control.serve``."""
        return await control.call(self.control_port, call=name)

    async def state(self) -> dict[str, Any]:
        """Return the state. See ``OracleEngine.state``."""
        return await control.call(self.control_port)

    def stop_running(self) -> None:
        """Send SIGSTOP to the process."""
        self.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT to the process."""
        self.send_signal(signal.SIGCONT)

    async def restart(self) -> None:
        """Start a new incarnation on the same port, and wait until it serves."""
        if self.alive:
            await self.kill()
        await self.start()
        await self.serving()

    async def __aenter__(self) -> "OracleProcess":
        await self.proxy.start()
        await self.start()
        return self

    async def __aexit__(self, *_: Any) -> None:
        if self.alive:
            await self.kill()
        await self.proxy.close()
        self.remove_log()
