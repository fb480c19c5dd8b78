"""What an end of a stream sends: messages in order, and large tensors in chunks that take turns with them."""

from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from penstock_common.tensors.sizes import Buffer, Limits

M = TypeVar("M")


class TensorRef(NamedTuple):
    """How a message refers to a tensor in chunks. ``keep``: a later message does so too."""

    transfer_id: int
    size: int
    keep: bool


class Chunk(NamedTuple):
    """A piece of a tensor; ``abandoned``: none, and no message will refer to what was sent."""

    transfer_id: int
    offset: int
    data: bytes
    abandoned: bool = False


MakeMessage: TypeAlias = Callable[[TensorRef | None], M]
"""Makes a message when it is its turn. The reference is that of its tensor, if it has one."""


class _Transfer(Generic[M]):
    """A tensor on its way, and the keys of messages that wait for its last chunk. ``num_users``: messages still to be sent."""

    __slots__ = ("data", "num_users", "offset", "started", "transfer_id", "waiting")

    def __init__(self, data: Buffer) -> None:
        self.data = data
        self.transfer_id = 0
        self.offset = 0
        self.started = False
        self.num_users = 0
        self.waiting: list[_Entry[M]] = []


class _Entry(Generic[M]):
    """A message to come. ``key``: its request's id, ``""`` where it cannot be discarded."""

    __slots__ = ("key", "make", "transfer")

    def __init__(self, make: MakeMessage[M], key: str, transfer: _Transfer[M] | None) -> None:
        self.make = make
        self.key = key
        self.transfer = transfer


class Outgoing(Generic[M]):
    """A queue of messages. One with a tensor waits until that is out in chunks; then it goes to the end of the queue.

    Messages with the same tensor object share its chunks. Between two chunks there is a message, if one is due, and the chunks
    of several tensors take turns. Not more than the limits' ``max_tensor_bytes`` are under way at once: the rest waits, in
    order. Messages are made when they are sent, not before: what is large is there once.
    """

    def __init__(self, chunk: Callable[[Chunk], M]) -> None:
        """``chunk`` makes the message of a chunk."""
        self._chunk = chunk
        self._limits = Limits(0, 0)
        self._due: deque[_Entry[M]] = deque()
        self._transfers: dict[
            int, _Transfer[M]
        ] = {}  # by identity of the tensor: each is held here, so the ids stay unique
        self._starting: deque[_Transfer[M]] = deque()
        self._sending: deque[_Transfer[M]] = deque()
        self._abandoned: deque[Chunk] = deque()
        self._num_bytes = 0
        self._last_id = 0
        self._was_chunk = False

    def limit(self, limits: Limits) -> None:
        """What the other end takes. To be called before the first tensor."""
        self._limits = limits

    def put(self, make: MakeMessage[M], tensor: Buffer | None = None, *, key: str = "") -> None:
        """Queue a message. A ``tensor`` must not have more bytes than the limit on all of them."""
        transfer = self._transfer(tensor) if tensor is not None else None
        entry = _Entry(make, key, transfer)
        if transfer is None:
            self._due.append(entry)
            return
        transfer.num_users += 1
        if transfer.started and transfer.offset == len(transfer.data):
            self._due.append(entry)
        else:
            transfer.waiting.append(entry)

    def discard(self, keys: Collection[str]) -> list[str]:
        """Drop those of the messages that still wait for their tensors. Returns their keys."""
        dropped = []
        for transfer in list(self._transfers.values()):
            gone = [entry for entry in transfer.waiting if entry.key in keys]
            if not gone:
                continue
            dropped += [entry.key for entry in gone]
            transfer.waiting = [entry for entry in transfer.waiting if entry.key not in keys]
            transfer.num_users -= len(gone)
            if not transfer.num_users:
                self._abandon(transfer)
        return dropped

    def __bool__(self) -> bool:
        """Whether there is something to send."""
        self._start()
        return bool(self._due or self._sending or self._abandoned)

    def next(self) -> M:
        """The next message. Raises what making it raised; IndexError when there is none."""
        self._start()
        if self._abandoned:
            return self._chunk(self._abandoned.popleft())
        if self._sending and (self._was_chunk is False or not self._due):
            self._was_chunk = True
            return self._chunk(self._next_chunk())
        self._was_chunk = False
        entry = self._due.popleft()
        if entry.transfer is None:
            return entry.make(None)
        ref = self._refer(entry.transfer)
        try:
            return entry.make(ref)
        except Exception:
            if not ref.keep:
                self._abandoned.append(Chunk(ref.transfer_id, ref.size, b"", abandoned=True))
            raise

    def _transfer(self, tensor: Buffer) -> _Transfer[M]:
        known = self._transfers.get(id(tensor))
        if known is None:
            known = self._transfers[id(tensor)] = _Transfer[M](tensor)
            self._starting.append(known)
        return known

    def _start(self) -> None:
        while self._starting and self._num_bytes + len(self._starting[0].data) <= self._limits.max_tensor_bytes:
            transfer = self._starting.popleft()
            self._last_id += 1
            transfer.transfer_id, transfer.started = self._last_id, True
            self._num_bytes += len(transfer.data)
            self._sending.append(transfer)

    def _next_chunk(self) -> Chunk:
        transfer = self._sending.popleft()
        start = transfer.offset
        data = bytes(memoryview(transfer.data)[start : start + self._limits.chunk_bytes])
        transfer.offset = start + len(data)
        if transfer.offset < len(transfer.data):
            self._sending.append(transfer)
        else:
            self._due.extend(transfer.waiting)
            transfer.waiting.clear()
        return Chunk(transfer.transfer_id, start, data)

    def _refer(self, transfer: _Transfer[M]) -> TensorRef:
        transfer.num_users -= 1
        if not transfer.num_users:
            self._forget(transfer)
        return TensorRef(transfer.transfer_id, len(transfer.data), keep=transfer.num_users > 0)

    def _abandon(self, transfer: _Transfer[M]) -> None:
        """Nobody waits for it any more."""
        if not transfer.started:
            self._starting.remove(transfer)
            del self._transfers[id(transfer.data)]
            return
        self._sending.remove(transfer)
        if transfer.offset:
            self._abandoned.append(Chunk(transfer.transfer_id, transfer.offset, b"", abandoned=True))
        self._forget(transfer)

    def _forget(self, transfer: _Transfer[M]) -> None:
        del self._transfers[id(transfer.data)]
        self._num_bytes -= len(transfer.data)
