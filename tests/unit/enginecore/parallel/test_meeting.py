"""The store at which processes of several hosts find each other."""

import errno
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock_common.security.shared_secret import ProofError, SharedSecret
from penstock_enginecore.parallel import meeting_server
from penstock_enginecore.parallel.meeting import (
    GET,
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    REQUEST,
    SET,
    Meeting,
    MeetingStore,
)
from penstock_enginecore.parallel.meeting_server import MAX_KEYS, MAX_STORE_BYTES, MeetingServer
from tests.fakes.network.introductions import asking, connected, introduced, is_closed
from tests.fakes.patience import PATIENCE

SECRET = SharedSecret(b"s" * 32)
OTHER = SharedSecret(b"o" * 32)


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request: pytest.FixtureRequest) -> Iterator[MeetingServer]:
    made = MeetingServer(request.param, SECRET)
    yield made
    made.close()


@pytest.fixture
def store(server: MeetingServer) -> Iterator[Callable[[], MeetingStore]]:
    """Return a function that makes one more client."""
    made: list[socket.socket] = []

    def make() -> MeetingStore:
        connection, store = asking(Meeting(server.address, secret=SECRET))
        made.append(connection)
        return store

    yield make
    for each in made:
        each.close()


@pytest.fixture
def peer(server: MeetingServer) -> Iterator[socket.socket]:
    """Yield a connection that has proven that it knows the secret."""
    with introduced(server.address, Meeting(server.address, secret=SECRET).store_key) as made:
        yield made


def test_messages_of_one_peer_reach_the_others(store: Callable[[], MeetingStore]) -> None:
    first, second = store(), store()
    first.set("a", b"\0bytes")
    first.set("text", "of 日本".encode())
    first.set("long", bytes(MAX_VALUE_BYTES))
    assert [second.get(key) for key in ("a", "text", "long")] == [
        b"\0bytes",
        "of 日本".encode(),
        bytes(MAX_VALUE_BYTES),
    ]
    second.set("a", b"anew")
    assert first.get("a") == b"anew"


def test_everybody_who_waits_is_answered_once_it_is_said(store: Callable[[], MeetingStore]) -> None:
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(store().get, "late") for _ in range(3)]
        store().set("other", b"")
        assert not any(each.done() for each in waiting)
        store().set("late", b"now")
        assert [each.result(PATIENCE) for each in waiting] == [b"now"] * 3


def test_messages_of_a_connection_are_forgotten_when_it_closes(
    server: MeetingServer, peer: socket.socket, store: Callable[[], MeetingStore]
) -> None:
    peer.sendall(REQUEST.pack(SET, 1, 2) + b"a" + b"of" + REQUEST.pack(SET, 1, 2) + b"b" + b"it")
    reader = store()
    assert [reader.get("a"), reader.get("b")] == [b"of", b"it"]
    peer.shutdown(socket.SHUT_WR)
    peer.setblocking(True)
    while peer.recv(100):  # the server's answers; the server closes after it has seen the end
        pass
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.get, "a")
        store().set("a", b"anew")
        assert waiting.result(PATIENCE) == b"anew"
    assert list(server._said) == ["a"]


# Peers without the secret.


def test_a_peer_without_the_secret_can_neither_set_nor_read_keys(server: MeetingServer) -> None:
    for secret in (OTHER, None):
        with pytest.raises(ProofError):
            asking(Meeting(server.address, secret=secret))
    for said in (REQUEST.pack(SET, 1, 1) + b"ab" + bytes(60), REQUEST.pack(GET, 1, 0) + b"a" + bytes(60)):
        with connected(server.address) as stranger:
            stranger.sendall(said)
            assert is_closed(stranger)
    assert server._said == {}


def test_a_server_goes_on_after_the_process_was_out_of_descriptors(
    server: MeetingServer, store: Callable[[], MeetingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failed = socket.socket.accept, []

    def fail_once(listener: socket.socket) -> object:
        if not failed:
            failed.append(True)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    store().set("a", b"1")
    assert failed
    assert store().get("a") == b"1"


# Limits of peers that know the secret.


@pytest.mark.parametrize(
    "said",
    [
        REQUEST.pack(b"?", 1, 0) + b"a",
        REQUEST.pack(SET, 1, 0) + b"\xff",
        REQUEST.pack(SET, MAX_KEY_BYTES + 1, 0),
        REQUEST.pack(SET, 1, MAX_VALUE_BYTES + 1),
        REQUEST.pack(GET, 65535, 65535),
        REQUEST.pack(GET, 1, 0) + b"a" + REQUEST.pack(GET, 1, 0) + b"b",
        b"".join(REQUEST.pack(SET, 2, 0) + b"%02d" % number for number in range(MAX_KEYS + 1)),
    ],
    ids=["no question", "no text", "long key", "long value", "huge", "two questions at once", "many keys"],
)
def test_a_peer_that_breaks_the_protocol_is_disconnected(
    peer: socket.socket, server: MeetingServer, store: Callable[[], MeetingStore], said: bytes
) -> None:
    peer.setblocking(True)
    peer.settimeout(PATIENCE)
    peer.sendall(said)
    with pytest.raises(ConnectionError):
        while peer.recv(65_536):  # responses to its messages
            pass
        raise ConnectionError
    store().set("a", b"1")
    assert store().get("a") == b"1"
    assert list(server._said) == ["a"]


def test_a_full_store_hangs_up_on_who_says_more_and_has_room_again(
    store: Callable[[], MeetingStore], monkeypatch: pytest.MonkeyPatch, server: MeetingServer
) -> None:
    assert MAX_STORE_BYTES >= 2 * 1024 * 200  # the ranks of two epochs of the largest group
    monkeypatch.setattr(meeting_server, "MAX_STORE_BYTES", 100)
    first = store()
    first.set("a", bytes(60))
    with pytest.raises(ConnectionError):
        store().set("b", bytes(60))
    first.set("a", b"")  # its earlier messages do not count
    store().set("b", bytes(60))
    assert server._num_bytes == 62


def test_more_connections_than_ranks_can_need_are_refused(
    store: Callable[[], MeetingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_server, "MAX_ASKING", 2)
    first, second = store(), store()
    first.set("a", b"1")
    with pytest.raises(ConnectionError):
        store().get("a")
    assert second.get("a") == b"1"


def test_a_silent_or_leaving_peer_delays_no_other(
    server: MeetingServer, peer: socket.socket, store: Callable[[], MeetingStore]
) -> None:
    waiting = introduced(server.address, Meeting(server.address, secret=SECRET).store_key)
    peer.sendall(REQUEST.pack(SET, 4, 4) + b"ha")
    waiting.sendall(REQUEST.pack(GET, 1, 0) + b"a")
    waiting.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
    waiting.close()
    with ThreadPoolExecutor(1) as pool:
        also = pool.submit(store().get, "a")
        store().set("a", b"1")
        assert also.result(PATIENCE) == b"1"


def test_a_server_that_closes_hangs_up_on_who_waits(server: MeetingServer, store: Callable[[], MeetingStore]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store().get, "never")
        store().set("a", b"")
        server.close()
        with pytest.raises(ConnectionError):
            waiting.result(PATIENCE)
    server.close()
    with pytest.raises(ConnectionRefusedError):
        store()


def test_an_address_that_is_not_of_this_host_is_refused() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        MeetingServer("192.0.2.1")
    with pytest.raises(OSError, match="Name or service not known"):
        MeetingServer("localhost")
