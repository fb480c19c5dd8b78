"""Reconnection of a stream, with increasing delays while the server is unreachable."""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable

import grpc

from penstock_common.errors import RequestFailed
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.credentials import advised


class Backoff:
    """Generator of delays in seconds, which double from ``initial`` up to ``maximum``.

    Each delay is shortened at random by up to half, so that the clients of a restarted server do not all reconnect at
    the same time.
    """

    def __init__(self, *, initial: float, maximum: float, rng: random.Random | None = None) -> None:
        self.maximum = maximum
        self._initial = initial
        self._next = initial
        self._rng = rng or random.Random()

    def next(self) -> float:
        """Return the delay before the next attempt."""
        delay = min(self._next, self.maximum)
        self._next = delay * 2
        return delay * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Restart at the initial delay, after an attempt succeeded."""
        self._next = self._initial


async def refuses(address: str, *, within: float) -> bool:
    """Return whether the host of ``address`` refuses connections to the port.

    Returns False if the host is unknown or unreachable, or does not answer for ``within`` seconds. The cause may then
    be the network, so a server may still listen on the port.
    """
    return await asyncio.to_thread(_refuses, address, within)


def _refuses(address: str, within: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=within, all_errors=True).close()
    except ExceptionGroup as e:  # the exception group has one exception for each address of the host
        return all(isinstance(error, ConnectionRefusedError) for error in e.exceptions)
    except (OSError, ValueError):
        return False
    return False


INITIAL_DELAY = 0.05


class Reconnector:
    """Runner that calls ``session`` repeatedly until ``close``. Exceptions of a session are logged and never raised.

    ``session`` opens a stream, calls ``established`` when the peer has accepted the stream, and returns or raises when
    the stream ends. The delay between attempts grows up to ``max_delay`` seconds. The delay is reset to the initial
    delay after a session that lasted at least as long as the current delay.
    """

    def __init__(
        self, session: Callable[[], Awaitable[None]], *, peer: str, max_delay: float, logs_sessions: bool = True
    ) -> None:
        """Create a reconnector that is not running yet.

        ``logs_sessions`` is whether the reconnector logs the start and end of sessions. If False, ``session`` logs
        both, and the reconnector logs only unreachable peers.
        """
        self._logs_sessions = logs_sessions
        self._session = session
        self._peer = peer
        self._backoff = Backoff(initial=min(INITIAL_DELAY, max_delay), maximum=max_delay)
        self._closing = asyncio.Event()
        self._over = asyncio.Event()
        self._over.set()
        self._limit: asyncio.Timeout | None = None
        self._established_at: float | None = None
        self._away = False

    @property
    def connected(self) -> bool:
        """Return whether a session is established now."""
        return self._established_at is not None

    @property
    def closing(self) -> bool:
        """Return whether ``close`` has been called."""
        return self._closing.is_set()

    async def run(self) -> None:
        """Connect and reconnect until ``close``."""
        self._over.clear()
        try:
            while not self.closing:
                problem = await self._attempt()
                if self._held_for() >= self._backoff.maximum:
                    self._backoff.reset()
                was_established, self._established_at = self.connected, None
                if not self.closing:
                    self._report(problem, was_established=was_established)
                    await wait_at_most(self._closing, self._backoff.next())
        finally:
            self._established_at = None
            self._over.set()

    async def close(self, *, grace: float = 0.0) -> None:
        """End ``run``. A running session has ``grace`` seconds to end by itself; after that, the session is cancelled.
        Idempotent.
        """
        self._closing.set()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + grace)
        await self._over.wait()

    def established(self) -> None:
        """Record that the peer has accepted the session. ``session`` must call this method."""
        self._established_at = asyncio.get_running_loop().time()
        self._away = False
        if self._logs_sessions:
            get_logger().info(f"connected to the {self._peer}")

    def limit_delay(self, seconds: float) -> None:
        """Set the maximum delay between later attempts to ``seconds``."""
        self._backoff.maximum = min(self._backoff.maximum, seconds)

    async def _attempt(self) -> str:
        """Run one session and return the reason for its end."""
        try:
            async with asyncio.timeout(None) as self._limit:
                await self._session()
        except grpc.aio.AioRpcError as e:
            return f"{e.code().name}: {advised(e.details() or '')}"
        except RequestFailed as e:
            return f"{e.code}: {advised(e.message)}"
        except TimeoutError:
            return "no answer"
        except Exception as e:
            # A bug in a session must not end the service, because the service can run without this peer.
            get_logger().error(f"session with the {self._peer} failed", exc_info=e)
            return f"{type(e).__name__}: {e}"
        finally:
            self._limit = None
        return "the stream ended"

    def _held_for(self) -> float:
        """Return for how many seconds the session was established, or 0 if it was never established."""
        return 0.0 if self._established_at is None else asyncio.get_running_loop().time() - self._established_at

    def _report(self, problem: str, *, was_established: bool) -> None:
        """Log the problem, but only once while the peer is unreachable."""
        if not self._away and (self._logs_sessions or not was_established):
            get_logger().warning(f"no connection to the {self._peer}; retrying", problem=problem)
        self._away = True


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Return when the event is set or ``seconds`` have passed, whichever comes first."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
