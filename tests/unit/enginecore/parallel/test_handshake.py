"""A port to which strangers connect. Peers that know the key are admitted, whatever the strangers do."""

import errno
import logging
import selectors
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from penstock_common import addresses
from penstock_common.security import shared_secret
from penstock_common.security.shared_secret import ProofError, SharedSecret
from penstock_enginecore.parallel import handshake as module
from penstock_enginecore.parallel.handshake import MAX_UNPROVEN, Admission
from tests.fakes.network.introductions import connected, introduced, is_closed
from tests.fakes.patience import PATIENCE

SECRET = SharedSecret(b"s" * 32)
KEY = SECRET.key("port")


class Port:
    """A listener with an ``Admission``, on a thread. ``claims`` lists the claims of admitted peers."""

    def __init__(self, listener: socket.socket) -> None:
        self.address = addresses.with_port(*listener.getsockname()[:2])
        self.claims: list[bytes] = []
        self.connections: list[socket.socket] = []
        self.changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._own, self._stop = socket.socketpair()
        self._selector.register(self._own, selectors.EVENT_READ)
        self.admission = Admission(listener, KEY, self._selector, port="test", claim_bytes=4)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(self.admission.wait_at_most()):
                if key.fileobj is self._own:
                    self.admission.close()
                    self._selector.close()
                    return
                if admitted := self.admission.hear(key.fileobj):  # type: ignore[arg-type]
                    with self.changed:
                        self.claims.append(admitted.claim)
                        self.connections.append(admitted.connection)
                        self.changed.notify_all()
            self.admission.tick()

    def wait_for(self, claims: list[bytes]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.claims == claims, PATIENCE), self.claims

    def stop(self) -> None:
        self._stop.send(b"x")
        self._thread.join(PATIENCE)
        for each in (*self.connections, self._own, self._stop):
            each.close()


class Listener:
    """A listener whose ``accept`` fails as a test says."""

    def __init__(self) -> None:
        self.real = socket.create_server(("127.0.0.1", 0))
        self.errors: list[int] = []

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.errors:
            raise OSError(self.errors.pop(), "as the test says")
        return self.real.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.real.close()


@pytest.fixture
def port(listener: Listener) -> Iterator[Port]:
    made = Port(listener)  # type: ignore[arg-type]
    yield made
    made.stop()


@pytest.fixture
def stranger(port: Port) -> Iterator[Callable[[], socket.socket]]:
    """Return a function that opens one more connection."""
    made: list[socket.socket] = []

    def make() -> socket.socket:
        made.append(connected(port.address))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_who_knows_the_key_gets_in_with_its_claim_beside_silent_ones(
    port: Port, stranger: Callable[[], socket.socket]
) -> None:
    for _ in range(MAX_UNPROVEN - 1):
        stranger()
    with introduced(port.address, KEY, b"one1"), introduced(port.address, KEY, b"two2"):
        port.wait_for([b"one1", b"two2"])


def test_the_oldest_of_too_many_strangers_is_closed(port: Port, stranger: Callable[[], socket.socket]) -> None:
    first, second = stranger(), stranger()
    more = [stranger() for _ in range(MAX_UNPROVEN - 1)]
    assert is_closed(first)
    with introduced(port.address, KEY, b"late"):  # one more
        port.wait_for([b"late"])
    assert is_closed(second)
    more[-1].settimeout(0)
    with pytest.raises(BlockingIOError):
        more[-1].recv(1)


@pytest.mark.parametrize(
    "key", [SharedSecret(b"o" * 32).key("port"), SECRET.key("another port")], ids=["secret", "purpose"]
)
def test_who_does_not_know_the_key_learns_that_the_port_does_not_either(port: Port, key: bytes) -> None:
    with pytest.raises(ProofError, match="listener does not have the same shared secret"):
        introduced(port.address, key, b"fake").close()
    assert port.claims == []


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\nhost: penstock.example\r\n\r\n", b"\xff" * 40, bytes(4096)],
    ids=["another protocol", "noise", "zeros"],
)
def test_a_peer_with_another_protocol_is_closed(port: Port, stranger: Callable[[], socket.socket], said: bytes) -> None:
    connection = stranger()
    connection.sendall(said)
    assert is_closed(connection)


def test_a_forged_and_a_replayed_proof_are_refused(port: Port, stranger: Callable[[], socket.socket]) -> None:
    nonce = shared_secret.new_nonce()

    def shown(make: Callable[[bytes], bytes]) -> tuple[socket.socket, bytes]:
        connection = stranger()
        connection.sendall(shared_secret.hello(nonce))
        proof = make(connection.recv(shared_secret.REPLY_BYTES, socket.MSG_WAITALL))
        connection.sendall(proof)
        return connection, proof

    _, heard = shown(lambda reply: shared_secret.proof(KEY, nonce, reply, b"real"))
    port.wait_for([b"real"])
    for wrong in (heard, b"real" + bytes(32), b"fake" + heard[4:]):
        connection, _ = shown(lambda _, wrong=wrong: wrong)  # type: ignore[misc]
        assert is_closed(connection)
    assert port.claims == [b"real"]


def test_a_proof_may_come_byte_by_byte(port: Port, stranger: Callable[[], socket.socket]) -> None:
    connection, nonce = stranger(), shared_secret.new_nonce()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in shared_secret.hello(nonce):
        connection.send(bytes([byte]))
    reply = connection.recv(shared_secret.REPLY_BYTES, socket.MSG_WAITALL)
    for byte in shared_secret.proof(KEY, nonce, reply, b"slow"):
        connection.send(bytes([byte]))
    port.wait_for([b"slow"])


@pytest.mark.parametrize("said", [b"", shared_secret.hello(bytes(32))[:39], shared_secret.hello(bytes(32))])
def test_a_stalled_peer_is_closed_after_the_timeout(
    stranger: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(module, "PROOF_WITHIN", 0.1)
    connection = stranger()
    connection.sendall(said)
    if len(said) == shared_secret.HELLO_BYTES:
        connection.recv(shared_secret.REPLY_BYTES, socket.MSG_WAITALL)
    assert is_closed(connection)


@pytest.mark.parametrize(
    "error", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPROTO]
)
def test_a_port_goes_on_after_accepting_has_failed(
    port: Port, listener: Listener, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    caplog.set_level(logging.WARNING)
    listener.errors += [error] * 3
    with introduced(port.address, KEY, b"here"):
        port.wait_for([b"here"])
    assert not listener.errors
    assert ("internal port temporarily cannot accept connections" in caplog.text) is (error != errno.ECONNABORTED)
