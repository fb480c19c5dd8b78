"""Collectives of a group: as threads, over sockets, and as processes that die and hang."""

import multiprocessing
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock_common import addresses
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.parallel.group_collectives import EXCHANGE, GroupCollectives, Peer, SocketCollectives
from penstock_enginecore.parallel.meeting import Meeting
from penstock_enginecore.parallel.meeting_server import MeetingServer
from tests.fakes.engines.thread_group import thread_group
from tests.fakes.patience import PATIENCE


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    server = MeetingServer("127.0.0.1")
    yield Meeting(server.address)
    server.close()


def run(groups: list[Any], work: Callable[[Any], Any]) -> list[Future[Any]]:
    """Run ``work`` of each rank in threads, and wait until all have ended."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return [pool.submit(work, group) for group in groups]


def connected(meeting: Meeting, size: int, name: str = "group-1") -> list[SocketCollectives]:
    groups = [SocketCollectives(name, rank, size) for rank in range(size)]
    for future in run(groups, lambda group: group.connect(meeting, PATIENCE)):
        future.result()
    return groups


@pytest.fixture(params=["threads", "sockets"])
def make(request: pytest.FixtureRequest, meeting: Meeting) -> Iterator[Callable[[int], list[GroupCollectives]]]:
    made: list[GroupCollectives] = []

    def make(size: int) -> list[GroupCollectives]:
        made.extend(thread_group(size) if request.param == "threads" else connected(meeting, size))
        return made

    yield make
    for group in made:
        group.close()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_gets_the_rows_of_all_in_order(make: Callable[[int], list[GroupCollectives]], size: int) -> None:
    groups = make(size)
    for turn in range(3):
        rows = [bytes([turn, rank]) for rank in range(size)]
        for future in run(groups, lambda group, rows=rows: group.exchange(rows[group.rank])):
            assert future.result() == rows
    assert [group.entered for group in groups] == [3] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_rows_are_gathered_whose_number_differs_by_rank(
    make: Callable[[int], list[GroupCollectives]], dtype: torch.dtype
) -> None:
    groups, counts = make(3), [2, 0, 5]
    whole = torch.arange(7 * 3).view(7, 3).to(dtype)
    parts = whole.split(counts)
    for future in run(groups, lambda group: group.all_gather_rows(parts[group.rank], counts)):
        assert torch.equal(future.result(), whole)


def test_each_rank_gets_what_the_others_have_for_it(make: Callable[[int], list[GroupCollectives]]) -> None:
    groups = make(3)
    counts = [[1, 0, 2], [0, 0, 0], [3, 1, 1]]  # by sender
    sent = [torch.randn(sum(each), 2) for each in counts]

    def work(group: GroupCollectives) -> torch.Tensor:
        receive = [each[group.rank] for each in counts]
        return group.all_to_all_rows(sent[group.rank], counts[group.rank], receive)

    for rank, future in enumerate(run(groups, work)):
        expected = [sent[peer].split(counts[peer])[rank] for peer in range(3)]
        assert torch.equal(future.result(), torch.cat(expected))


def test_more_bytes_than_sockets_hold_pass_both_ways_at_once(make: Callable[[int], list[GroupCollectives]]) -> None:
    groups, count = make(2), 6 * 1024 * 1024
    sent = [torch.randint(0, 255, (2 * count,), dtype=torch.uint8) for _ in groups]
    work = lambda group: group.all_to_all_rows(sent[group.rank], [count] * 2, [count] * 2)  # noqa: E731 - as of others
    for rank, future in enumerate(run(groups, work)):
        assert torch.equal(future.result(), torch.cat([each.split(count)[rank] for each in sent]))


def test_abort_ends_a_wait_on_either_side_and_all_that_follows(make: Callable[[int], list[GroupCollectives]]) -> None:
    first, second, _ = make(3)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(group.exchange, b"row") for group in (first, second)]
        first.abort()
        for future in waiting:
            with pytest.raises(CollectiveBroken):
                future.result(PATIENCE)
    for group in (second, first, second, first):  # connections that the other side has shut down already
        group.abort()
    for group in (first, second):
        with pytest.raises(CollectiveBroken):
            group.exchange(b"row")


def test_a_rank_that_has_left_after_a_collective_breaks_none_that_it_was_in(
    make: Callable[[int], list[GroupCollectives]],
) -> None:
    first, second, last = make(3)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(group.all_gather_rows, torch.ones(1), [1, 1, 0]) for group in (first, second)]
        last.all_gather_rows(torch.ones(0), [1, 1, 0])
        last.close()
        for future in waiting:
            assert torch.equal(future.result(PATIENCE), torch.ones(2))
        for future in [pool.submit(group.exchange, b"row") for group in (first, second)]:
            with pytest.raises(CollectiveBroken):
                future.result(PATIENCE)


def test_a_rank_that_dies_behind_its_row_ends_the_wait_for_the_others(meeting: Meeting) -> None:
    first, second, last = connected(meeting, 3)
    events, row = second._events, second._mesh.connections[0]
    dying: list[Future[list[bytes]]] = []

    def poll() -> list[tuple[int, int]]:  # the row and the end of the connection are seen at once
        dying.append(pool.submit(first.exchange, b"row"))
        select.select([row], [], [], PATIENCE)
        first.abort()
        ended = select.poll()
        ended.register(row, select.POLLRDHUP)
        ended.poll(PATIENCE * 1000)
        second._events = events
        return events.poll()

    second._events = SimpleNamespace(poll=poll)  # type: ignore[assignment]
    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(CollectiveBroken):
            pool.submit(second.exchange, b"row").result(PATIENCE)
        with pytest.raises(CollectiveBroken):
            dying[0].result(PATIENCE)
    for group in (first, second, last):
        group.close()


def test_ranks_in_different_collectives_are_told(make: Callable[[int], list[GroupCollectives]]) -> None:
    works: list[Callable[[GroupCollectives], object]] = [
        lambda group: group.exchange(b"row"),
        lambda group: group.all_gather_rows(torch.zeros(2), [2, 2]),
    ]
    with pytest.raises(CollectiveBroken, match=r"rank \d is in"):
        for future in run(make(2), lambda group: works[group.rank](group)):
            future.result()


def test_rows_that_are_not_as_many_as_was_said_are_refused(meeting: Meeting) -> None:
    [alone] = connected(meeting, 1)
    with pytest.raises(ValueError, match=r"tensor has 2 rows, but counts\[0\] is 3"):
        alone.all_gather_rows(torch.zeros(2), [3])
    with pytest.raises(ValueError, match=r"2 rows, send_counts is \[2\]; rank 0 sends itself 2 rows and receives 1"):
        alone.all_to_all_rows(torch.zeros(2), [2], [1])
    alone.close()


# Tests of how ranks connect.


def test_a_rank_that_does_not_come_is_named(meeting: Meeting) -> None:
    group = SocketCollectives("group-1", 0, 3)
    with pytest.raises(CollectiveBroken, match="rank 0 of group group-1 timed out waiting for rank 1, 2"):
        group.connect(meeting, 0.05)
    group.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_abort_ends_a_wait_for_ranks_that_do_not_come(meeting: Meeting, rank: int) -> None:
    group = SocketCollectives("group-1", rank, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(group.connect, meeting, PATIENCE)
        group.abort()
        with pytest.raises(CollectiveBroken, match="was given up"):
            waiting.result(PATIENCE)
    group.close()


def test_a_store_that_is_gone_breaks_the_group() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    group = SocketCollectives("group-1", 1, 2)
    with pytest.raises(CollectiveBroken, match="rank 1 of group group-1 cannot reach all other ranks.*refused"):
        group.connect(Meeting(f"127.0.0.1:{port}"), PATIENCE)
    group.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_abort_ends_a_wait_for_a_host_that_does_not_answer(rank: int) -> None:
    """A listener with a full queue drops connections, like an unreachable host."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        filling = [socket.socket() for _ in range(4)]
        for each in filling:
            each.setblocking(False)
            each.connect_ex(address)
        group = SocketCollectives("group-1", rank, 2)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(group.connect, Meeting(addresses.with_port(*address)), PATIENCE)
            group.abort()
            with pytest.raises(CollectiveBroken, match="was given up"):
                waiting.result(PATIENCE)
        group.close()
        for each in filling:
            each.close()


def test_connections_are_given_up_when_the_other_host_is_silent(meeting: Meeting) -> None:
    groups = [SocketCollectives("group-1", rank, 2, silence=6.0) for rank in range(2)]
    for future in run(groups, lambda group: group.connect(meeting, PATIENCE)):
        future.result()
    options = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
    for group in groups:
        for connection in group._mesh.connections.values():
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [6000, 2, 2]
        group.close()


def test_two_epochs_of_a_group_do_not_mix(meeting: Meeting) -> None:
    old, new = connected(meeting, 2, "group-1"), connected(meeting, 2, "group-2")
    for group in old:
        group.abort()
    for future in run(new, lambda group: group.exchange(b"row")):
        assert future.result() == [b"row"] * 2
    for group in (*old, *new):
        group.close()


# Tests with separate processes.


def _exchange_forever(port: int, rank: int, size: int, told: Connection) -> None:
    group = SocketCollectives("processes", rank, size)
    group.connect(Meeting(f"127.0.0.1:{port}"), PATIENCE)
    for turn in range(10_000_000):
        try:
            group.exchange(b"row")
        except CollectiveBroken as e:
            told.send(str(e))
            return
        if turn == 0:
            told.send("began")


@pytest.fixture
def other(meeting: Meeting) -> Iterator[tuple[SocketCollectives, Any, Connection]]:
    """Yield this process as rank 0, a new process as rank 1, and the pipe of its messages."""
    context = multiprocessing.get_context("spawn")
    hear, told = context.Pipe(duplex=False)
    port = addresses.split(str(meeting.at))[1]
    process = context.Process(target=_exchange_forever, args=(port, 1, 2, told), daemon=True)
    process.start()
    group = SocketCollectives("processes", 0, 2)
    group.connect(meeting, PATIENCE)
    group.exchange(b"row")
    assert hear.recv() == "began"
    yield group, process, hear
    group.close()
    process.kill()
    process.join(PATIENCE)


def test_a_killed_rank_breaks_the_collective(other: tuple[SocketCollectives, Any, Connection]) -> None:
    group, process, _ = other
    process.kill()
    with pytest.raises(CollectiveBroken, match=r"of group processes failed"):
        for _ in range(100):
            group.exchange(b"row")


def test_a_closed_connection_is_named_where_writing_finds_it_as_well() -> None:
    own, theirs = socket.socketpair()
    theirs.close()
    peer = Peer(1, own)
    peer.begin(EXCHANGE, 1, memoryview(b"row"), memoryview(bytearray(3)))
    with own, pytest.raises(CollectiveBroken, match="rank 1 has closed its connection"):
        peer.go_on()


def test_a_stopped_rank_is_waited_for_until_the_group_is_given_up(
    other: tuple[SocketCollectives, Any, Connection],
) -> None:
    group, process, hear = other
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

    def exchange() -> None:
        for _ in range(100):
            group.exchange(b"row")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(exchange)
        group.abort()
        with pytest.raises(CollectiveBroken):
            waiting.result(PATIENCE)
    os.kill(process.pid, signal.SIGCONT)
    assert hear.poll(PATIENCE)
    assert "rank 0 has closed its connection" in hear.recv()
