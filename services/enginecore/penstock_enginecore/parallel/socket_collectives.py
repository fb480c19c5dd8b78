"""``GroupCollectives`` over connections of their own.

Not gloo: its collectives cannot be ended from outside, and a small one takes longer.
"""

import select
from collections.abc import Sequence

import torch

from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.parallel.meeting import Meeting
from penstock_enginecore.parallel.mesh import Mesh
from penstock_enginecore.parallel.peer import ALL_TO_ALL, EXCHANGE, GATHER, NAMES, Peer

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
