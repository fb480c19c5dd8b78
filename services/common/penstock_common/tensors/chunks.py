"""Tensors in chunks on a stream: what is sent inline, the end that sends, and the end that receives."""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from penstock_common.errors import InvalidArgument, RequestFailed, ResourceExhausted, Unavailable

# What goes inline, what in chunks, and how much at once: of both ends of a session.

Buffer = bytes | bytearray
"""The elements of a tensor."""

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""What an end takes that does not say what it takes."""
MAX_TENSOR_BYTES = 256 * 1024 * 1024
"""Of tensors in chunks that an end holds for one session at once."""
MAX_UNANNOUNCED_BYTES = 64 * 1024 * 1024
"""The same for a session whose frontend does not announce its tensors."""
MAX_INLINE_BYTES = 64 * 1024
"""A tensor of up to so many bytes goes inline."""
MAX_CHUNK_BYTES = 256 * 1024
"""The bytes of a chunk, at most."""
STALE_AFTER = 30.0
"""Seconds after which a tensor is dropped of which nothing more has come, and that no message has referred to."""

_CHUNK_OVERHEAD = 64
"""Bytes of a message around a chunk's data, at most."""


class Limits(NamedTuple):
    """What both ends of a stream take: bytes of a message, and of all tensors in chunks at once, 0 where none are taken."""

    max_message_bytes: int
    max_tensor_bytes: int

    @classmethod
    def of(cls, own: int, max_message_bytes: int, max_tensor_bytes: int) -> "Limits":
        """Those towards an end that says these of itself, 0 where it says nothing, on a connection that sends ``own`` bytes."""
        return cls(min(own, max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES), max_tensor_bytes)

    @property
    def inline_bytes(self) -> int:
        """The largest tensor that goes inline where chunks are taken."""
        return min(MAX_INLINE_BYTES, self.max_message_bytes // 2)

    @property
    def chunk_bytes(self) -> int:
        """The bytes of a chunk."""
        return min(MAX_CHUNK_BYTES, self.max_message_bytes - _CHUNK_OVERHEAD)


# Tensors in chunks, put together at the end that receives them.

# One bound for the tensors in chunks that all sessions of an engine hold.


class Member(Protocol):
    """The tensors of one session, to ``TensorPool``."""

    @property
    def num_held_bytes(self) -> int:
        """Return the bytes of memory that the session's tensors take."""

    def drop_oldest(self) -> bool:
        """Drop the tensor that was begun first, one that is not whole before others. Return False if there is none."""


class TensorPool:
    """Bounds the bytes that all sessions hold for messages that have not come yet.

    A session that holds little is not disturbed by sessions that hold much: when the bound is reached, the session that holds
    the most loses a tensor. The request of that tensor is refused, and its frontend sends the request to another engine.
    Belongs to one thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_dropped = 0
        """Tensors that were dropped because of this bound."""
        self.num_drops = 0
        """Times that tensors were dropped, or a session ended that held some: then there is memory to give back."""
        self._members: dict[Member, int] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes that all members hold."""
        return self._num_bytes

    def join(self, member: Member) -> None:
        """Count the tensors of a session from now on."""
        self._members[member] = 0
        self.held(member)

    def leave(self, member: Member) -> None:
        """Count the tensors of a session no longer. Idempotent."""
        held = self._members.pop(member, 0)
        self._num_bytes -= held
        self.num_drops += held > 0

    def held(self, member: Member) -> None:
        """Note that ``member.num_held_bytes`` has changed."""
        if member in self._members:
            now = member.num_held_bytes
            self._num_bytes += now - self._members[member]
            self._members[member] = now

    def make_room(self, member: Member, size: int) -> bool:
        """Drop tensors until ``member`` can hold ``size`` bytes more. Return whether it can.

        The largest session may be ``member`` itself, and the dropped tensor the one that was to grow.
        """
        while self._num_bytes + size > self.max_bytes:
            largest = max(self._members, key=lambda each: self._members[each] + (size if each is member else 0))
            if not largest.drop_oldest():
                return False
            self.num_dropped += 1
            self.num_drops += 1
        return True


_MAX_REMEMBERED = 128
"""Failed transfers whose reason is kept for the message that will refer to them."""
_MAX_TRANSFERS = 65_536
"""Tensors that are held at once, however small they are."""
_TRANSFER_BYTES = 512
"""Bytes of memory that a tensor takes beside its elements, at most."""


class _IncomingTransfer:
    """``size``: bytes that were announced, 0 if none were. ``touched``: when the last chunk came, or the last message that keeps
    it, in monotonic seconds. ``in_use``: a message has referred to it; its bytes do not change any more.
    """

    __slots__ = ("data", "in_use", "size", "touched")

    def __init__(self, size: int, touched: float) -> None:
        self.data = bytearray()
        self.size = size
        self.in_use = False
        self.touched = touched


class IncomingTensors:
    """The tensors of one stream whose messages have not come yet.

    Chunks of a tensor come in order, those of others between them. A chunk never raises: what is wrong with a tensor is told
    to the message that refers to it, and ends that alone. All tensors together hold ``max_bytes`` at most; one of which
    nothing has come for ``STALE_AFTER`` seconds is dropped.
    """

    def __init__(
        self,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        announced: bool = False,
        pool: TensorPool | None = None,
    ) -> None:
        """``announced``: refuse a tensor whose first chunk does not say its size. ``pool``: bounds these tensors together with
        those of other streams; the stream's end calls ``close``.
        """
        self._max_bytes = max_bytes
        self._clock = clock
        self._announced = announced
        self._pool = pool
        self._transfers: dict[int, _IncomingTransfer] = {}  # what was touched longest ago first
        self._failed: dict[int, RequestFailed] = {}
        self.num_bytes = 0
        if pool is not None:
            pool.join(self)

    def __len__(self) -> int:
        """Tensors that are held, whole or in part."""
        return len(self._transfers)

    @property
    def num_held_bytes(self) -> int:
        """Return the bytes of memory that the tensors take."""
        return self.num_bytes + _TRANSFER_BYTES * len(self._transfers)

    def add(self, transfer_id: int, offset: int, data: bytes, *, size: int = 0) -> None:
        """Take a chunk in. One behind a failure is dropped. ``size``: bytes that the first chunk announces for the tensor."""
        self.drop_stale()
        if transfer_id in self._failed:
            return
        transfer = self._transfers.get(transfer_id)
        expected, announced = (0, size) if transfer is None else (len(transfer.data), transfer.size)
        if offset != expected:
            self._fail(transfer_id, f"its bytes from {offset} came where those from {expected} were due")
        elif transfer is not None and transfer.in_use:
            self._fail(transfer_id, "more of it came behind a message that refers to it")
        elif transfer is None and len(self._transfers) >= _MAX_TRANSFERS:
            self._give_up(
                transfer_id,
                ResourceExhausted(f"{len(self._transfers)} tensors wait for their messages; a session has no more"),
            )
        elif self._announced and not announced:
            self._give_up(
                transfer_id,
                InvalidArgument(f"tensor {transfer_id} was not announced: tensor_chunk.size is 0 in its first chunk"),
            )
        elif announced and expected + len(data) > announced:
            self._fail(transfer_id, f"{expected + len(data)} bytes came where {announced} were announced")
        elif (wanted := self.num_bytes + max(len(data), announced - expected)) > self._max_bytes:
            self._give_up(
                transfer_id,
                ResourceExhausted(
                    f"tensors of {wanted} bytes would wait for their messages; the limit of a session is {self._max_bytes}"
                ),
            )
        elif self._has_room(transfer_id, len(data) + (0 if transfer else _TRANSFER_BYTES)):
            if transfer is None:
                transfer = self._transfers[transfer_id] = _IncomingTransfer(size, 0.0)
            transfer.data += data
            self._touch(transfer_id)
            self._count(len(data))

    def abandon(self, transfer_id: int) -> None:
        """No message will refer to it."""
        self._forget(transfer_id)
        self._failed.pop(transfer_id, None)

    def take(self, transfer_id: int, size: int, *, keep: bool, field: str) -> Buffer:
        """The bytes of a tensor: the same object each time. Without ``keep`` it is forgotten here.

        Raises InvalidArgument, with ``field``, unless ``size`` bytes came, in order; what else went wrong with them.
        """
        self.drop_stale()
        if (error := self._failed.get(transfer_id)) is not None:
            if not keep:
                del self._failed[transfer_id]
            raise type(error)(f"{field}: {error.message}", field=field, reason=error.reason)
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            raise InvalidArgument(f"{field} refers to tensor {transfer_id}, of which nothing has come", field=field)
        transfer.in_use = True
        self._touch(transfer_id)
        if not keep:
            self._forget(transfer_id)
        if len(transfer.data) != size:
            raise InvalidArgument(
                f"{field} has {size} bytes in chunks; {len(transfer.data)} bytes of tensor {transfer_id} have come",
                field=field,
            )
        return transfer.data

    def drop_oldest(self) -> bool:
        """Drop the tensor of which nothing has come for the longest time, one that is not whole before others. Return False if
        there is none.
        """
        partial = (
            each for each, transfer in self._transfers.items() if len(transfer.data) < (transfer.size or 1 << 63)
        )
        transfer_id = next(partial, next(iter(self._transfers), None))
        if transfer_id is None:
            return False
        self._give_up(transfer_id, self._no_room())
        return True

    def close(self) -> None:
        """Drop everything: the stream has ended."""
        self._transfers.clear()
        self._failed.clear()
        self.num_bytes = 0
        if self._pool is not None:
            self._pool.leave(self)

    def drop_stale(self) -> None:
        """Drop what nothing more has come of for too long."""
        oldest = self._clock() - STALE_AFTER
        while self._transfers and self._transfers[transfer_id := next(iter(self._transfers))].touched < oldest:
            self._give_up(
                transfer_id,
                Unavailable(
                    f"the request's tensor was dropped: nothing came of it for {STALE_AFTER:g} s", reason="STALE"
                ),
            )

    def _has_room(self, transfer_id: int, size: int) -> bool:
        """Whether the pool has room for ``size`` bytes more, and has not dropped the tensor itself to make it."""
        if self._pool is None:
            return True
        if not self._pool.make_room(self, size):
            self._give_up(transfer_id, self._no_room())
        return transfer_id not in self._failed

    def _no_room(self) -> ResourceExhausted:
        limit = 0 if self._pool is None else self._pool.max_bytes
        return ResourceExhausted(
            f"the request's tensor was dropped: the tensors of all sessions would have more than {limit} bytes "
            "(sessions.max_tensor_bytes)"
        )

    def _count(self, size: int) -> None:
        self.num_bytes += size
        if self._pool is not None:
            self._pool.held(self)

    def _touch(self, transfer_id: int) -> None:
        transfer = self._transfers[transfer_id] = self._transfers.pop(transfer_id)
        transfer.touched = self._clock()

    def _fail(self, transfer_id: int, why: str) -> None:
        self._give_up(transfer_id, InvalidArgument(f"tensor {transfer_id} did not come in order: {why}"))

    def _give_up(self, transfer_id: int, error: RequestFailed) -> None:
        self._forget(transfer_id)
        self._failed[transfer_id] = error
        if len(self._failed) > _MAX_REMEMBERED:
            del self._failed[next(iter(self._failed))]

    def _forget(self, transfer_id: int) -> None:
        if (transfer := self._transfers.pop(transfer_id, None)) is not None:
            self._count(-len(transfer.data))


# What an end of a stream sends: messages in order, and large tensors in chunks that take turns with them.

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


class _OutgoingTransfer:
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
        self.held: dict[int, _OutgoingTransfer] = {}

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
        self._transfers: dict[int, _OutgoingTransfer] = {}
        """By identity of the tensor: each is held here, so the ids stay unique."""
        self._sending: deque[_OutgoingTransfer] = deque()
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
                transfer = self._transfers[id(tensor)] = _OutgoingTransfer(tensor, self._last_id)
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

    def _refer(self, transfer: _OutgoingTransfer, *, keep: bool) -> TensorRef:
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

    def _abandon(self, transfer: _OutgoingTransfer) -> None:
        """Nobody waits for it any more."""
        if not transfer.is_out:
            self._sending.remove(transfer)
        if transfer.offset:
            self._abandoned.append(Chunk(transfer.transfer_id, transfer.offset, b"", abandoned=True))
        self._forget(transfer)

    def _forget(self, transfer: _OutgoingTransfer) -> None:
        del self._transfers[id(transfer.data)]
        self._num_bytes -= len(transfer.data)
