"""Messages between stages on several hosts arrive whole and in order. A waiting stage gets an error once another one
ends.
"""

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from penstock_common.security.shared_secret import SharedSecret
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.parallel.meeting import Meeting
from penstock_enginecore.parallel.meeting_server import MeetingServer
from penstock_enginecore.parallel.socket_transport import SocketStream, SocketTransport
from penstock_enginecore.parallel.stage_links import StageLinks
from tests.fakes.patience import PATIENCE

SECRET = SharedSecret(b"s" * 32)
WIDTH = 5


def transports_of(num_stages: int) -> list[SocketTransport]:
    server = MeetingServer("127.0.0.1", SECRET)
    meeting = Meeting(server.address, "127.0.0.1", SECRET)
    with ThreadPoolExecutor(num_stages) as threads:
        made = list(threads.map(lambda stage: SocketTransport(meeting, stage, num_stages), range(num_stages)))
    server.close()
    return made


@pytest.fixture
def pair() -> Iterator[list[SocketTransport]]:
    made = transports_of(2)
    yield made
    for each in made:
        each.close()


def message(count: int, first: int = 0) -> torch.Tensor:
    return (torch.arange(first, first + count) % 251).to(torch.uint8)


def test_links_carry_messages_of_any_size_in_both_directions(pair: list[SocketTransport]) -> None:
    first, last = (StageLinks(transport) for transport in pair)
    for each in (first, last):
        each.open(max_tokens=2000, max_seqs=8, width=WIDTH, dtype=torch.float32)
    for step, count in enumerate((1, 2000, 7, 1, 64)):
        states = torch.arange(step, step + count * WIDTH).view(count, WIDTH).float()
        first.send(states)
        arrival = first.tokens()
        assert torch.equal(last.receive(count), states)
        last.release()
        last.send_tokens([step] * (step + 1))
        assert arrival.wait().tolist() == [[step] * (step + 1)]


def test_more_than_the_system_buffers_is_sent_while_nobody_waits(pair: list[SocketTransport]) -> None:
    first, last = pair
    count = 8 * 1024 * 1024
    sent = [first.send(message(count, number), 1, 0) for number in range(2)]
    for number in range(2):
        buffer = torch.zeros(count + 10, dtype=torch.uint8)
        last.receive(buffer, 0, 0).wait()
        assert torch.equal(buffer[:count], message(count, number))
    for each in sent:
        each.wait()


def test_messages_wait_for_a_buffer_and_keep_their_order(pair: list[SocketTransport]) -> None:
    first, last = pair
    for number in range(20):
        first.send(message(100, number), 1, 0).wait()
    buffers = [torch.zeros(100, dtype=torch.uint8) for _ in range(21)]
    pending = [last.receive(each, 0, 0) for each in buffers]
    for number in range(20):
        pending[number].wait()
        assert torch.equal(buffers[number], message(100, number))
    first.send(message(100, 20), 1, 0)
    pending[20].wait()
    assert torch.equal(buffers[20], message(100, 20))


def test_each_stage_reaches_each_other_by_channel() -> None:
    stages = transports_of(3)
    buffer = torch.zeros(8, dtype=torch.uint8)
    for here in stages:
        for there in stages:
            if here is not there:
                for channel in (0, 1):
                    here.send(message(8, 10 * here.stage + channel), there.stage, channel)
                    there.receive(buffer, here.stage, channel).wait()
                    assert torch.equal(buffer, message(8, 10 * here.stage + channel))
    for each in stages:
        each.close()


def test_the_end_of_a_stage_ends_waits_and_all_that_follows(pair: list[SocketTransport]) -> None:
    first, last = pair
    waiting = last.receive(torch.zeros(8, dtype=torch.uint8), 0, 0)
    first.close()
    with pytest.raises(CollectiveBroken, match="stage 0 has closed its connection"):
        waiting.wait()
    with pytest.raises(CollectiveBroken, match="stage 0 has closed its connection"):
        last.receive(torch.zeros(8, dtype=torch.uint8), 0, 0).wait()
    with pytest.raises(CollectiveBroken, match="stage 0 has closed its connection"):
        last.send(message(8), 0, 0).wait()
    own = last.receive(torch.zeros(8, dtype=torch.uint8), 0, 0)
    last.close()
    with pytest.raises(CollectiveBroken):
        own.wait()


def test_a_message_that_is_too_long_breaks_the_connection(pair: list[SocketTransport]) -> None:
    first, last = pair
    waiting = last.receive(torch.zeros(8, dtype=torch.uint8), 0, 0)
    first.send(message(9), 1, 0)
    with pytest.raises(CollectiveBroken, match="stage 0 sends a message of 9 bytes, but the limit is 8 bytes"):
        waiting.wait()


@pytest.mark.parametrize("announced", [2**64 - 1, 2**40])
def test_a_huge_announced_length_takes_no_memory(announced: int) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        stream = SocketStream(0, here)
        stream.receive(memoryview(bytearray(8)), 0)
        there.sendall(struct.pack("!BQ", 0, announced))
        with pytest.raises(CollectiveBroken, match=f"sends a message of {announced} bytes, but the limit is 8 bytes"):
            stream.go_on()


def test_another_secret_is_refused() -> None:
    server = MeetingServer("127.0.0.1", SECRET)
    meeting = Meeting(server.address, "127.0.0.1", SharedSecret(b"o" * 32))
    with pytest.raises(CollectiveBroken, match="does not have the same shared secret"):
        SocketTransport(meeting, 1, 2, timeout_s=PATIENCE)
    server.close()
