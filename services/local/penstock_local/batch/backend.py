"""Backends of a batch: the common interface, and its implementation for running servers."""

import asyncio
import itertools
import os
import ssl
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import httpx2

from penstock_common.errors import ConfigError, Unavailable
from penstock_local.rpc.connect import API_KEY, PUBLIC

_RETRIED = frozenset({408, 429, 502, 503, 504})
_ATTEMPTS = 8
_LONGEST_WAIT = 30.0
"""Maximum number of seconds between two attempts to send a request."""
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score", "/v1/rerank")
"""URLs that lines may use if the backend is a server. The server returns an error for a URL that it does not serve."""


class Answer(NamedTuple):
    """HTTP answer of a backend."""

    status: int
    body: bytes
    request_id: str


class Backend(Protocol):
    """Interface of a backend, which answers request bodies. Call ``submit`` and ``close`` from outside its event loop."""

    @property
    def urls(self) -> Collection[str]:
        """URLs that the backend serves."""

    @property
    def at_once(self) -> int:
        """Number of requests to send concurrently."""

    def submit(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> "Future[Any]":
        """Call ``work`` in the event loop's thread and run the coroutine that it returns."""

    async def post(self, url: str, body: bytes) -> Answer:
        """Return the answer to a request. Raises Unavailable if there is no answer."""

    def close(self) -> None:
        """Cancel running requests and close the backend."""


class Servers:
    """Backend that sends requests to the frontends of a cluster in turn. The backend retries requests that busy servers
    refuse.
    """

    urls = URLS

    def __init__(self, servers: Sequence[str]) -> None:
        """Create the client. Raises ConfigError if a server is not a URL."""
        for server in servers:
            if not server.startswith(("http://", "https://")):
                raise ConfigError(
                    f"--server is {server!r}; it must begin with http:// or https://, such as http://localhost:8000"
                )
        self.at_once = 64 * len(servers)
        self._bases = itertools.cycle([server.rstrip("/").removesuffix("/v1") for server in servers])
        self._names = ", ".join(servers)
        key = os.environ.get(API_KEY, "")
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx2.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(None, connect=10.0),
            limits=limits,
            verify=_authority(),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-batch", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> "Future[Any]":

        async def run() -> Any:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    async def post(self, url: str, body: bytes) -> Answer:
        """Send a request. If the server is busy, retry after the delay that the server's answer states."""
        trouble = ""
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            wait = min(_LONGEST_WAIT, 0.25 * 2.0**attempt)
            try:
                answer = await self._client.post(
                    next(self._bases) + url, content=body, headers={"content-type": "application/json"}
                )
            except httpx2.TransportError as e:
                trouble = str(e) or type(e).__name__
            else:
                if answer.status_code not in _RETRIED or last:
                    return Answer(answer.status_code, answer.content, answer.headers.get("x-request-id", ""))
                wait = _seconds(answer.headers.get("retry-after"), wait)
            if not last:
                await asyncio.sleep(wait)
        raise Unavailable(f"{self._names}: {trouble}", reason="NO_ANSWER")

    def close(self) -> None:
        self.submit(self._ended).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _ended(self) -> None:
        """Cancel all tasks, and return when they have ended."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()


def _seconds(text: str | None, otherwise: float) -> float:
    try:
        return min(_LONGEST_WAIT, max(0.0, float(text or "")))
    except ValueError:
        return otherwise


def _authority() -> ssl.SSLContext | bool:
    file = os.environ.get(f"{PUBLIC}_CA", "")
    if not file:
        return True
    try:
        return ssl.create_default_context(cafile=file)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"{PUBLIC}_CA is {file}, but this file cannot be read: {e}") from None
