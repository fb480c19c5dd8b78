import asyncio
import ssl
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock_frontend.loop_yield import Pace
from penstock_frontend.processing.media.http_client import BYTES_PER_TURN, Wire, connect
from tests.fakes.network.certificates import Authority

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
    """The host's, and ours, which trusts it."""
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
