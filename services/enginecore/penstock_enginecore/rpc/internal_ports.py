"""Internal gRPC ports of an engine, for other engines and nodes: the shared secret of the ports, and the thread that
serves a port.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from penstock_common.rpc.call_authorization import PortSecret
from penstock_common.security.shared_secret import check_internal_port, load_secret
from penstock_enginecore.config import EngineCoreConfig


def own_secret(config: EngineCoreConfig, purpose: str) -> PortSecret | None:
    """Return the secret of the port ``purpose``, or None if no secret is configured. Raises ConfigError if the secret
    cannot be read.
    """
    secret = load_secret(config.parallel.secret_file)
    return None if secret is None else PortSecret(secret, purpose)


def checked_secret(config: EngineCoreConfig, purpose: str) -> PortSecret | None:
    """Return the secret of the port ``purpose``, which will listen on ``server.host``, or None if no secret is
    configured.

    Raises ConfigError if the secret cannot be read. Also raises ConfigError if other machines can reach the port, but
    neither a secret nor client certificates authenticate callers.
    """
    secret = own_secret(config, purpose)
    check_internal_port(
        config.server.host,
        field="server.host",
        has_secret=secret is not None,
        tls=bool(config.server.tls.ca),
        tls_field="server.tls.ca",
    )
    return secret


# An asyncio event loop in a separate thread.

T = TypeVar("T")

_ENDING = 2.0
"""Time in seconds within which tasks must end when their event loop stops."""


class LoopThread:
    """An asyncio event loop in a daemon thread. Any other thread may call the methods. Pending work of the loop does
    not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)

    @property
    def running(self) -> bool:
        """Whether the thread has been started and has not been stopped."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread and its event loop."""
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, and wait for the coroutine's result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        """Cancel running tasks, then stop the loop and the thread. The thread must be running. After this call, no
        object may use the loop.
        """
        self.run(_end_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_ENDING)
    await asyncio.get_running_loop().shutdown_asyncgens()
