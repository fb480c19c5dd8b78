"""The store at which processes of several hosts find each other, and torch's groups that meet there."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from penstock_common import addresses
from penstock_enginecore.parallel.collectives import GlooCollectives
from penstock_enginecore.parallel.gloo import Meeting
from penstock_enginecore.parallel.meeting_server import MeetingServer
from penstock_enginecore.parallel.meeting_store import GET, REQUEST, SET, MeetingStore
from tests.fakes.patience import PATIENCE


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request: pytest.FixtureRequest) -> Iterator[MeetingServer]:
    made = MeetingServer(request.param)
    yield made
    made.close()


def connected(server: MeetingServer) -> socket.socket:
    return socket.create_connection(addresses.split(server.address), PATIENCE)


@pytest.fixture
def store(server: MeetingServer) -> Iterator[Callable[[], MeetingStore]]:
    """Makes one more client."""
    made: list[MeetingStore] = []

    def make() -> MeetingStore:
        made.append(MeetingStore(connected(server), PATIENCE))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_what_one_says_the_others_get(store: Callable[[], MeetingStore]) -> None:
    first, second = store(), store()
    assert not second.check(["a"])
    first.set("a", b"\0bytes")
    first.set("text", "of 日本")
    first.set("long", bytes(60_000))
    assert second.check(["a", "text"])
    assert not second.check(["a", "b"])
    assert [second.get(key) for key in ("a", "text", "long")] == [b"\0bytes", "of 日本".encode(), bytes(60_000)]


def test_everybody_who_waits_is_answered_once_it_is_said(store: Callable[[], MeetingStore]) -> None:
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(store().get, "late") for _ in range(3)]
        store().set("other", b"")
        assert not any(each.done() for each in waiting)
        store().set("late", b"now")
        assert [each.result(PATIENCE) for each in waiting] == [b"now"] * 3


def test_a_wait_ends_after_its_time_and_takes_no_other_answer(store: Callable[[], MeetingStore]) -> None:
    hasty = store()
    with pytest.raises(TimeoutError):
        hasty.wait(["never"], timedelta(seconds=0.01))
    store().set("never", b"late")
    with pytest.raises(OSError, match="Bad file descriptor"):
        hasty.check(["other"])


def test_groups_of_torch_meet_there(server: MeetingServer) -> None:
    meeting = Meeting(server.address, addresses.split(server.address)[0])

    def add_up(rank: int) -> list[float]:
        group = GlooCollectives(meeting, rank, 3)
        return [group.all_reduce(torch.tensor([float(rank), turn])).tolist() for turn in range(2)]  # type: ignore[return-value]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(add_up, range(3))) == [[[3.0, 0.0], [3.0, 3.0]]] * 3


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n" + bytes(131_072),
        REQUEST.pack(b"?", 1, 0) + b"a",
        REQUEST.pack(SET, 1, 0) + b"\xff",
    ],
    ids=["another protocol", "no question", "no text"],
)
def test_who_does_not_keep_to_the_rules_is_hung_up_on(
    server: MeetingServer, store: Callable[[], MeetingStore], said: bytes
) -> None:
    with connected(server) as stranger:
        stranger.sendall(said)
        with pytest.raises(ConnectionError):
            if not stranger.recv(1):
                raise ConnectionError
    store().set("a", b"1")
    assert store().get("a") == b"1"


def test_who_is_mute_or_goes_while_it_waits_holds_up_nobody(
    server: MeetingServer, store: Callable[[], MeetingStore]
) -> None:
    with connected(server) as mute, connected(server) as waiting:
        mute.sendall(REQUEST.pack(SET, 4, 4) + b"ha")
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
