"""Reconnection of a stream to a server that may be away, with backoff."""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable

import grpc

from penstock_common.errors import RequestFailed
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.credentials import advised

# How long to wait before the next attempt.


class Backoff:
    """Delays in seconds that double from ``initial`` up to ``maximum``, each shortened by up to a half at random.

    The randomness keeps the clients of a restarted server from coming back all at once.
    """

    def __init__(self, *, initial: float, maximum: float, rng: random.Random | None = None) -> None:
        self.maximum = maximum
        self._initial = initial
        self._next = initial
        self._rng = rng or random.Random()

    def next(self) -> float:
        """The delay before the attempt that comes now."""
        delay = min(self._next, self.maximum)
        self._next = delay * 2
        return delay * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start from the beginning: the last attempt was a success."""
        self._next = self._initial


# Whether anybody listens at an address.


async def refuses(address: str, *, within: float) -> bool:
    """Whether the host of an address, ``host:port``, says that nobody listens at the port. False also where it says nothing for
    ``within`` seconds, cannot be reached or is not known: that tells of the network, not of who listens.
    """
    return await asyncio.to_thread(_refuses, address, within)


def _refuses(address: str, within: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=within, all_errors=True).close()
    except ExceptionGroup as e:  # one for each address of the host
        return all(isinstance(error, ConnectionRefusedError) for error in e.exceptions)
    except (OSError, ValueError):
        return False
    return False


INITIAL_DELAY = 0.05


class Reconnector:
    """Runs ``session`` again and again until ``close``; whatever a session ends with is logged and never raised.

    ``session`` opens a stream, calls ``established`` when the peer has accepted it, and returns or raises when the stream is
    over. Delays grow up to ``max_delay`` seconds and start anew after a session that held at least as long.
    """

    def __init__(
        self, session: Callable[[], Awaitable[None]], *, peer: str, max_delay: float, logs_sessions: bool = True
    ) -> None:
        """``logs_sessions``: log when a session is established and when it ends. If False, ``session`` logs both itself, and
        only peers that cannot be reached at all are logged here.
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
        """Whether a session is established now."""
        return self._established_at is not None

    @property
    def closing(self) -> bool:
        """Whether ``close`` has been called."""
        return self._closing.is_set()

    async def run(self) -> None:
        """Connect, and connect again, until ``close``."""
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
        """End ``run``. A session that runs may end by itself for ``grace`` seconds, then it is cancelled. Idempotent."""
        self._closing.set()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + grace)
        await self._over.wait()

    def established(self) -> None:
        """To be called by the session when the peer has accepted it."""
        self._established_at = asyncio.get_running_loop().time()
        self._away = False
        if self._logs_sessions:
            get_logger().info(f"connected to the {self._peer}")

    def limit_delay(self, seconds: float) -> None:
        """Wait no longer than this between attempts from now on."""
        self._backoff.maximum = min(self._backoff.maximum, seconds)

    async def _attempt(self) -> str:
        """One session; returns why it ended."""
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
            # A defect on this side must not take the service down with it: the peer is not needed for serving.
            get_logger().error(f"session with the {self._peer} failed", exc_info=e)
            return f"{type(e).__name__}: {e}"
        finally:
            self._limit = None
        return "the stream ended"

    def _held_for(self) -> float:
        """Seconds that the session was established; 0 if it never was."""
        return 0.0 if self._established_at is None else asyncio.get_running_loop().time() - self._established_at

    def _report(self, problem: str, *, was_established: bool) -> None:
        """Once per absence: a peer that stays away is no news."""
        if not self._away and (self._logs_sessions or not was_established):
            get_logger().warning(f"no connection to the {self._peer}; trying again", problem=problem)
        self._away = True


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Return when the event is set or the time is over, whichever comes first."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
