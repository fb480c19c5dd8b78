"""Collective operations of a data-parallel group, over one connection between each pair of ranks."""

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
    """Collective operations of a data-parallel group. All ranks call the same methods in the same order. On each rank,
    only one thread at a time may call methods. Tensors are on the CPU.

    If ``abort`` is called on any rank, or if a rank dies, the running methods of all ranks raise CollectiveBroken
    immediately. All later calls raise this error too. If a rank leaves with ``close``, only operations that still need
    data from this rank fail. Therefore, if the result of an operation makes a rank leave, this operation still
    completes on all ranks. If a rank hangs, no error is raised, and the other ranks wait until ``abort`` is called.
    """

    rank: int
    size: int
    entered: int
    """Number of collective operations that this rank has begun, including operations that are not complete."""

    def exchange(self, row: bytes) -> list[bytes]:
        """Return the rows of all ranks, in rank order. The rows of all ranks must have the same length."""

    def all_gather_rows(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the rows of all ranks, concatenated in rank order: ``[sum(counts), ...]``.

        Args:
            tensor: ``[counts[rank], ...]``, with the same dtype and width on all ranks.
            counts: Number of rows of each rank, the same on all ranks.
        """

    def all_to_all_rows(
        self, tensor: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """Return the rows that all ranks send to this rank, in rank order: ``[sum(receive_counts), ...]``.

        Args:
            tensor: ``[sum(send_counts), ...]``: the rows for each rank, in rank order.
            send_counts: Number of rows of ``tensor`` to send to each rank.
            receive_counts: Number of rows to receive from each rank. Must match the senders' ``send_counts``.
        """

    def abort(self) -> None:
        """Make the operation that runs on another thread, and all later operations, raise CollectiveBroken. Does not
        wait. Thread-safe.
        """

    def close(self) -> None:
        """Leave the group and free its resources. Must not be called during an operation; use ``abort`` to end an
        operation.
        """


# Messages between two ranks in a collective operation.

_HEADER = struct.Struct("!BQQ")
EXCHANGE, GATHER, ALL_TO_ALL, _GOODBYE = 1, 2, 3, 4
NAMES = {EXCHANGE: "exchange", GATHER: "all-gather", ALL_TO_ALL: "all-to-all", _GOODBYE: "farewell"}


class Peer:
    """Connection to one other rank, over which each collective operation exchanges one message in each direction
    without blocking.

    A message consists of a header and data. The header has the kind and the number of the operation, and the size of
    the data in bytes.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self._connection = connection
        self._header = bytearray(_HEADER.size)

    def begin(self, kind: int, number: int, outgoing: memoryview, incoming: memoryview) -> None:
        """Start the exchange of two messages. The received data is written to ``incoming``."""
        self._expected = (kind, number, len(incoming))
        self._outgoing = [memoryview(_HEADER.pack(kind, number, len(outgoing))), outgoing]
        self._missing_header, self._incoming = memoryview(self._header), incoming

    def go_on(self) -> bool:
        """Send and receive as much as is possible without waiting. Returns whether the exchange is complete.

        Raises:
            OSError: The connection failed.
            CollectiveBroken: The peer closed the connection, or is in another collective operation.
        """
        try:
            with contextlib.suppress(BlockingIOError):
                self._send()
        # Raise the same error as for a failed read, because either the read or the write may detect the closed
        # connection first.
        except BrokenPipeError as e:
            raise self._closed() from e
        with contextlib.suppress(BlockingIOError):
            self._receive()
        return not self._outgoing and not self._missing_header and not self._incoming

    def died(self) -> bool:
        """Return whether the peer has closed the connection without first sending the message that ``take_leave``
        sends.
        """
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def take_leave(self) -> None:
        """Tell the peer, if possible, that this rank closes the connection on purpose."""
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
            raise CollectiveBroken(f"rank {self.rank} is in {_say(found)}, but this rank is in {_say(self._expected)}")


def _say(message: tuple[int, int, int]) -> str:
    kind, number, size = message
    return f"collective {number}, {NAMES.get(kind, 'of unknown kind')} of {size} bytes"


# Gloo is not used, because gloo's collective operations cannot be aborted, and are slower for small tensors.

_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_CHANGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class SocketCollectives:
    """``GroupCollectives`` over sockets. An operation exchanges one message with each other rank in each direction. If
    the messages of ranks do not match, the group is broken.
    """

    def __init__(self, name: str, rank: int, size: int, silence: float = 0.0) -> None:
        """Create the collectives of the group ``name``, which must be unique and include the epoch.

        ``silence`` is the time in seconds after which a rank counts as lost if its host does not answer. If ``silence``
        is 0, the operating system's timeout applies, which may be 15 minutes.
        """
        self.rank, self.size = rank, size
        self.entered = 0
        self._name = name
        self._mesh = Mesh(name, rank, size, silence)
        self._events = select.epoll()
        self._peers: dict[int, Peer] = {}
        self._by_descriptor: dict[int, Peer] = {}
        self._silent: set[Peer] = set()
        """Ranks that have closed their connection, so they will send no more data."""
        self._broken = False

    def connect(self, meeting: Meeting, timeout_s: float) -> None:
        """Wait until all ranks are connected. ``abort`` ends the wait. After ``timeout_s`` seconds, raises
        CollectiveBroken with the names of the missing ranks.
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
            raise ValueError(f"tensor has {len(tensor)} rows, but counts[{self.rank}] is {counts[self.rank]}")
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
                f"the counts do not match: tensor has {len(tensor)} rows, send_counts is {list(send_counts)}; "
                f"rank {self.rank} sends itself {own_sent} rows and receives {own_received}"
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
        """Exchange one message with each other rank in each direction. ``outgoing`` has the data for each rank, and
        ``incoming`` the memory for the data of each rank.
        """
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
            raise CollectiveBroken(f"{NAMES[kind]} {self.entered} of group {self._name} failed: {e}") from e

    def _look_for_dead(self) -> None:
        """Raise CollectiveBroken if another rank has died. The error is raised even if the dead rank's message is
        complete, because the remaining ranks raise the same error.
        """
        for peer in self._silent:
            if peer.died():
                raise CollectiveBroken(f"rank {peer.rank} has closed its connection")

    def _wait(self) -> None:
        """Wait until a connection can be read or written. Raises CollectiveBroken if this rank has aborted the group."""
        changes = self._events.poll()
        if self._mesh.given_up:
            raise CollectiveBroken("this rank has aborted the group")
        self._silent |= {self._by_descriptor[descriptor] for descriptor, change in changes if change & _GONE}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of ``tensor``, which must be contiguous."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


# Links of a rank to its data-parallel group.

_LOOPBACK = "127.0.0.1"


class SocketLink:
    """``GroupLink`` over sockets. Exchanges before steps and forward passes use the same ``collectives``."""

    def __init__(self, group: RankGroup, rank: int, meeting: Meeting, timeout: float, silence: float) -> None:
        """Create an unconnected link. ``timeout`` is the number of seconds within which all ranks must connect. For
        ``silence``, see ``SocketCollectives``.
        """
        self.collectives = SocketCollectives(f"group-{group.epoch}", rank, len(group.members), silence)
        self._meeting = meeting
        self._timeout = timeout

    def connect(self) -> None:
        """Connect to all ranks of the group, see ``GroupLink``. Raises CollectiveBroken if not all ranks can be reached
        in time.
        """
        self.collectives.connect(self._meeting, self._timeout)

    def exchange(self, row: bytes) -> list[bytes]:
        """Exchange rows with all ranks of the group, see ``GroupLink``. Raises CollectiveBroken if the connection to a
        rank is lost.
        """
        return self.collectives.exchange(row)

    def abort(self) -> None:
        self.collectives.abort()

    def close(self) -> None:
        self.collectives.close()


class SocketLinks:
    """Creates links to data-parallel groups. Also runs the rendezvous store, through which ranks find each other, for
    groups whose first rank is this rank.
    """

    def __init__(self, config: DataParallelConfig, rank: str, secret: SharedSecret | None = None) -> None:
        """Listen on a free port. Raises ConfigError if this host does not have the configured address.

        Args:
            config: Config of data parallelism.
            rank: Name of this rank in log lines and errors.
            secret: Secret with which ranks authenticate each other.
        """
        self.lease = 0.0
        self._rank = rank
        self._timeout = config.connect_timeout
        self._address = config.address
        self._secret = secret
        try:
            self._server = MeetingServer(config.address or _LOOPBACK, secret)
        except OSError as e:
            raise ConfigError(f"cannot bind to data_parallel.address {config.address!r}: {e}") from None
        self.meeting_address = self._server.address

    def make(self, group: RankGroup, meetings: Mapping[str, str]) -> SocketLink:
        """Create the link to a group that contains this rank. Raises CollectiveBroken if the address of the rendezvous
        store, which the group's first rank runs, is unknown.
        """
        if group.members[0] not in meetings:
            raise CollectiveBroken(f"the meeting address of {group.members[0]} is unknown")
        meeting = Meeting(at=meetings[group.members[0]], address=self._address, secret=self._secret)
        return SocketLink(group, group.members.index(self._rank), meeting, self._timeout, self.lease)
