"""HTTP client that fetches media files without blocking the event loop, and connects only to allowed addresses."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import urljoin

import httptools

from penstock_common.errors import ConfigError, ResourceExhausted, quoted
from penstock_frontend.config.media import MediaConfig
from penstock_frontend.loop_yield import Pace
from penstock_frontend.processing.media import sources
from penstock_frontend.processing.media.sources import Target, check_domain, is_allowed_address, read_url

# The class below parses the HTTP response of a media host while the response arrives.

_MOST_HEADERS = 256
_MOST_INFORMATIONAL = 16
_FRAMING = 64 * 1024
"""Maximum number of bytes that a response may have in addition to its body. The additional bytes are headers,
informational responses, chunk sizes, chunk extensions, trailers, and TLS overhead.
"""
_FRAMING_SHARE = 4
"""Divisor of the size of the body. The quotient is added to the limit ``_FRAMING``. Responses whose chunks have at least
24 bytes stay within the limit.
"""


class BadAnswer(Exception):  # noqa: N818 - it says what is wrong with the answer
    """Error for a media host that violates the HTTP protocol or a limit. The text of the error follows "could not be
    fetched: " in messages.
    """


class Answer:
    """Final response to one GET request. Informational responses (1xx) before it are dropped.

    The parser is compiled code, and the limits are checked after every slice of bytes. If a host sends one-byte chunks,
    endless headers, or other bytes without content, the request fails after about 64 KiB.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        """HTTP status code. None until all headers have arrived."""
        self.headers: dict[str, str] = {}
        """Headers of the response, by name in lower case."""
        self.body = bytearray()
        self.is_complete = False
        self._is_until_close = False
        self._num_headers = 0
        self._num_informational = 0
        self._parser = httptools.HttpResponseParser(self)
        # Accept lines that end with LF only, and chunk sizes with padding, because some hosts send them. This is safe,
        # because each connection has only one response.
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)

    def feed(self, data: bytes, num_received: int) -> None:
        """Parse the next bytes of the response.

        Args:
            data: The next bytes, or empty if the host has closed the connection.
            num_received: Total number of bytes that the host has sent so far, including TLS.

        Raises:
            BadAnswer: The response violates the protocol or a limit.
            ConnectionResetError: The response is incomplete, and the connection is closed.
        """
        if not data:
            self._close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self.is_complete:  # the response is complete, so ignore errors in later bytes
                raise BadAnswer("the host violates the HTTP protocol") from None
        self._check(num_received)

    def _close(self) -> None:
        self.is_complete = self.is_complete or (self.status is not None and self._is_until_close)
        if not self.is_complete:
            raise ConnectionResetError

    def _check(self, num_received: int) -> None:
        if self._num_informational > _MOST_INFORMATIONAL:
            raise BadAnswer(f"the host sends more than {_MOST_INFORMATIONAL} informational answers (1xx)")
        if self._num_headers > _MOST_HEADERS:
            raise BadAnswer(f"the host sends more than {_MOST_HEADERS} headers")
        if num_received - len(self.body) > _FRAMING + len(self.body) // _FRAMING_SHARE:
            raise BadAnswer(
                f"the host sends more than {_FRAMING} bytes of headers, chunk sizes and other overhead, and more than "
                f"1/{_FRAMING_SHARE} of the file's size; the host should send chunks of 1 KiB or more"
            )

    # The HTTP parser calls the methods below.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header of the response. Headers after the body are counted, but not stored."""
        self._num_headers += 1
        if self.status is None:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        """Store the status code of the final response. Ignore informational responses."""
        if self.status is not None:
            return
        status = self._parser.get_status_code()
        if HTTPStatus.CONTINUE <= status < HTTPStatus.OK:
            self._num_informational += 1
            self.headers.clear()
            return
        self.status = status
        self._is_until_close = not self.headers.keys() & {"content-length", "transfer-encoding"}

    def on_body(self, data: bytes) -> None:
        """Append a part of the response's body."""
        if not self.is_complete:
            self.body += data

    def on_message_complete(self) -> None:
        """Mark the final response as complete. Ignore informational responses."""
        self.is_complete = self.status is not None


# The code below reads from connections to media hosts. The code reads small slices, so that no host can block the event
# loop.

RunInThread = Callable[[Callable[[], bool]], Awaitable[bool]]

BYTES_PER_TURN = 64 * 1024
"""Maximum number of bytes from media hosts that are processed in one iteration of the event loop, over all connections.

Parsing this many bytes takes at most 1 ms, even in the worst case, which is a response with one-byte chunks.
"""
_SLICE = 16 * 1024
"""Maximum number of bytes per read from a socket."""
_SMALLEST_CHARGE = 2 * 1024
"""Number of bytes that one read counts at least against the limit. A read takes about 50 us, even for a single byte."""
_LONGEST_HANDSHAKE = 128 * 1024


class Wire:
    """Connection to a media host, with or without TLS. The caller must close the connection.

    The class decrypts TLS in memory buffers. asyncio's own TLS would decrypt up to 256 KiB in one iteration of the
    event loop, even if the records are small.
    """

    def __init__(self, connection: socket.socket, pace: Pace) -> None:
        """Wrap a connected, non-blocking socket.

        Args:
            connection: The connected socket. ``close`` closes it.
            pace: Limit on the bytes that are processed per iteration of the event loop. All connections share it.
        """
        self._socket = connection
        self._pace = pace
        self._tls: ssl.SSLObject | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.num_received = 0
        """Number of bytes that the host has sent after the TLS handshake, before decryption."""

    async def start_tls(self, context: ssl.SSLContext, name: str, run_in_thread: RunInThread) -> None:
        """Do the TLS handshake, and check the certificate of the host.

        Args:
            context: TLS context with the trusted certificate authorities.
            name: Host name that the certificate must contain.
            run_in_thread: Runs the steps of the handshake in a thread. A step can take most of a second if the host
                uses large keys.

        Raises:
            ssl.SSLCertVerificationError: The certificate is not trusted.
            OSError: The handshake fails, or the connection is lost.
        """
        tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        while not await run_in_thread(lambda: _has_shaken_hands(tls)):
            await self._flush()
            data = await self._receive()
            if not data or self.num_received > _LONGEST_HANDSHAKE:
                raise ConnectionResetError
            self._incoming.write(data)
        self._tls = tls
        await self._flush()
        self.num_received = 0

    async def send(self, data: bytes) -> None:
        """Send all of the data to the host. Raises OSError if the connection fails."""
        if self._tls is None:
            await asyncio.get_running_loop().sock_sendall(self._socket, data)
        else:
            self._tls.write(data)
            await self._flush()

    async def read(self) -> bytes:
        """Return the next bytes from the host, at most about 32 KiB. Return an empty result at the end. Raises OSError
        if the connection fails.
        """
        if self._tls is None:
            return await self._receive()
        while True:
            pieces: list[bytes] = []
            is_over = False
            try:
                while not is_over:
                    pieces.append(self._tls.read(_SLICE))
                    is_over = not pieces[-1]
            except ssl.SSLWantReadError:
                pass
            await self._flush()
            if (data := b"".join(pieces)) or is_over:
                return data
            if not (received := await self._receive()):
                return b""  # not an error, because many hosts close the connection without the closing message of TLS
            self._incoming.write(received)

    def close(self) -> None:
        """Close the connection immediately, even if data were not sent yet."""
        self._socket.close()

    async def _flush(self) -> None:
        if data := self._outgoing.read():
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def _receive(self) -> bytes:
        """Return received bytes, as soon as the limit of bytes per iteration of the event loop allows it."""
        data = await asyncio.get_running_loop().sock_recv(self._socket, _SLICE)
        self.num_received += len(data)
        await self._pace.take(max(len(data), _SMALLEST_CHARGE))
        return data


async def connect(address: str, port: int, pace: Pace) -> Wire:
    """Connect to an IP address. Raises OSError if the connection fails."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except BaseException:
        connection.close()
        raise
    return Wire(connection, pace)


def _has_shaken_hands(tls: ssl.SSLObject) -> bool:
    """Continue the TLS handshake. Return True if it is complete, and False if it needs more bytes from the host."""
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


# The code below sends one GET request to a media host, and reads the response.

Counted = Callable[[int], None]
"""Function that is called with the number of additional bytes that a file has in memory. Raises ResourceExhausted if a
limit is reached.
"""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_FOR_NOW = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Status codes of a host after which a later attempt may succeed."""


class Exchange:
    """One GET request to a media host, and the host's response."""

    def __init__(self, wire: Wire, field: str, max_bytes: int, counted: Counted) -> None:
        self._wire = wire
        self._field = field
        self._max_bytes = max_bytes
        self._counted = counted
        self._answer = Answer()

    async def get(self, target: Target, check: Callable[..., Target]) -> bytes | Target:
        """Return the file, or the URL to which the host redirects, after it was checked with ``check``.

        Raises:
            OSError: The connection is lost.
            RequestFailed: The response contains no file, or exceeds a limit.
        """
        answer = self._answer
        await self._wire.send(_request(target))
        while answer.status is None:
            await self._read()
        if answer.status in _REDIRECTS:
            return check(self._joined(target, answer.headers.get("location", "")), field=self._field)
        if answer.status != HTTPStatus.OK:
            why = f"the host answered with status {answer.status}"
            raise sources.fetch_failed(self._field, why, for_now=answer.status in _FOR_NOW)
        if answer.headers.get("content-encoding", "").lower() not in ("", "identity"):
            raise sources.fetch_failed(
                self._field, "the host sent a Content-Encoding that was not requested", for_now=False
            )
        if answer.headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise sources.fetch_failed(
                self._field, "the host sent a Transfer-Encoding that was not requested", for_now=False
            )
        return await self._body(int(answer.headers.get("content-length", 0)))

    async def _read(self) -> None:
        data = await self._wire.read()
        try:
            self._answer.feed(data, self._wire.num_received)
        except BadAnswer as e:
            raise sources.fetch_failed(self._field, str(e), for_now=False) from None

    def _joined(self, target: Target, location: str) -> str:
        try:
            return urljoin(target.url, location)
        except ValueError:
            raise sources.fetch_failed(self._field, "the host redirects to an invalid URL", for_now=False) from None

    async def _body(self, announced: int) -> bytes:
        self._check_size(announced)
        if announced:
            self._counted(announced)
        body, counted = self._answer.body, announced
        while True:
            self._check_size(len(body))
            if len(body) > counted:
                self._counted(len(body) - counted)
                counted = len(body)
            if self._answer.is_complete:
                break
            await self._read()
        if not body:
            raise sources.fetch_failed(self._field, "the response of the host is empty", for_now=False)
        return bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise sources.too_large(self._field, f"has at least {size} bytes", "media.max_bytes", self._max_bytes)


def _request(target: Target) -> bytes:
    """Encode a GET request. A target cannot contain line breaks, because sources.py encodes paths and checks hosts."""
    lines = (
        f"GET {target.path} HTTP/1.1",
        f"Host: {target.authority}",
        "User-Agent: penstock",
        "Accept: */*",
        "Accept-Encoding: identity",
        "Connection: close",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


# The code below fetches media files from other hosts. The code connects only to allowed addresses.

T = TypeVar("T")

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Function that returns all IP addresses of a host name as texts. Raises OSError if the name cannot be resolved."""

_RESOLVING_THREADS = 8
_HANDSHAKE_THREADS = 2
"""Number of threads that do TLS handshakes with media hosts. OpenSSL releases the GIL, so the event loop continues
during a handshake.
"""


class Fetcher:
    """Fetches files by URL. For each URL, it resolves the host name once, checks all addresses of the host, and
    connects to one of them.

    The fetcher uses no proxies, cookies, credentials or content encodings, and does not reuse connections.
    """

    def __init__(self, config: MediaConfig, resolver: Resolver | None = None) -> None:
        """Create the fetcher. ``resolver`` is used instead of the system's resolver for host names. Raises ConfigError
        if the certificates of ``media.ca`` cannot be read.
        """
        self._config = config
        self._private = config.private_networks
        self._resolver = resolver or self._resolve
        self._threads = ThreadPoolExecutor(_RESOLVING_THREADS, thread_name_prefix="media-names")
        self._handshakes = ThreadPoolExecutor(_HANDSHAKE_THREADS, thread_name_prefix="media-tls")
        self._pace = Pace(BYTES_PER_TURN)
        try:
            self._tls = ssl.create_default_context(cafile=config.ca or None)
        except OSError as e:  # SSLError is a subclass of OSError
            raise ConfigError(f"media.ca: cannot read certificates from {config.ca}: {e}") from None
        self._tls.options |= ssl.OP_NO_RENEGOTIATION
        self._room = asyncio.Semaphore(config.max_fetches)
        self.num_waiting = 0
        self._closed = False

    def close(self) -> None:
        """Stop the fetcher of media files. After that, it resolves no more names, and starts no more TLS handshakes."""
        self._closed = True
        self._threads.shutdown(wait=False)
        self._handshakes.shutdown(wait=False)

    def check(self, url: str, *, field: str) -> Target:
        """Return the parsed URL, after a check that the frontend may fetch it.

        This method opens no connection. Raises PermissionDenied or InvalidArgument if the frontend may not fetch the
        URL.
        """
        target = read_url(url, field=field)
        check_domain(target, self._config.allowed_domains, field=field)
        return target

    async def fetch(self, url: str, *, field: str, counted: Counted = lambda _: None) -> bytes:
        """Fetch the file at a URL.

        Raises the errors of ``check``, RequestFailed with the reason MEDIA_FETCH_FAILED or MEDIA_TOO_LARGE, or
        ResourceExhausted.
        """
        target = self.check(url, field=field)
        if self.num_waiting >= self._config.max_queued:
            raise ResourceExhausted(
                f"{self.num_waiting} URLs are waiting to be fetched; the limit media.max_queued is {self._config.max_queued}",
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
            raise sources.fetch_failed(
                field, f"fetching took longer than media.fetch_timeout, {self._config.fetch_timeout:g} s", for_now=True
            ) from None
        finally:
            self._room.release()

    async def _follow(self, target: Target, field: str, counted: Counted) -> bytes:
        for _ in range(self._config.max_redirects + 1):
            found = await self._get(target, field, counted)
            if isinstance(found, bytes):
                return found
            if target.is_tls and not found.is_tls:
                raise sources.not_allowed(field, "redirects from https: to http:")
            target = found
        raise sources.fetch_failed(
            field,
            f"the URL redirects more often than media.max_redirects, {self._config.max_redirects} times",
            for_now=False,
        )

    async def _get(self, target: Target, field: str, counted: Counted) -> bytes | Target:
        """Send one GET request. Return the file, or the URL to which the host redirects."""
        wire = await self._connect(target, field)
        try:
            return await Exchange(wire, field, self._config.max_bytes, counted).get(target, self.check)
        except OSError:
            raise sources.fetch_failed(field, "the connection was lost", for_now=True) from None
        finally:
            wire.close()

    async def _connect(self, target: Target, field: str) -> Wire:
        for address in await self._addresses(target, field):
            try:
                return await self._dial(address, target)
            except ssl.SSLCertVerificationError:
                raise sources.fetch_failed(field, "the certificate of the host is not trusted", for_now=False) from None
            except OSError:
                continue
        raise sources.fetch_failed(field, "the host accepts no connections", for_now=True)

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
        """Return all IP addresses of the host.

        Raises PermissionDenied if connections to any of the addresses are not allowed. The error does not name the
        address.
        """
        if target.address is not None:
            addresses: Sequence[str] = [target.host]
        else:
            try:
                addresses = await self._resolver(target.host, target.port)
            except (OSError, UnicodeError):
                addresses = []
            if not addresses:
                raise sources.fetch_failed(field, "the name of the host has no IP address", for_now=True)
        if not all(is_allowed_address(address, self._private) for address in addresses):
            raise sources.not_allowed(field, f"is on {quoted(target.authority)}, whose addresses are not public")
        return addresses

    async def _resolve(self, host: str, port: int) -> list[str]:
        found = await self._run(self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def _run(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        if self._closed:
            raise sources.shutting_down()
        return await asyncio.get_running_loop().run_in_executor(threads, work)
