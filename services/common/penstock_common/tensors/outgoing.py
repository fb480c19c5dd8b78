"""What an end of a stream sends: messages in order, and large tensors in chunks that take turns with them."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from penstock_common.tensors.sizes import Buffer, Limits

M = TypeVar("M")


class TensorRef(NamedTuple):
    """How a message refers to a tensor in chunks. ``keep``: a later message does so too."""

    transfer_id: int
    size: int
    keep: bool


class Chunk(NamedTuple):
    """A piece of a tensor; ``abandoned``: none, and no message will refer to what was sent. ``size``: bytes of the whole tensor,
    which the first piece announces; 0 in later pieces.
    """

    transfer_id: int
    offset: int
    data: bytes
    abandoned: bool = False
    size: int = 0


MakeMessage: TypeAlias = Callable[[Sequence[TensorRef]], M]
"""Makes a message when it is its turn. The references are those of its tensors, in their order."""

WhichTensors: TypeAlias = Callable[[], Sequence[Buffer]]
"""The tensors that a message needs in chunks. Asked when it is put, and again when it is its turn: what it answers then holds."""


def no_tensors() -> Sequence[Buffer]:
    """Of a message that has none."""
    return ()


class _Transfer:
    """A tensor on its way. ``num_users``: messages that hold it and are still to be sent."""

    __slots__ = ("data", "num_users", "offset", "transfer_id")

    def __init__(self, data: Buffer, transfer_id: int) -> None:
        self.data = data
        self.transfer_id = transfer_id
        self.offset = 0
        self.num_users = 0

    @property
    def is_out(self) -> bool:
        """Whether its last chunk was sent."""
        return self.offset == len(self.data)


class _Entry(Generic[M]):
    """A message to come. ``key``: its request's id, ``""`` where it cannot be discarded. ``held``: its tensors on their way, by
    their identity.
    """

    __slots__ = ("held", "key", "make", "tensors")

    def __init__(self, make: MakeMessage[M], tensors: WhichTensors, key: str) -> None:
        self.make = make
        self.tensors = tensors
        self.key = key
        self.held: dict[int, _Transfer] = {}

    @property
    def is_ready(self) -> bool:
        """Whether all of its tensors are out."""
        return all(transfer.is_out for transfer in self.held.values())


class Outgoing(Generic[M]):
    """A queue of messages. One with tensors waits until all of them are out in chunks; then it goes to the end of the queue.

    Messages with the same tensor object share its chunks. Between two chunks there is a message, if one is due, and the chunks
    of several tensors take turns. Not more than the limits' ``max_tensor_bytes`` are under way at once: a message takes its
    place there for all of its tensors together, the rest waits, in order. So messages never wait for each other in a circle.
    Messages are made when they are sent, not before: what is large is there once.
    """

    def __init__(self, chunk: Callable[[Chunk], M]) -> None:
        """``chunk`` makes the message of a chunk."""
        self._chunk = chunk
        self._limits = Limits(0, 0)
        self._due: deque[_Entry[M]] = deque()
        self._line: deque[tuple[_Entry[M], Sequence[Buffer]]] = deque()
        """Messages that wait for their place, and the tensors that they need."""
        self._waiting: list[_Entry[M]] = []
        """Messages whose tensors are on their way."""
        self._transfers: dict[int, _Transfer] = {}
        """By identity of the tensor: each is held here, so the ids stay unique."""
        self._sending: deque[_Transfer] = deque()
        self._abandoned: deque[Chunk] = deque()
        self._num_bytes = 0
        self._last_id = 0
        self._was_chunk = False

    def limit(self, limits: Limits) -> None:
        """What the other end takes. To be called before the first tensor."""
        self._limits = limits

    def put(self, make: MakeMessage[M], tensors: WhichTensors = no_tensors, *, key: str = "") -> None:
        """Queue a message. Its ``tensors`` together must not have more bytes than the limit on all of them."""
        entry = _Entry(make, tensors, key)
        if needed := tensors():
            self._take_place(entry, needed)
        else:
            self._due.append(entry)

    def discard(self, keys: Collection[str]) -> list[str]:
        """Drop those of the messages that have, or may come to have, tensors and were not made yet. Returns their keys."""
        gone = [entry for entry, _ in self._line if entry.key in keys]
        gone += [entry for entry in self._waiting if entry.key in keys]
        gone += [entry for entry in self._due if entry.key in keys and entry.tensors is not no_tensors]
        if gone:
            self._line = deque(each for each in self._line if each[0] not in gone)
            self._waiting = [entry for entry in self._waiting if entry not in gone]
            self._due = deque(entry for entry in self._due if entry not in gone)
        for entry in gone:
            self._let_go(entry)
        return [entry.key for entry in gone]

    def is_under_way(self, tensor: Buffer) -> bool:
        """Whether a message that is still to be sent has it go in chunks."""
        return id(tensor) in self._transfers

    def __bool__(self) -> bool:
        """Whether there is something to send."""
        self._admit()
        return bool(self._due or self._sending or self._abandoned)

    def next(self) -> M | None:
        """The next message; None when one that was due has to wait for tensors after all. Raises what making it raised;
        IndexError when there is none.
        """
        self._admit()
        if self._abandoned:
            return self._chunk(self._abandoned.popleft())
        if self._sending and (self._was_chunk is False or not self._due):
            self._was_chunk = True
            return self._chunk(self._next_chunk())
        self._was_chunk = False
        return self._make(self._due.popleft())

    def _make(self, entry: _Entry[M]) -> M | None:
        needed = entry.tensors()
        if any(id(tensor) not in entry.held for tensor in needed):
            self._let_go(entry)  # it takes its place anew, with nothing in its hands
            self._take_place(entry, needed)
            return None
        wanted = {id(tensor) for tensor in needed}
        self._let_go(entry, but=wanted)
        refs = []
        for place, tensor in enumerate(needed):
            transfer = entry.held[id(tensor)]
            last = all(other is not tensor for other in needed[place + 1 :])
            refs.append(self._refer(transfer, keep=not last))
        try:
            return entry.make(refs)
        except Exception:
            self._abandoned.extend(
                Chunk(ref.transfer_id, ref.size, b"", abandoned=True) for ref in refs if not ref.keep
            )
            raise

    def _take_place(self, entry: _Entry[M], needed: Sequence[Buffer]) -> None:
        if self._fits(needed) and (not self._line or not self._num_new(needed)):
            self._start(entry, needed)
        else:
            self._line.append((entry, needed))

    def _admit(self) -> None:
        while self._line and self._fits(self._line[0][1]):
            self._start(*self._line.popleft())

    def _num_new(self, needed: Sequence[Buffer]) -> int:
        """Bytes of those that are not under way."""
        new = {id(tensor): len(tensor) for tensor in needed if id(tensor) not in self._transfers}
        return sum(new.values())

    def _fits(self, needed: Sequence[Buffer]) -> bool:
        return self._num_bytes + self._num_new(needed) <= self._limits.max_tensor_bytes

    def _start(self, entry: _Entry[M], needed: Sequence[Buffer]) -> None:
        for tensor in needed:
            if id(tensor) in entry.held:
                continue
            transfer = self._transfers.get(id(tensor))
            if transfer is None:
                self._last_id += 1
                transfer = self._transfers[id(tensor)] = _Transfer(tensor, self._last_id)
                self._num_bytes += len(tensor)
                if not transfer.is_out:
                    self._sending.append(transfer)
            transfer.num_users += 1
            entry.held[id(tensor)] = transfer
        if entry.is_ready:
            self._due.append(entry)
        else:
            self._waiting.append(entry)

    def _next_chunk(self) -> Chunk:
        transfer = self._sending.popleft()
        start = transfer.offset
        data = bytes(memoryview(transfer.data)[start : start + self._limits.chunk_bytes])
        transfer.offset = start + len(data)
        if not transfer.is_out:
            self._sending.append(transfer)
        else:
            self._due.extend(entry for entry in self._waiting if entry.is_ready)
            self._waiting = [entry for entry in self._waiting if not entry.is_ready]
        return Chunk(transfer.transfer_id, start, data, size=0 if start else len(transfer.data))

    def _refer(self, transfer: _Transfer, *, keep: bool) -> TensorRef:
        """The reference of a message. ``keep``: the same message refers to it again."""
        if not keep:
            transfer.num_users -= 1
            if not transfer.num_users:
                self._forget(transfer)
        return TensorRef(transfer.transfer_id, len(transfer.data), keep=keep or transfer.num_users > 0)

    def _let_go(self, entry: _Entry[M], but: Collection[int] = ()) -> None:
        """The entry wants its tensors no more, ``but`` these."""
        for tensor in [each for each in entry.held if each not in but]:
            transfer = entry.held.pop(tensor)
            transfer.num_users -= 1
            if not transfer.num_users:
                self._abandon(transfer)

    def _abandon(self, transfer: _Transfer) -> None:
        """Nobody waits for it any more."""
        if not transfer.is_out:
            self._sending.remove(transfer)
        if transfer.offset:
            self._abandoned.append(Chunk(transfer.transfer_id, transfer.offset, b"", abandoned=True))
        self._forget(transfer)

    def _forget(self, transfer: _Transfer) -> None:
        del self._transfers[id(transfer.data)]
        self._num_bytes -= len(transfer.data)
