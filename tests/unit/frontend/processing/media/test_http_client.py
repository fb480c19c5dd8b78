"""The HTTP client that downloads media: answers in any framing, bad answers, and limits."""

import asyncio
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import (
    ConfigError,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    RequestFailed,
    ResourceExhausted,
    Unavailable,
)
from penstock_frontend.config import MediaConfig
from penstock_frontend.loop_yield import Pace
from penstock_frontend.processing.media.http_client import BYTES_PER_TURN, Answer, BadAnswer, Fetcher, Wire, connect
from tests.fakes.network.certificates import Authority
from tests.fakes.network.file_server import FileServer, answer
from tests.fakes.patience import PATIENCE

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def fed(*pieces: bytes, is_closed: bool = False) -> Answer:
    answer, received = Answer(), 0
    for piece in pieces:
        answer.feed(piece, received := received + len(piece))
    if is_closed:
        answer.feed(b"", received)
    return answer


def bytes_until_given_up(pieces: Iterable[bytes]) -> tuple[int, str]:
    """Return the number of bytes read, and the error. Fails for more than a megabyte."""
    answer, received = Answer(), 0
    for piece in pieces:
        received += len(piece)
        assert received < 1024 * 1024
        try:
            answer.feed(piece, received)
        except BadAnswer as e:
            return received, str(e)
    raise AssertionError("it ended")


def endless(first: bytes, piece: bytes) -> Iterable[bytes]:
    yield first
    while True:
        yield piece


@pytest.mark.parametrize("step", [1, 2, 7, 10_000])
@pytest.mark.parametrize(
    "given",
    [
        HEAD + b"Content-Length: 5\r\n\r\nabcde",
        CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
        CHUNKED + b"3;name=value\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\nLocation: y\r\n\r\n",
        CHUNKED + b"3  \r\nabc\r\n02  \r\nde\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
        + HEAD
        + b"Content-Length: 5\r\n\r\nabcde",
        HEAD + b"Upgrade: h2,h2c\r\nConnection: Upgrade, close\r\nContent-Length: 5\r\n\r\nabcde",
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nabcde",
        b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nabcde",
        b"HTTP/1.1 200 OK\nContent-Length: 5\n\nabcde",
        HEAD + b"Content-Length: 5\r\n\r\nabcdeHTTP/1.1 404 Not Found\r\nContent-Length: 1\r\n\r\nx",
        HEAD + b"Content-Length: 5\r\n\r\nabcde\0\0garbage",
    ],
    ids=range(11),
)
def test_an_answer_is_the_same_in_pieces_of_any_size(given: bytes, step: int) -> None:
    answer = fed(*(given[start : start + step] for start in range(0, len(given), step)))
    assert (answer.status, bytes(answer.body), answer.is_complete) == (200, b"abcde", True)
    assert "link" not in answer.headers
    assert "trailer" not in answer.headers


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    assert not fed(HEAD + b"\r\nabc").is_complete
    answer = fed(HEAD + b"\r\nabc", b"de", is_closed=True)
    assert (bytes(answer.body), answer.is_complete) == (b"abcde", True)


@pytest.mark.parametrize(
    "given",
    [b"", HEAD, HEAD + b"Content-Length: 5\r\n\r\nabcd", CHUNKED + b"3\r\nabc\r\n", CHUNKED + b"0\r\nTrailer: x\r\n"],
    ids=range(5),
)
def test_an_answer_that_is_cut_off_is_a_lost_connection(given: bytes) -> None:
    answer = fed(given) if given else Answer()
    with pytest.raises(ConnectionResetError):
        answer.feed(b"", len(given))


@pytest.mark.parametrize(
    "given",
    [
        b"not http at all\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"\0" * 50,
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: " + b"9" * 50 + b"\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Name : x\r\n\r\n",
        HEAD + b"Name: a\0b\r\n\r\n",
        HEAD + b": x\r\n\r\n",
        CHUNKED + b"zz\r\nab",
        CHUNKED + b"ffffffffffffffffffff\r\nab",
        CHUNKED + b"1\r\nabc\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    ],
    ids=range(14),
)
def test_bytes_that_are_no_http_are_a_bad_answer(given: bytes) -> None:
    with pytest.raises(BadAnswer, match="violates the HTTP protocol"):
        fed(given)


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (CHUNKED, b"1\r\nx\r\n"),
        (CHUNKED, b"10\r\n" + b"x" * 16 + b"\r\n"),
        (CHUNKED, b"10;" + b"e" * 64 + b"\r\n" + b"x" * 16 + b"\r\n"),
        (CHUNKED + b"1;", b"extension"),
        (CHUNKED + b"0\r\n", b"T: " + b"x" * 1000 + b"\r\n"),
        (CHUNKED + b"0\r\nTrailer: ", b"x"),
        (HEAD, b"Name: " + b"x" * 1000 + b"\r\n"),
        (HEAD + b"Name: ", b"x"),
        (HEAD, b"x"),
        (b"HTTP/1.1 200 ", b"reason"),
        (b"HTTP/1.1 100 Continue\r\n", b"Name: " + b"x" * 1000 + b"\r\n"),
    ],
    ids=range(11),
)
def test_answers_with_much_beside_the_file_are_given_up(first: bytes, piece: bytes) -> None:
    taken, said = bytes_until_given_up(endless(first, piece))
    assert "more than 65536 bytes of headers, chunk sizes and other overhead" in said
    assert taken <= 64 * 1024 * 20 + len(first)


def test_one_byte_chunks_are_given_up_after_as_many_bytes_as_any_other_framing() -> None:
    taken, _ = bytes_until_given_up(endless(CHUNKED, b"1\r\nx\r\n"))
    assert 64 * 1024 < taken < 96 * 1024


def test_headers_and_informational_answers_are_counted() -> None:
    taken, said = bytes_until_given_up(endless(HEAD, b"a:b\r\n"))
    assert "more than 256 headers" in said
    assert taken < 2000
    taken, said = bytes_until_given_up(endless(b"HTTP/1.1 102 Processing\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"))
    assert "more than 16 informational answers" in said
    assert taken < 1000


def test_a_file_in_chunks_as_servers_send_them_is_taken() -> None:
    chunk = b"40\r\n" + b"x" * 64 + b"\r\n"
    assert len(fed(CHUNKED, *[chunk] * 20_000, b"0\r\n\r\n").body) == 64 * 20_000


SLICE = 16 * 1024
Sender = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def host(send: Sender, tls: ssl.SSLContext | None = None) -> Any:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await send(writer)
            await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the host's TLS context, and the client's, which trusts the host."""
    authority = Authority()
    files = authority.issue("images.test").write(tmp_path)
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(files.certificate, files.key)
    return theirs, ssl.create_default_context(cafile=files.ca)


async def in_thread(step: Callable[[], bool]) -> bool:
    return await asyncio.to_thread(step)


async def read_all(wire: Wire) -> bytes:
    taken = bytearray()
    while data := await wire.read():
        taken += data
    return bytes(taken)


async def test_all_connections_together_process_so_many_bytes_in_a_turn_of_the_loop() -> None:
    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(512 * 1024))

    pace, turn, taken = Pace(BYTES_PER_TURN), 0, Counter[int]()
    is_over = False

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if not is_over:
            asyncio.get_running_loop().call_soon(count_turns)

    async def read(port: int) -> None:
        wire = await connect("127.0.0.1", port, pace)
        while data := await wire.read():
            taken[turn] += len(data)
        wire.close()

    async with host(send) as port:
        count_turns()
        await asyncio.gather(*(read(port) for _ in range(10)))
        is_over = True
    assert sum(taken.values()) == 10 * 512 * 1024
    assert max(taken.values()) <= BYTES_PER_TURN + SLICE


async def test_single_bytes_count_as_more_so_that_reads_are_bounded_too() -> None:
    pace, turn, reads = Pace(BYTES_PER_TURN), 0, Counter[int]()
    started, is_over = asyncio.Event(), False

    async def send(writer: asyncio.StreamWriter) -> None:
        await started.wait()
        writer.write(b"x")

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if not is_over:
            asyncio.get_running_loop().call_soon(count_turns)

    async def read(wire: Wire) -> None:
        assert await wire.read() == b"x"
        reads[turn] += 1
        wire.close()

    async with host(send) as port:
        wires = [await connect("127.0.0.1", port, pace) for _ in range(100)]
        tasks = [asyncio.create_task(read(wire)) for wire in wires]
        count_turns()
        started.set()
        await asyncio.gather(*tasks)
        is_over = True
    assert max(reads.values()) <= 32


async def test_encrypted_bytes_come_as_they_were_sent(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    theirs, ours = contexts
    sent = bytes(range(256)) * 1000

    async def send(writer: asyncio.StreamWriter) -> None:
        for start in range(500):
            writer.write(sent[start : start + 1])
        writer.write(sent[500:])

    async with host(send, theirs) as port:
        wire = await connect("127.0.0.1", port, Pace(BYTES_PER_TURN))
        await wire.start_tls(ours, "images.test", in_thread)
        assert await read_all(wire) == sent
        wire.close()
    assert len(sent) + 500 * 20 < wire.num_received < len(sent) + 500 * 40


async def test_a_host_that_closes_without_tlss_end_has_ended(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    theirs, ours = contexts

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(b"abc")
        await asyncio.sleep(0)
        writer.transport.get_extra_info("socket").shutdown(1)

    async with host(send, theirs) as port:
        wire = await connect("127.0.0.1", port, Pace(BYTES_PER_TURN))
        await wire.start_tls(ours, "images.test", in_thread)
        assert await read_all(wire) == b"abc"
        wire.close()


async def test_a_certificate_for_another_name_is_not_trusted(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    theirs, ours = contexts

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(b"abc")

    async with host(send, theirs) as port:
        for context, name in ((ours, "other.test"), (ssl.create_default_context(), "images.test")):
            wire = await connect("127.0.0.1", port, Pace(BYTES_PER_TURN))
            with pytest.raises(ssl.SSLCertVerificationError):
                await wire.start_tls(context, name, in_thread)
            wire.close()


async def test_handshakes_are_computed_beside_the_loop(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = contexts
    threads: list[threading.Thread] = []
    handshake = ssl.SSLObject.do_handshake

    def seen(tls: ssl.SSLObject) -> None:
        if not tls.server_side:
            threads.append(threading.current_thread())
        handshake(tls)

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(b"abc")

    monkeypatch.setattr(ssl.SSLObject, "do_handshake", seen)
    async with host(send, theirs) as port:
        wire = await connect("127.0.0.1", port, Pace(BYTES_PER_TURN))
        await wire.start_tls(ours, "images.test", in_thread)
        wire.close()
    assert threads
    assert threading.main_thread() not in threads


async def test_a_handshake_without_end_is_given_up(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    _, ours = contexts
    steps = 0

    async def not_done(_step: Callable[[], bool]) -> bool:
        nonlocal steps
        steps += 1
        return False

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(1024 * 1024))

    async with host(send) as port:
        wire = await connect("127.0.0.1", port, Pace(BYTES_PER_TURN))
        with pytest.raises(ConnectionResetError):
            await wire.start_tls(ours, "images.test", not_done)
        wire.close()
    assert 8 <= steps < 100


BODY = b"a file" * 1000


@pytest.fixture
async def server() -> AsyncIterator[FileServer]:
    async with FileServer() as server:
        yield server


class Names:
    """A resolver that expects names, never the addresses that it returned."""

    def __init__(self, *addresses: Sequence[str]) -> None:
        self.asked: list[str] = []
        self._addresses = list(addresses) or [["127.0.0.1"]]

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self._addresses[min(len(self.asked), len(self._addresses)) - 1]


def fetcher(server: FileServer, names: Names | None = None, **settings: Any) -> Fetcher:
    allowed = {
        "allowed_domains": (f"images.test:{server.port}", f"*.other.test:{server.port}"),
        "allowed_private_networks": ("127.0.0.1/32",),
        "fetch_timeout": PATIENCE,
    }
    return Fetcher(MediaConfig(**{**allowed, **settings}), names or Names())


def url(server: FileServer, path: str = "/a.png", host: str = "images.test", scheme: str = "http") -> str:
    return f"{scheme}://{host}:{server.port}{path}"


async def refused(fetcher: Fetcher, url: str) -> RequestFailed:
    with pytest.raises(RequestFailed) as error:
        await fetcher.fetch(url, field="the.field")
    assert error.value.field == "the.field"
    assert "secret" not in error.value.message
    return error.value


async def test_a_file_comes_from_a_host_that_is_allowed(server: FileServer) -> None:
    server.answers["/a.png?secret=1"] = answer(BODY)
    names = Names()
    assert await fetcher(server, names).fetch(url(server, "/a.png?secret=1#x"), field="url") == BODY
    assert names.asked == ["images.test"]


async def test_a_request_says_nothing_but_what_it_asks_for(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    server.answers["/a.png"] = answer(BODY, Set_Cookie="a=b")
    each = fetcher(server)
    for _ in range(2):
        await each.fetch(url(server), field="url")
    first, second = server.requests
    assert first == second
    lines = dict(line.split(": ", 1) for line in first.strip().split("\r\n")[1:])
    assert lines == {
        "Host": f"images.test:{server.port}",
        "User-Agent": "penstock",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "Connection": "close",
    }


async def test_a_file_in_chunks_comes_whole(server: FileServer) -> None:
    server.answers["/a.png"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    assert await fetcher(server).fetch(url(server), field="url") == b"abcde"


async def test_a_host_that_is_not_allowed_is_not_even_looked_up(server: FileServer) -> None:
    names = Names()
    for host in ("example.org", "images.test.example.org", "127.0.0.1", "localhost", "other.test"):
        error = await refused(fetcher(server, names), url(server, "/?secret", host))
        assert isinstance(error, PermissionDenied)
        assert error.reason == "MEDIA_NOT_ALLOWED"
    assert names.asked == []
    assert server.requests == []


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["10.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::1"], ["::ffff:127.0.0.1"], ["fe80::1%1"]],
    ids=str,
)
async def test_a_host_with_an_address_that_is_not_public_is_not_dialled(
    server: FileServer, addresses: list[str]
) -> None:
    error = await refused(fetcher(server, Names(addresses), allowed_private_networks=()), url(server))
    assert error.reason == "MEDIA_NOT_ALLOWED"
    assert not any(address in error.message for address in addresses)
    assert server.requests == []


async def test_a_name_that_answers_otherwise_the_second_time_is_asked_once(server: FileServer) -> None:
    server.answers["/a.png"] = answer(BODY)
    names = Names(["127.0.0.1"], ["10.0.0.1"])
    assert await fetcher(server, names).fetch(url(server), field="url") == BODY
    assert names.asked == ["images.test"]


async def test_a_redirect_is_looked_up_and_checked_anew(server: FileServer) -> None:
    server.answers["/a.png"] = answer(status="302 Found", Location=url(server, "/b.png", "b.other.test"))
    server.answers["/b.png"] = answer(BODY)
    names = Names()
    assert await fetcher(server, names).fetch(url(server), field="url") == BODY
    assert names.asked == ["images.test", "b.other.test"]


async def test_a_redirect_to_an_address_that_is_not_public_is_refused(server: FileServer) -> None:
    server.answers["/a.png"] = answer(status="302 Found", Location="/b.png")
    server.answers["/b.png"] = answer(BODY)
    error = await refused(fetcher(server, Names(["127.0.0.1"], ["169.254.169.254"])), url(server))
    assert error.reason == "MEDIA_NOT_ALLOWED"
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://localhost/",
        "http://2130706433/",
        "http://example.org/",
        "file:///etc/passwd",
        "//127.0.0.1/",
        "http://user:secret@images.test/",
        "http://[::1]/",
        "http://[",
        "gopher://images.test/",
        "data:image/png;base64,abcd",
        "\\\\127.0.0.1\\a",
    ],
)
async def test_a_redirect_to_what_may_not_be_fetched_is_refused(server: FileServer, location: str) -> None:
    server.answers["/a.png"] = answer(status="307 Temporary Redirect", Location=location)
    error = await refused(fetcher(server), url(server))
    assert error.reason in ("MEDIA_NOT_ALLOWED", "MEDIA_UNREADABLE", "MEDIA_FETCH_FAILED")
    assert len(server.requests) == 1


async def test_redirects_are_bounded(server: FileServer) -> None:
    server.answers["/a.png"] = answer(status="301 Moved", Location="/a.png")
    error = await refused(fetcher(server, max_redirects=2), url(server))
    assert error.reason == "MEDIA_FETCH_FAILED"
    assert len(server.requests) == 3


async def test_a_file_that_says_it_is_too_large_is_not_read(server: FileServer) -> None:
    server.answers["/a.png"] = answer(Content_Length="101")
    error = await refused(fetcher(server, max_bytes=100), url(server))
    assert isinstance(error, InvalidArgument)
    assert error.reason == "MEDIA_TOO_LARGE"
    assert "media.max_bytes is 100" in error.message


async def test_a_body_without_end_is_given_up_at_the_limit(server: FileServer) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(4096))
            await writer.drain()

    server.answers["/a.png"] = endless
    assert (await refused(fetcher(server, max_bytes=100_000), url(server))).reason == "MEDIA_TOO_LARGE"
    while server.num_open:
        await asyncio.sleep(0.01)


async def test_headers_without_end_are_given_up(server: FileServer) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"X: " + b"y" * 1000 + b"\r\n")
            await writer.drain()

    server.answers["/a.png"] = endless
    assert (await refused(fetcher(server), url(server))).reason == "MEDIA_FETCH_FAILED"


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_a_host_that_drips_is_given_up_in_time(server: FileServer, first: bytes) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        while True:
            writer.write(b"H" if not first else b"x" if first.endswith(b"\r\n\r\n") else b"A: b\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)

    server.answers["/a.png"] = drip
    error = await refused(fetcher(server, fetch_timeout=0.3), url(server))
    assert error.reason == "MEDIA_FETCH_FAILED"
    assert error.code == "FAILED_PRECONDITION" or not first


async def test_a_name_that_takes_too_long_is_given_up(server: FileServer) -> None:
    async def slow(host: str, port: int) -> list[str]:
        await asyncio.sleep(PATIENCE)
        return []

    each = fetcher(server, slow, fetch_timeout=0.1)  # type: ignore[arg-type]
    assert isinstance(await refused(each, url(server)), FailedPrecondition)


@pytest.mark.parametrize("status", ["404 Not Found", "500 Oops", "204 No Content", "206 Partial", "304 Not Modified"])
async def test_an_answer_that_is_no_file_is_told_with_its_status(server: FileServer, status: str) -> None:
    server.answers["/a.png"] = answer(status=status, Content_Length="")
    error = await refused(fetcher(server), url(server))
    assert error.reason == "MEDIA_FETCH_FAILED"
    assert status[:3] in error.message
    assert error.code == ("FAILED_PRECONDITION" if status[0] == "5" else "INVALID_ARGUMENT")


@pytest.mark.parametrize(
    "given",
    [
        answer(BODY, Content_Encoding="gzip"),
        answer(BODY, Content_Encoding="br"),
        answer(b""),
        answer(BODY, Content_Length="99999"),
        answer(status="302 Found"),
        b"",
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x00" * 100,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    ],
    ids=range(13),
)
async def test_an_answer_that_is_wrong_is_a_failed_fetch(server: FileServer, given: bytes) -> None:
    server.answers["/a.png"] = given
    assert (await refused(fetcher(server), url(server))).reason in ("MEDIA_FETCH_FAILED", "MEDIA_UNREADABLE")


async def test_a_host_that_takes_no_connections_is_unavailable(server: FileServer) -> None:
    each = fetcher(server, Names(["127.0.0.2"]), allowed_private_networks=("127.0.0.2/32",))
    assert isinstance(await refused(each, url(server)), FailedPrecondition)


async def test_the_next_address_is_dialled_when_the_first_takes_no_connections(server: FileServer) -> None:
    server.answers["/a.png"] = answer(BODY)
    each = fetcher(server, Names(["127.0.0.2", "127.0.0.1"]), allowed_private_networks=("127.0.0.0/8",))
    assert await each.fetch(url(server), field="url") == BODY


async def test_a_name_without_addresses_is_unavailable(server: FileServer) -> None:
    async def unknown(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    assert isinstance(await refused(fetcher(server, unknown), url(server)), FailedPrecondition)  # type: ignore[arg-type]


async def test_fetches_at_once_are_bounded_and_so_are_those_that_wait(server: FileServer) -> None:
    release = asyncio.Event()

    async def held(writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(answer(BODY))

    server.answers["/a.png"] = held
    each = fetcher(server, max_fetches=2, max_queued=1)
    fetches = [asyncio.create_task(each.fetch(url(server), field="url")) for _ in range(3)]
    while len(server.requests) < 2:
        await asyncio.sleep(0.01)
    assert each.num_waiting == 1
    assert isinstance(await refused(each, url(server)), ResourceExhausted)
    release.set()
    assert await asyncio.gather(*fetches) == [BODY] * 3


async def test_received_bytes_are_counted_as_they_arrive(server: FileServer) -> None:
    server.answers["/a.png"] = answer(BODY)
    server.answers["/b.png"] = b"HTTP/1.1 200 OK\r\n\r\n" + BODY
    counts: dict[str, list[int]] = {"/a.png": [], "/b.png": []}
    for path, counted in counts.items():
        await fetcher(server).fetch(url(server, path), field="url", counted=counted.append)
    assert counts["/a.png"] == [len(BODY)]
    assert sum(counts["/b.png"]) == len(BODY)


async def test_fetches_at_once_share_what_is_read_in_a_turn_of_the_loop(server: FileServer) -> None:
    server.answers["/a.png"] = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(512 * 1024)
    each, turn, taken = fetcher(server), 0, Counter[int]()
    is_over = False

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if not is_over:
            asyncio.get_running_loop().call_soon(count_turns)

    def counted(size: int) -> None:
        taken[turn] += size

    count_turns()
    await asyncio.gather(*(each.fetch(url(server), field="url", counted=counted) for _ in range(10)))
    is_over = True
    assert sum(taken.values()) == 10 * 512 * 1024
    assert max(taken.values()) <= 80 * 1024


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 1000),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"T: x\r\n" * 1000),
        (b"HTTP/1.1 200 OK\r\n", b"T: x\r\n" * 1000),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    ],
    ids=["one-byte chunks", "trailers", "headers", "informational"],
)
async def test_answers_of_next_to_nothing_are_given_up(server: FileServer, first: bytes, piece: bytes) -> None:
    server.answers["/a.png"] = first + piece * 20
    error = await refused(fetcher(server), url(server))
    assert (error.reason, error.code) == ("MEDIA_FETCH_FAILED", "INVALID_ARGUMENT")
    assert "the host sends more than" in error.message
    while server.num_open:
        await asyncio.sleep(0.01)


def test_authorities_that_cannot_be_read_are_an_error_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("no certificate")
    for path in (tmp_path / "ca.crt", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="media.ca"):
            Fetcher(MediaConfig(ca=str(path)))


async def test_a_host_is_known_by_its_certificate_for_its_name(tmp_path: Path) -> None:
    authority = Authority()
    files = authority.issue("images.test").write(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files.certificate, files.key)
    async with FileServer(tls) as server:
        server.answers["/a.png"] = answer(BODY)
        server.answers["/down.png"] = answer(status="302 Found", Location=url(server))
        each = fetcher(server, ca=files.ca)
        assert await each.fetch(url(server, scheme="https"), field="url") == BODY
        assert (await refused(each, url(server, "/down.png", scheme="https"))).reason == "MEDIA_NOT_ALLOWED"
        for other in (fetcher(server), each):
            host = "b.other.test" if other is each else "images.test"
            error = await refused(other, url(server, host=host, scheme="https"))
            assert (error.reason, error.code) == ("MEDIA_FETCH_FAILED", "INVALID_ARGUMENT")


async def test_a_host_that_encrypts_single_bytes_is_given_up(tmp_path: Path) -> None:
    authority = Authority()
    files = authority.issue("images.test").write(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files.certificate, files.key)

    async def single_bytes(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(10_000):
            writer.write(b"x")

    async with FileServer(tls) as server:
        server.answers["/a.png"] = single_bytes
        error = await refused(fetcher(server, ca=files.ca), url(server, scheme="https"))
        assert (error.reason, error.code) == ("MEDIA_FETCH_FAILED", "INVALID_ARGUMENT")
        assert "the host sends more than" in error.message


async def test_a_fetcher_that_is_closed_begins_no_more(server: FileServer) -> None:
    each = fetcher(server)
    each.close()
    with pytest.raises(Unavailable):
        await each.fetch(url(server, scheme="https"), field="url")
    each = Fetcher(MediaConfig(allowed_domains=("images.test",)))
    each.close()
    with pytest.raises(Unavailable):
        await each.fetch("http://images.test/a.png", field="url")
