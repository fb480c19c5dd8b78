"""Fetching files of media from other hosts: what is dialled is what was checked, and nothing is sent but the request."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock_common.errors import ConfigError, ResourceExhausted, quoted
from penstock_frontend.config.media import MediaConfig
from penstock_frontend.loop_yield import Pace
from penstock_frontend.processing.media import refusals
from penstock_frontend.processing.media.exchange import Counted, Exchange
from penstock_frontend.processing.media.sources import Target, check_domain, is_allowed_address, read_url
from penstock_frontend.processing.media.wire import BYTES_PER_TURN, Wire, connect

T = TypeVar("T")

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""All addresses of a host, as text. Raises OSError."""

_RESOLVING_THREADS = 8
_HANDSHAKE_THREADS = 2
"""OpenSSL computes without Python's lock, so that the event loop goes on beside these threads."""


class Fetcher:
    """Fetches files by URL. Names are resolved once, all their addresses are checked, and one of these is dialled.

    There are no proxies, cookies, credentials, content codings or connections that are used again.
    """

    def __init__(self, config: MediaConfig, resolver: Resolver | None = None) -> None:
        """``resolver``: in place of the system's. Raises ConfigError."""
        self._config = config
        self._private = config.private_networks
        self._resolver = resolver or self._resolve
        self._threads = ThreadPoolExecutor(_RESOLVING_THREADS, thread_name_prefix="media-names")
        self._handshakes = ThreadPoolExecutor(_HANDSHAKE_THREADS, thread_name_prefix="media-tls")
        self._pace = Pace(BYTES_PER_TURN)
        try:
            self._tls = ssl.create_default_context(cafile=config.ca or None)
        except OSError as e:  # SSLError is one
            raise ConfigError(f"media.ca: {config.ca} has no certificates that can be read: {e}") from None
        self._tls.options |= ssl.OP_NO_RENEGOTIATION
        self._room = asyncio.Semaphore(config.max_fetches)
        self.num_waiting = 0
        self._closed = False

    def close(self) -> None:
        """Look up no more names, and begin no more TLS handshakes."""
        self._closed = True
        self._threads.shutdown(wait=False)
        self._handshakes.shutdown(wait=False)

    def check(self, url: str, *, field: str) -> Target:
        """What the URL asks for. Raises PermissionDenied or InvalidArgument where it may not be fetched, before anything is."""
        target = read_url(url, field=field)
        check_domain(target, self._config.allowed_domains, field=field)
        return target

    async def fetch(self, url: str, *, field: str, counted: Counted = lambda _: None) -> bytes:
        """The file. Raises as ``check``, and RequestFailed with MEDIA_FETCH_FAILED or MEDIA_TOO_LARGE, ResourceExhausted."""
        target = self.check(url, field=field)
        if self.num_waiting >= self._config.max_queued:
            raise ResourceExhausted(
                f"{self.num_waiting} URLs wait to be fetched; media.max_queued is {self._config.max_queued}",
                field=field,
                retry_after=1.0,
            )
        self.num_waiting += 1
        try:
            await self._room.acquire()
        finally:
            self.num_waiting -= 1
        try:
            async with asyncio.timeout(self._config.fetch_timeout):
                return await self._follow(target, field, counted)
        except TimeoutError:
            raise refusals.fetch_failed(
                field, f"it took more than media.fetch_timeout, {self._config.fetch_timeout:g} s", for_now=True
            ) from None
        finally:
            self._room.release()

    async def _follow(self, target: Target, field: str, counted: Counted) -> bytes:
        for _ in range(self._config.max_redirects + 1):
            found = await self._get(target, field, counted)
            if isinstance(found, bytes):
                return found
            if target.is_tls and not found.is_tls:
                raise refusals.not_allowed(field, "leads from https: to http:")
            target = found
        raise refusals.fetch_failed(
            field, f"it redirects more than media.max_redirects, {self._config.max_redirects} times", for_now=False
        )

    async def _get(self, target: Target, field: str, counted: Counted) -> bytes | Target:
        """The file, or where it is instead."""
        wire = await self._connect(target, field)
        try:
            return await Exchange(wire, field, self._config.max_bytes, counted).get(target, self.check)
        except OSError:
            raise refusals.fetch_failed(field, "the connection was lost", for_now=True) from None
        finally:
            wire.close()

    async def _connect(self, target: Target, field: str) -> Wire:
        for address in await self._addresses(target, field):
            try:
                return await self._dial(address, target)
            except ssl.SSLCertVerificationError:
                raise refusals.fetch_failed(field, "its host's certificate is not trusted", for_now=False) from None
            except OSError:
                continue
        raise refusals.fetch_failed(field, "its host takes no connections", for_now=True)

    async def _dial(self, address: str, target: Target) -> Wire:
        wire = await connect(address, target.port, self._pace)
        try:
            if target.is_tls:
                await wire.start_tls(self._tls, target.host, lambda step: self._run(self._handshakes, step))
        except BaseException:
            wire.close()
            raise
        return wire

    async def _addresses(self, target: Target, field: str) -> Sequence[str]:
        """All of the host's. Raises PermissionDenied where one of them is not public: which one it is, is not told."""
        if target.address is not None:
            addresses: Sequence[str] = [target.host]
        else:
            try:
                addresses = await self._resolver(target.host, target.port)
            except (OSError, UnicodeError):
                addresses = []
            if not addresses:
                raise refusals.fetch_failed(field, "its host has no address", for_now=True)
        if not all(is_allowed_address(address, self._private) for address in addresses):
            raise refusals.not_allowed(field, f"is on {quoted(target.authority)}, whose addresses are not public")
        return addresses

    async def _resolve(self, host: str, port: int) -> list[str]:
        found = await self._run(self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def _run(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        if self._closed:
            raise refusals.shutting_down()
        return await asyncio.get_running_loop().run_in_executor(threads, work)
