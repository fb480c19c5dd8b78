"""Fetching files of media from other hosts: what is dialled is what was checked, and nothing is sent but the request."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from urllib.parse import urljoin

import h11

from penstock_common.errors import ConfigError, ResourceExhausted
from penstock_frontend.config.media import MediaConfig
from penstock_frontend.processing.media import refusals
from penstock_frontend.processing.media.sources import Target, check_domain, is_allowed_address, read_url

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""All addresses of a host, as text. Raises OSError."""
Counted = Callable[[int], None]
"""Told of so many more bytes that are in memory. Raises ResourceExhausted."""

_READ = 64 * 1024
_LONGEST_HEAD = 32 * 1024
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_FOR_NOW = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which another try may bring the file."""
_RESOLVING_THREADS = 8


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
        try:
            self._tls = ssl.create_default_context(cafile=config.ca or None)
        except OSError as e:  # SSLError is one
            raise ConfigError(f"media.ca: {config.ca} has no certificates that can be read: {e}") from None
        self._room = asyncio.Semaphore(config.max_fetches)
        self.num_waiting = 0
        self._closed = False

    def close(self) -> None:
        """Look up no more names."""
        self._closed = True
        self._threads.shutdown(wait=False)

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
        reader, writer = await self._connect(target, field)
        try:
            return await _Exchange(reader, writer, field, self._config.max_bytes, counted).get(target, self.check)
        except (OSError, h11.RemoteProtocolError) as e:
            what = (
                "its host breaks the protocol" if isinstance(e, h11.RemoteProtocolError) else "the connection was lost"
            )
            raise refusals.fetch_failed(field, what, for_now=isinstance(e, OSError)) from None
        finally:
            writer.transport.abort()

    async def _connect(self, target: Target, field: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls = self._tls if target.is_tls else None
        name = target.host if target.is_tls else None
        for address in await self._addresses(target, field):
            try:
                return await asyncio.open_connection(
                    address, target.port, ssl=tls, server_hostname=name, limit=_READ, flags=socket.AI_NUMERICHOST
                )
            except ssl.SSLCertVerificationError:
                raise refusals.fetch_failed(field, "its host's certificate is not trusted", for_now=False) from None
            except OSError:
                continue
        raise refusals.fetch_failed(field, "its host takes no connections", for_now=True)

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
            raise refusals.not_allowed(field, f"is on {target.authority!r}, whose addresses are not public")
        return addresses

    async def _resolve(self, host: str, port: int) -> list[str]:
        if self._closed:
            raise refusals.shutting_down()
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Exchange:
    """One request and its answer."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        field: str,
        max_bytes: int,
        counted: Counted,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._field = field
        self._max_bytes = max_bytes
        self._counted = counted
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)

    async def get(self, target: Target, check: Callable[..., Target]) -> bytes | Target:
        """The file, or where it is instead, which is checked. Raises OSError, h11.RemoteProtocolError, RequestFailed."""
        headers = [
            ("Host", target.authority),
            ("User-Agent", "penstock"),
            ("Accept", "*/*"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        self._send(h11.Request(method="GET", target=target.path, headers=headers))
        self._send(h11.EndOfMessage())
        await self._writer.drain()
        while isinstance(event := await self._next(), h11.InformationalResponse):
            continue
        if not isinstance(event, h11.Response):
            raise ConnectionResetError
        answered = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
        if event.status_code in _REDIRECTS:
            return check(self._joined(target, answered.get("location", "")), field=self._field)
        if event.status_code != HTTPStatus.OK:
            why = f"its host answered with status {event.status_code}"
            raise refusals.fetch_failed(self._field, why, for_now=event.status_code in _FOR_NOW)
        if answered.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise refusals.fetch_failed(self._field, "its host encodes the content, unasked", for_now=False)
        return await self._body(int(answered.get("content-length", 0)))

    def _send(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            self._writer.write(data)

    def _joined(self, target: Target, location: str) -> str:
        try:
            return urljoin(target.url, location)
        except ValueError:
            raise refusals.fetch_failed(self._field, "it redirects to what is no URL", for_now=False) from None

    async def _body(self, announced: int) -> bytes:
        self._check_size(announced)
        if announced:
            self._counted(announced)
        pieces: list[bytes] = []
        size = 0
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise ConnectionResetError
            self._check_size(size := size + len(event.data))
            if not announced:
                self._counted(len(event.data))
            pieces.append(bytes(event.data))
        if not size:
            raise refusals.fetch_failed(self._field, "it is empty", for_now=False)
        return b"".join(pieces)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise refusals.too_large(self._field, f"has {size} bytes or more", "media.max_bytes", self._max_bytes)

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ))
        return event
