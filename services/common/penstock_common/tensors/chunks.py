"""Tensors in chunks on a stream: limits for inline tensors and chunks, the sending end, and the receiving end."""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from penstock_common.errors import InvalidArgument, RequestFailed, ResourceExhausted, Unavailable

# Limits of both ends of a session: sizes of inline tensors, of chunks, and of tensors in transfer.

Buffer = bytes | bytearray
"""The elements of a tensor, as bytes."""

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Maximum message size in bytes for a frontend or engine that announces no limit."""
MAX_TENSOR_BYTES = 256 * 1024 * 1024
"""Maximum number of bytes of chunked tensors that an end buffers for one session."""
MAX_UNANNOUNCED_BYTES = 64 * 1024 * 1024
"""Limit that replaces MAX_TENSOR_BYTES in a session whose frontend does not announce the sizes of its tensors."""
MAX_INLINE_BYTES = 64 * 1024
"""Maximum size of a tensor that is sent inline, in bytes."""
MAX_CHUNK_BYTES = 256 * 1024
"""Maximum size of a chunk, in bytes."""
STALE_AFTER = 30.0
"""Seconds without new chunks after which a tensor is dropped, if no message has referred to the tensor."""

_CHUNK_OVERHEAD = 64
"""Maximum number of bytes of a chunk message in addition to the chunk's data."""


class Limits(NamedTuple):
    """Limits for sending on a stream: maximum bytes of a message, and maximum bytes of all chunked tensors in transfer.

    The second limit is 0 if the other end accepts no chunks.
    """

    max_message_bytes: int
    max_tensor_bytes: int

    @classmethod
    def of(cls, own: int, max_message_bytes: int, max_tensor_bytes: int) -> "Limits":
        """Return the limits for sending to an end that announces these values (0 if unknown).

        ``own`` is the maximum size in bytes of a message that this end may send.
        """
        return cls(min(own, max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES), max_tensor_bytes)

    @property
    def inline_bytes(self) -> int:
        """Maximum size of an inline tensor in bytes, if the other end accepts chunks."""
        return min(MAX_INLINE_BYTES, self.max_message_bytes // 2)

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk in bytes."""
        return min(MAX_CHUNK_BYTES, self.max_message_bytes - _CHUNK_OVERHEAD)


# Receiving end: assembly of chunked tensors.

# Limit for the chunked tensors of all sessions of an engine together.


class Member(Protocol):
    """Interface of the tensors of one session, as ``TensorPool`` uses it."""

    @property
    def num_held_bytes(self) -> int:
        """Memory in bytes that the session's tensors use."""

    def drop_oldest(self) -> bool:
        """Drop the oldest incomplete tensor, or the oldest tensor if all are complete. Return False if the session has
        no tensor.
        """


class TensorPool:
    """Limit for the bytes of tensors that all sessions buffer until the messages that refer to them arrive.

    When the limit is reached, a tensor of the session with the most bytes is dropped, so that sessions with few bytes
    are not affected. The request of the dropped tensor is refused, and its frontend sends the request to another
    engine. Use it in one thread only.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_dropped = 0
        """Number of tensors dropped because of this limit."""
        self.num_drops = 0
        """Number of events after which memory may be freed: dropped tensors, and ended sessions that had tensors."""
        self._members: dict[Member, int] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory in bytes that the tensors of all members use."""
        return self._num_bytes

    def join(self, member: Member) -> None:
        """Start to count the tensors of a session."""
        self._members[member] = 0
        self.held(member)

    def leave(self, member: Member) -> None:
        """Stop counting the tensors of a session. Idempotent."""
        held = self._members.pop(member, 0)
        self._num_bytes -= held
        self.num_drops += held > 0

    def held(self, member: Member) -> None:
        """Record that ``member.num_held_bytes`` has changed."""
        if member in self._members:
            now = member.num_held_bytes
            self._num_bytes += now - self._members[member]
            self._members[member] = now

    def make_room(self, member: Member, size: int) -> bool:
        """Drop tensors until ``member`` can store ``size`` more bytes. Return False if that is not possible.

        The largest session may be ``member`` itself, and the dropped tensor may be the tensor to which the bytes
        belong.
        """
        while self._num_bytes + size > self.max_bytes:
            largest = max(self._members, key=lambda each: self._members[each] + (size if each is member else 0))
            if not largest.drop_oldest():
                return False
            self.num_dropped += 1
            self.num_drops += 1
        return True


_MAX_REMEMBERED = 128
"""Maximum number of failed tensor transfers whose error is kept until a message refers to the tensor."""
_MAX_TRANSFERS = 65_536
"""Maximum number of buffered tensors, regardless of their sizes."""
_TRANSFER_BYTES = 512
"""Upper bound of the memory in bytes that a tensor uses in addition to its elements."""


class _IncomingTransfer:
    """A tensor that is being received.

    Attributes:
        size: Announced bytes, or 0 if unknown.
        touched: Monotonic time in seconds of the last chunk, or of the last message that refers to the tensor with
            ``keep``.
        in_use: Whether a message has referred to the tensor, so that its bytes must not change any more.
    """

    __slots__ = ("data", "in_use", "size", "touched")

    def __init__(self, size: int, touched: float) -> None:
        self.data = bytearray()
        self.size = size
        self.in_use = False
        self.touched = touched


class IncomingTensors:
    """Buffer of the tensors of one stream, until the messages that refer to them arrive.

    Chunks of one tensor arrive in order, interleaved with chunks of other tensors. ``add`` never raises: ``take``
    raises the error when a message refers to the tensor, so that only this message fails. All tensors together have at
    most ``max_bytes``. A tensor without new data for ``STALE_AFTER`` seconds is dropped.
    """

    def __init__(
        self,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        announced: bool = False,
        pool: TensorPool | None = None,
    ) -> None:
        """Create an empty buffer.

        Args:
            max_bytes: Maximum bytes of all tensors.
            clock: Returns monotonic seconds.
            announced: Whether to refuse a tensor whose first chunk does not announce its size.
            pool: Common limit for the tensors of several streams. Call ``close`` at the end of the stream.
        """
        self._max_bytes = max_bytes
        self._clock = clock
        self._announced = announced
        self._pool = pool
        self._transfers: dict[int, _IncomingTransfer] = {}  # the least recently touched tensor is the first
        self._failed: dict[int, RequestFailed] = {}
        self.num_bytes = 0
        if pool is not None:
            pool.join(self)

    def __len__(self) -> int:
        """Return the number of buffered tensors, including incomplete tensors."""
        return len(self._transfers)

    @property
    def num_held_bytes(self) -> int:
        """Memory in bytes that the tensors use."""
        return self.num_bytes + _TRANSFER_BYTES * len(self._transfers)

    def add(self, transfer_id: int, offset: int, data: bytes, *, size: int = 0) -> None:
        """Store a chunk of a tensor. After an error, further chunks of the tensor are dropped.

        ``size`` is the tensor's size in bytes, as announced by its first chunk.
        """
        self.drop_stale()
        if transfer_id in self._failed:
            return
        transfer = self._transfers.get(transfer_id)
        expected, announced = (0, size) if transfer is None else (len(transfer.data), transfer.size)
        if offset != expected:
            self._fail(transfer_id, f"a chunk has offset {offset}; the expected offset is {expected}")
        elif transfer is not None and transfer.in_use:
            self._fail(transfer_id, "a chunk arrived after a message that refers to the tensor")
        elif transfer is None and len(self._transfers) >= _MAX_TRANSFERS:
            self._give_up(
                transfer_id,
                ResourceExhausted(f"{len(self._transfers)} tensors of this session are buffered, which is the limit"),
            )
        elif self._announced and not announced:
            self._give_up(
                transfer_id,
                InvalidArgument(f"tensor_chunk.size is 0 in the first chunk of tensor {transfer_id}; set this size"),
            )
        elif announced and expected + len(data) > announced:
            self._fail(transfer_id, f"{expected + len(data)} bytes have arrived, but tensor_chunk.size is {announced}")
        elif (wanted := self.num_bytes + max(len(data), announced - expected)) > self._max_bytes:
            self._give_up(
                transfer_id,
                ResourceExhausted(
                    f"the buffered tensors of this session would have {wanted} bytes; the limit is {self._max_bytes}"
                ),
            )
        elif self._has_room(transfer_id, len(data) + (0 if transfer else _TRANSFER_BYTES)):
            if transfer is None:
                transfer = self._transfers[transfer_id] = _IncomingTransfer(size, 0.0)
            transfer.data += data
            self._touch(transfer_id)
            self._count(len(data))

    def abandon(self, transfer_id: int) -> None:
        """Drop a tensor to which no message will refer."""
        self._forget(transfer_id)
        self._failed.pop(transfer_id, None)

    def take(self, transfer_id: int, size: int, *, keep: bool, field: str) -> Buffer:
        """Return the bytes of a tensor. Repeated calls return the same object. If ``keep`` is False, the tensor is
        removed from this buffer.
        """
        self.drop_stale()
        if (error := self._failed.get(transfer_id)) is not None:
            if not keep:
                del self._failed[transfer_id]
            raise type(error)(f"{field}: {error.message}", field=field, reason=error.reason)
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            raise InvalidArgument(
                f"{field} refers to tensor {transfer_id}, but no chunk of this tensor has arrived", field=field
            )
        transfer.in_use = True
        self._touch(transfer_id)
        if not keep:
            self._forget(transfer_id)
        if len(transfer.data) != size:
            raise InvalidArgument(
                f"{field} requires {size} bytes, but {len(transfer.data)} bytes of tensor {transfer_id} have arrived",
                field=field,
            )
        return transfer.data

    def drop_oldest(self) -> bool:
        """Drop the least recently touched incomplete tensor, or the least recently touched tensor if all are complete.
        Return False if there is no tensor.
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
        """Drop all tensors, because the stream has ended."""
        self._transfers.clear()
        self._failed.clear()
        self.num_bytes = 0
        if self._pool is not None:
            self._pool.leave(self)

    def drop_stale(self) -> None:
        """Drop tensors that have had no new data for STALE_AFTER seconds."""
        oldest = self._clock() - STALE_AFTER
        while self._transfers and self._transfers[transfer_id := next(iter(self._transfers))].touched < oldest:
            self._give_up(
                transfer_id,
                Unavailable(
                    f"a tensor of the request was dropped: no chunk arrived for {STALE_AFTER:g} s", reason="STALE"
                ),
            )

    def _has_room(self, transfer_id: int, size: int) -> bool:
        """Return whether the pool allows ``size`` more bytes, and has not dropped this tensor to make room for these
        bytes.
        """
        if self._pool is None:
            return True
        if not self._pool.make_room(self, size):
            self._give_up(transfer_id, self._no_room())
        return transfer_id not in self._failed

    def _no_room(self) -> ResourceExhausted:
        limit = 0 if self._pool is None else self._pool.max_bytes
        return ResourceExhausted(
            f"a tensor of the request was dropped: the tensors of all sessions would have more than {limit} bytes "
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
        self._give_up(transfer_id, InvalidArgument(f"the chunks of tensor {transfer_id} are not valid: {why}"))

    def _give_up(self, transfer_id: int, error: RequestFailed) -> None:
        self._forget(transfer_id)
        self._failed[transfer_id] = error
        if len(self._failed) > _MAX_REMEMBERED:
            del self._failed[next(iter(self._failed))]

    def _forget(self, transfer_id: int) -> None:
        if (transfer := self._transfers.pop(transfer_id, None)) is not None:
            self._count(-len(transfer.data))


# Sending end: a queue of messages, which alternate with the chunks of large tensors.

M = TypeVar("M")


class TensorRef(NamedTuple):
    """A message's reference to a chunked tensor. ``keep`` means that a later message also refers to the tensor."""

    transfer_id: int
    size: int
    keep: bool


class Chunk(NamedTuple):
    """A piece of a tensor.

    Attributes:
        abandoned: True for an empty piece that tells the receiver that no message will refer to the tensor.
        size: Size in bytes of the complete tensor in its first piece; 0 in later pieces.
    """

    transfer_id: int
    offset: int
    data: bytes
    abandoned: bool = False
    size: int = 0


MakeMessage: TypeAlias = Callable[[Sequence[TensorRef]], M]
"""Function that creates a message when it is sent. Its argument has the references to the message's tensors, in order.
"""

WhichTensors: TypeAlias = Callable[[], Sequence[Buffer]]
"""Function that returns the tensors that a message sends in chunks.

The function is called when the message is queued, and again when the message is sent. The last result applies.
"""


def no_tensors() -> Sequence[Buffer]:
    """Return no tensors, for messages without tensors in chunks."""
    return ()


class _OutgoingTransfer:
    """A tensor that is being sent. ``num_users`` is the number of unsent messages that refer to the tensor."""

    __slots__ = ("data", "num_users", "offset", "transfer_id")

    def __init__(self, data: Buffer, transfer_id: int) -> None:
        self.data = data
        self.transfer_id = transfer_id
        self.offset = 0
        self.num_users = 0

    @property
    def is_out(self) -> bool:
        """Whether the last chunk of the tensor was sent."""
        return self.offset == len(self.data)


class _Entry(Generic[M]):
    """A queued message.

    Attributes:
        key: Request ID, or ``""`` if the message cannot be discarded.
        held: The message's tensors in transfer, by identity.
    """

    __slots__ = ("held", "key", "make", "tensors")

    def __init__(self, make: MakeMessage[M], tensors: WhichTensors, key: str) -> None:
        self.make = make
        self.tensors = tensors
        self.key = key
        self.held: dict[int, _OutgoingTransfer] = {}

    @property
    def is_ready(self) -> bool:
        """Whether all tensors of the message were sent."""
        return all(transfer.is_out for transfer in self.held.values())


class Outgoing(Generic[M]):
    """A queue of messages. A message with tensors waits until all its tensors were sent in chunks. Then the message
    moves to the end of the queue.

    Messages with the same tensor object share the chunks of the tensor. Messages and chunks alternate, and so do the
    chunks of several tensors. At most ``max_tensor_bytes`` are in transfer at the same time. A message reserves bytes
    for all its tensors together, and later messages wait until this reservation succeeds. So messages never wait for
    each other in a cycle. Messages are created only when they are sent, so that large content is in memory only once.
    """

    def __init__(self, chunk: Callable[[Chunk], M]) -> None:
        """Create an empty queue. ``chunk`` creates the message of a chunk."""
        self._chunk = chunk
        self._limits = Limits(0, 0)
        self._due: deque[_Entry[M]] = deque()
        self._line: deque[tuple[_Entry[M], Sequence[Buffer]]] = deque()
        """Messages that wait until they can reserve bytes for their tensors, with these tensors."""
        self._waiting: list[_Entry[M]] = []
        """Messages whose tensors are being sent."""
        self._transfers: dict[int, _OutgoingTransfer] = {}
        """Transfers by identity of the tensor. A transfer references its tensor, so identities stay unique."""
        self._sending: deque[_OutgoingTransfer] = deque()
        self._abandoned: deque[Chunk] = deque()
        self._num_bytes = 0
        self._last_id = 0
        self._was_chunk = False

    def limit(self, limits: Limits) -> None:
        """Set the limits that the other end has announced. Call this method before a message with tensors is queued."""
        self._limits = limits

    def put(self, make: MakeMessage[M], tensors: WhichTensors = no_tensors, *, key: str = "") -> None:
        """Queue a message. The total size of its ``tensors`` must not exceed the limit for all chunked tensors."""
        entry = _Entry(make, tensors, key)
        if needed := tensors():
            self._take_place(entry, needed)
        else:
            self._due.append(entry)

    def discard(self, keys: Collection[str]) -> list[str]:
        """Drop the messages with these keys that were not created yet. Returns the keys of the dropped messages."""
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
        """Return whether an unsent message uses chunks of the tensor."""
        return id(tensor) in self._transfers

    def __bool__(self) -> bool:
        """Return whether the queue has a message or chunk to send."""
        self._admit()
        return bool(self._due or self._sending or self._abandoned)

    def next(self) -> M | None:
        """Return the next message. Return None if the next message now has new tensors, and must wait until these
        tensors are sent.

        Raises IndexError if the queue is empty, and the errors of the function that creates the message.
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
            self._let_go(entry)  # release all tensors before bytes are reserved again, to avoid a deadlock
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
        """Return the total bytes of the tensors that are not in transfer yet."""
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
        """Return a message's reference to a tensor. ``keep`` means that the same message refers to the tensor again."""
        if not keep:
            transfer.num_users -= 1
            if not transfer.num_users:
                self._forget(transfer)
        return TensorRef(transfer.transfer_id, len(transfer.data), keep=keep or transfer.num_users > 0)

    def _let_go(self, entry: _Entry[M], but: Collection[int] = ()) -> None:
        """Release the tensors of an entry, except those in ``but``."""
        for tensor in [each for each in entry.held if each not in but]:
            transfer = entry.held.pop(tensor)
            transfer.num_users -= 1
            if not transfer.num_users:
                self._abandon(transfer)

    def _abandon(self, transfer: _OutgoingTransfer) -> None:
        """Stop the transfer of a tensor that no message needs any more."""
        if not transfer.is_out:
            self._sending.remove(transfer)
        if transfer.offset:
            self._abandoned.append(Chunk(transfer.transfer_id, transfer.offset, b"", abandoned=True))
        self._forget(transfer)

    def _forget(self, transfer: _OutgoingTransfer) -> None:
        del self._transfers[id(transfer.data)]
        self._num_bytes -= len(transfer.data)
