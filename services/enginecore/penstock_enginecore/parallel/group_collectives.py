"""What ranks of a data-parallel group exchange, over connections of their own."""

import contextlib
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from penstock_common.errors import ConfigError
from penstock_common.security.shared_secret import SharedSecret
from penstock_common.types.data_parallel import RankGroup
from penstock_enginecore.config import DataParallelConfig
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.parallel.meeting import Meeting
from penstock_enginecore.parallel.meeting_server import MeetingServer
from penstock_enginecore.parallel.rendezvous import Mesh

__all__ = ["CollectiveBroken", "GroupCollectives"]


class GroupCollectives(Protocol):
    """All ranks call the same methods in the same order, each from one thread at a time. Tensors are on the CPU.

    Each method raises CollectiveBroken at once, and every time after that, when ``abort`` is called, here or by another rank, or
    another rank has died. One that has left with ``close`` breaks only what still needs it, so that a collective whose end made a
    rank leave ends well everywhere. A rank that hangs breaks nothing: the others wait until ``abort``.
    """

    rank: int
    size: int
    entered: int
    """Collectives that this rank has begun, whether or not they ended."""

    def exchange(self, row: bytes) -> list[bytes]:
        """The rows of all ranks, which are of one length, by rank."""

    def all_gather_rows(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The rows of all ranks behind one another, ``[sum(counts), ...]``. ``tensor``: ``[counts[rank], ...]``, everywhere of
        one dtype and width. ``counts`` are the same on all ranks.
        """

    def all_to_all_rows(
        self, tensor: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """What the ranks have for this one, by rank, ``[sum(receive_counts), ...]``. ``tensor``: ``[sum(send_counts), ...]``,
        what this one has for each. What a rank sends to another is what that receives from it.
        """

    def abort(self) -> None:
        """End the collective that another thread is in, and all later ones. Waits for nothing. Any thread may call it."""

    def close(self) -> None:
        """Leave, and give back what the group holds. This rank is in no collective: ``abort`` ends one."""


# What one rank exchanges with another in a collective.

_HEADER = struct.Struct("!BQQ")
EXCHANGE, GATHER, ALL_TO_ALL, _GOODBYE = 1, 2, 3, 4
NAMES = {EXCHANGE: "exchange", GATHER: "all-gather", ALL_TO_ALL: "all-to-all", _GOODBYE: "farewell"}


class Peer:
    """A message each way, over a non-blocking connection: of which kind the collective is, the how manieth, how many bytes, and
    these.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self._connection = connection
        self._header = bytearray(_HEADER.size)

    def begin(self, kind: int, number: int, outgoing: memoryview, incoming: memoryview) -> None:
        """``incoming``: what is to be filled."""
        self._expected = (kind, number, len(incoming))
        self._outgoing = [memoryview(_HEADER.pack(kind, number, len(outgoing))), outgoing]
        self._missing_header, self._incoming = memoryview(self._header), incoming

    def go_on(self) -> bool:
        """Send and receive what can be now; whether that was all. Raises OSError where the connection failed, CollectiveBroken
        where it was closed, or the peer is in another collective.
        """
        try:
            with contextlib.suppress(BlockingIOError):
                self._send()
        except BrokenPipeError as e:  # as reading would find; which comes first is chance
            raise self._closed() from e
        with contextlib.suppress(BlockingIOError):
            self._receive()
        return not self._outgoing and not self._missing_header and not self._incoming

    def died(self) -> bool:
        """Whether there is nobody on the other side, who took no leave either."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def take_leave(self) -> None:
        """Tell the other side, as well as may be, that the connection is closed on purpose."""
        with contextlib.suppress(OSError):
            self._connection.send(_HEADER.pack(_GOODBYE, 0, 0))

    def _send(self) -> None:
        while self._outgoing:
            sent = self._connection.sendmsg(self._outgoing)
            while self._outgoing and sent >= len(self._outgoing[0]):
                sent -= len(self._outgoing.pop(0))
            if self._outgoing:
                self._outgoing[0] = self._outgoing[0][sent:]

    def _receive(self) -> None:
        while self._missing_header:
            self._missing_header = self._missing_header[self._read(self._missing_header) :]
            if not self._missing_header:
                self._check()
        while self._incoming:
            self._incoming = self._incoming[self._read(self._incoming) :]

    def _read(self, into: memoryview) -> int:
        count = self._connection.recv_into(into)
        if not count:
            raise self._closed()
        return count

    def _closed(self) -> CollectiveBroken:
        return CollectiveBroken(f"rank {self.rank} has closed its connection")

    def _check(self) -> None:
        found = _HEADER.unpack(self._header)
        if found != self._expected:
            raise CollectiveBroken(f"rank {self.rank} is in {_say(found)}, this rank in {_say(self._expected)}")


def _say(message: tuple[int, int, int]) -> str:
    kind, number, size = message
    return f"collective {number}, {NAMES.get(kind, 'of no kind that is known')} of {size} bytes"


# Not gloo: its collectives cannot be ended from outside, and a small one takes longer.

_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_CHANGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class SocketCollectives:
    """A message to each peer and one from each. Whatever does not fit together breaks the group."""

    def __init__(self, name: str, rank: int, size: int, silence: float = 0.0) -> None:
        """Of the group ``name``, which no other group has: its epoch is part of it. ``silence``: seconds after which a rank whose
        host does not answer any more is lost; 0: once the kernel gives up, which may take a quarter of an hour.
        """
        self.rank, self.size = rank, size
        self.entered = 0
        self._name = name
        self._mesh = Mesh(name, rank, size, silence)
        self._events = select.epoll()
        self._peers: dict[int, Peer] = {}
        self._by_descriptor: dict[int, Peer] = {}
        self._silent: set[Peer] = set()
        """Of which no more will come than has."""
        self._broken = False

    def connect(self, meeting: Meeting, timeout_s: float) -> None:
        """Waits for all ranks, in which ``abort`` ends it. Raises CollectiveBroken, naming who did not come within ``timeout_s``
        seconds.
        """
        if self.size > 1:
            self._mesh.connect(meeting, timeout_s)
        self._events.register(self._mesh.wake, select.EPOLLIN)
        for rank, connection in self._mesh.connections.items():
            self._events.register(connection, _CHANGES)
            self._peers[rank] = self._by_descriptor[connection.fileno()] = Peer(rank, connection)

    def exchange(self, row: bytes) -> list[bytes]:
        rows = [bytearray(len(row)) for _ in range(self.size)]
        rows[self.rank][:] = row
        view = memoryview(row)
        self._move(EXCHANGE, [view] * self.size, [memoryview(each) for each in rows])
        return [bytes(each) for each in rows]

    def all_gather_rows(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        if len(tensor) != counts[self.rank]:
            raise ValueError(f"tensor has {len(tensor)} rows, counts[{self.rank}] is {counts[self.rank]}")
        gathered = tensor.new_empty(sum(counts), *tensor.shape[1:])
        parts = torch.split(gathered, list(counts))
        parts[self.rank].copy_(tensor)
        self._move(GATHER, [_bytes_of(tensor.contiguous())] * self.size, [_bytes_of(part) for part in parts])
        return gathered

    def all_to_all_rows(
        self, tensor: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        own_sent, own_received = send_counts[self.rank], receive_counts[self.rank]
        if len(tensor) != sum(send_counts) or own_sent != own_received:
            raise ValueError(
                f"tensor has {len(tensor)} rows, send_counts are {list(send_counts)}; rank {self.rank} sends itself {own_sent} "
                f"rows and receives {own_received}"
            )
        received = tensor.new_empty(sum(receive_counts), *tensor.shape[1:])
        sent = torch.split(tensor.contiguous(), list(send_counts))
        parts = torch.split(received, list(receive_counts))
        parts[self.rank].copy_(sent[self.rank])
        self._move(ALL_TO_ALL, [_bytes_of(part) for part in sent], [_bytes_of(part) for part in parts])
        return received

    def abort(self) -> None:
        self._mesh.give_up()

    def close(self) -> None:
        for peer in () if self._mesh.given_up else self._peers.values():
            peer.take_leave()
        self._broken = True
        self._events.close()
        self._mesh.close()

    def _move(self, kind: int, outgoing: Sequence[memoryview], incoming: Sequence[memoryview]) -> None:
        """One message out and one in per peer, by rank."""
        self.entered += 1
        if self._broken or self._mesh.given_up:
            raise CollectiveBroken(f"group {self._name} is broken")
        for rank, peer in self._peers.items():
            peer.begin(kind, self.entered, outgoing[rank], incoming[rank])
        try:
            unfinished = [peer for peer in self._peers.values() if not peer.go_on()]
            while unfinished:
                self._look_for_dead()
                self._wait()
                unfinished = [peer for peer in unfinished if not peer.go_on()]
        except (OSError, CollectiveBroken) as e:
            self._broken = True
            raise CollectiveBroken(f"{NAMES[kind]} {self.entered} of group {self._name} broke off: {e}") from e

    def _look_for_dead(self) -> None:
        """Raises CollectiveBroken where a peer has died, also behind a message that was complete: the others end with it."""
        for peer in self._silent:
            if peer.died():
                raise CollectiveBroken(f"rank {peer.rank} has closed its connection")

    def _wait(self) -> None:
        """Until a connection has changed."""
        changes = self._events.poll()
        if self._mesh.given_up:
            raise CollectiveBroken("this rank gave it up")
        self._silent |= {self._by_descriptor[descriptor] for descriptor, change in changes if change & _GONE}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of ``tensor``, which is contiguous."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


# How a rank meets the others of its group.

_LOOPBACK = "127.0.0.1"


class SocketLink:
    """A ``GroupLink``; ``collectives`` are those of the group, which steps use as well."""

    def __init__(self, group: RankGroup, rank: int, meeting: Meeting, timeout: float, silence: float) -> None:
        """Meets nobody yet. ``timeout``: seconds in which all have to come. ``silence``: see ``SocketCollectives``."""
        self.collectives = SocketCollectives(f"group-{group.epoch}", rank, len(group.members), silence)
        self._meeting = meeting
        self._timeout = timeout

    def connect(self) -> None:
        """See ``GroupLink``. Raises CollectiveBroken."""
        self.collectives.connect(self._meeting, self._timeout)

    def exchange(self, row: bytes) -> list[bytes]:
        """See ``GroupLink``. Raises CollectiveBroken."""
        return self.collectives.exchange(row)

    def abort(self) -> None:
        self.collectives.abort()

    def close(self) -> None:
        self.collectives.close()


class SocketLinks:
    """Makes links, and keeps the store at which a group meets whose first rank this one is."""

    def __init__(self, config: DataParallelConfig, rank: str, secret: SharedSecret | None = None) -> None:
        """``rank``: this one's name. ``secret``: by which ranks recognize each other. Listens on a free port. Raises ConfigError
        where this host has no such address.
        """
        self.lease = 0.0
        self._rank = rank
        self._timeout = config.connect_timeout
        self._address = config.address
        self._secret = secret
        try:
            self._server = MeetingServer(config.address or _LOOPBACK, secret)
        except OSError as e:
            raise ConfigError(
                f"data_parallel.address is {config.address!r}, where nothing can listen here: {e}"
            ) from None
        self.meeting_address = self._server.address

    def make(self, group: RankGroup, meetings: Mapping[str, str]) -> SocketLink:
        """The link of a group that this rank is in. Raises CollectiveBroken where nobody knows its first rank's store."""
        if group.members[0] not in meetings:
            raise CollectiveBroken(f"nobody has told where {group.members[0]} is met")
        meeting = Meeting(at=meetings[group.members[0]], address=self._address, secret=self._secret)
        return SocketLink(group, group.members.index(self._rank), meeting, self._timeout, self.lease)
