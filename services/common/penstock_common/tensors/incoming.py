"""Tensors in chunks, put together at the end that receives them."""

import time
from collections.abc import Callable
from typing import Protocol

from penstock_common.errors import InvalidArgument, RequestFailed, ResourceExhausted, Unavailable
from penstock_common.tensors.sizes import STALE_AFTER, Buffer

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


class _Transfer:
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
        self._transfers: dict[int, _Transfer] = {}  # what was touched longest ago first
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
                transfer = self._transfers[transfer_id] = _Transfer(size, 0.0)
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
