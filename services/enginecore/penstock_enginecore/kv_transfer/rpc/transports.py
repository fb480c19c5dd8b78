"""Transports for the bytes of KV blocks between engines: flow control, senders and receivers."""

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from penstock.common.v1 import tensor_pb2
from penstock.kvtransfer.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.outputs import TakeShared, payload, take_chunk, taker
from penstock_common.tensors.chunks import Buffer, IncomingTensors
from penstock_common.types.kv_transfer import STATE_GROUP, BlockName
from penstock_enginecore.kv_transfer.core.base import Content

# Flow control.

MESSAGE_BYTES = 1024 * 1024
"""Approximate number of bytes of block content in one message."""
WINDOW_BYTES = 32 * 1024 * 1024
"""Maximum number of bytes that are sent but not yet acknowledged on one stream."""


class Window:
    """Flow control window of a stream. A block larger than the window is sent when no other bytes are
    unacknowledged.
    """

    def __init__(self, limit: int = WINDOW_BYTES) -> None:
        self._limit = limit
        self.num_sent = 0
        self.num_acknowledged = 0

    @property
    def num_under_way(self) -> int:
        """Number of bytes that are sent but not yet acknowledged."""
        return self.num_sent - self.num_acknowledged

    def has_room(self, size: int) -> bool:
        """Return whether ``size`` bytes may be sent now."""
        return not self.num_under_way or self.num_under_way + size <= self._limit

    def sent(self, size: int) -> None:
        """Record that ``size`` bytes were sent."""
        self.num_sent += size

    def acknowledged(self, num_bytes: int) -> None:
        """Record the total number of acknowledged bytes. Raises InvalidArgument if the number decreases, or exceeds the
        number of bytes sent.
        """
        if not self.num_acknowledged <= num_bytes <= self.num_sent:
            raise InvalidArgument(
                f"ack.num_bytes is {num_bytes}; it must be from {self.num_acknowledged} to {self.num_sent}",
                field="ack.num_bytes",
            )
        self.num_acknowledged = num_bytes


# Senders.

GRPC = "grpc"
SHARED_MEMORY = "shared_memory"
NIXL = "nixl"
log = get_logger()


class Sender(Protocol):
    """Interface of objects that send the blocks of one stream. ``name`` is the transport's name in the protocol.
    ``agent`` is the value of the field ``Opened.nixl_agent``.
    """

    name: str
    agent: bytes

    def messages(self, fetch_id: int, name: BlockName, data: Content) -> Iterator[pb.PullResponse]:
        """Yield the messages that transfer a block."""

    def acknowledged(self, num_bytes: int) -> None:
        """Record the total number of bytes that the receiver has acknowledged."""

    def close(self) -> None:
        """Free the memory that the stream uses."""


class GrpcSender:
    """Sends blocks in gRPC messages of about 1 MiB. Larger blocks are sent in several chunks."""

    name = GRPC
    agent = b""

    def __init__(self) -> None:
        self._last_id = 0

    def messages(self, fetch_id: int, name: BlockName, data: Content) -> Iterator[pb.PullResponse]:
        """Yield the chunks of a block, if the block is too large for one message, and then the block's message."""
        block = block_message(fetch_id, name, data)
        if len(data) <= MESSAGE_BYTES:
            block.data.inline = bytes(data)
        else:
            self._last_id += 1
            for offset in range(0, len(data), MESSAGE_BYTES):
                piece = bytes(data[offset : offset + MESSAGE_BYTES])
                size = 0 if offset else len(data)
                yield pb.PullResponse(
                    chunk=tensor_pb2.TensorChunk(transfer_id=self._last_id, offset=offset, data=piece, size=size)
                )
            block.data.chunks.transfer_id, block.data.chunks.size = self._last_id, len(data)
        yield pb.PullResponse(block=block)

    def acknowledged(self, num_bytes: int) -> None:
        """Do nothing, because this sender keeps no memory."""

    def close(self) -> None:
        """Do nothing, because this sender keeps no memory."""


class SharedSlots(Protocol):
    """Interface through which a sender uses slots of memory that other processes can read, such as an ``Arena``.
    ``name`` is the name of the memory.
    """

    name: str

    def put(self, data: Content) -> int | None:
        """Copy ``data`` to a slot. Return the slot's offset, or None if no slot is free. Raises OSError if the shared
        memory cannot be written.
        """

    def give_back(self, offset: int) -> None:
        """Free the slot at this offset."""


class SlotSender(GrpcSender):
    """Sends blocks by putting them into memory slots that the receiver reads. If all slots are in use, blocks are sent
    in gRPC messages. States of recurrent layers are always sent in messages, because they do not fit into the slots.
    """

    def __init__(self, name: str, arena: SharedSlots, agent: bytes = b"") -> None:
        super().__init__()
        self.name = name
        self.agent = agent
        self._arena = arena
        self._num_sent = 0
        self._unread: deque[tuple[int, int]] = deque()
        """Slots in use, in the order of use. Each entry also has the total number of bytes that were sent on the stream
        up to the end of the slot's block.
        """

    def messages(self, fetch_id: int, name: BlockName, data: Content) -> Iterator[pb.PullResponse]:
        """Yield the message that names the block's slot. If no slot is free, yield messages with the block's bytes."""
        self._num_sent += len(data)
        try:
            offset = None if name.group == STATE_GROUP else self._arena.put(data)
        except OSError as e:
            log.warning("cannot write a KV block to shared memory, so gRPC messages carry this block", reason=str(e))
            offset = None
        if offset is None:
            yield from super().messages(fetch_id, name, data)
            return
        self._unread.append((self._num_sent, offset))
        block = block_message(fetch_id, name, data)
        place = block.data.shared_memory
        place.name, place.offset, place.size = self._arena.name, offset, len(data)
        yield pb.PullResponse(block=block)

    def acknowledged(self, num_bytes: int) -> None:
        """Free the slots whose blocks the receiver has acknowledged."""
        while self._unread and self._unread[0][0] <= num_bytes:
            self._arena.give_back(self._unread.popleft()[1])

    def close(self) -> None:
        """Free all slots. If the receiver reads a slot that was reused after this call, it detects a wrong checksum."""
        while self._unread:
            self._arena.give_back(self._unread.popleft()[1])


def block_message(fetch_id: int, name: BlockName, data: Content) -> pb.Block:
    """Return the message for a block, without the bytes of the block."""
    return pb.Block(
        fetch_id=fetch_id,
        group=name.group,
        hash=name.hash,
        crc32=zlib.crc32(data),
        data=tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=(len(data),)),
    )


# Receivers.


class Receiver:
    """Receives the blocks of one stream.

    ``shared`` is the function that copies bytes from shared memory, or None without shared memory. ``closed`` is called
    when no more blocks will arrive. ``state_bytes`` is the size in bytes of states of recurrent layers, or 0 for a
    model without recurrent layers.
    """

    def __init__(
        self,
        block_bytes: int,
        shared: TakeShared | None = None,
        *,
        closed: Callable[[], None] = lambda: None,
        state_bytes: int = 0,
    ) -> None:
        self._block_bytes = block_bytes
        self._state_bytes = state_bytes
        self._chunks = IncomingTensors(max_bytes=max(block_bytes, state_bytes) + MESSAGE_BYTES)
        self._take = taker(self._chunks)
        self._shared = shared
        self._closed = closed

    def chunk(self, message: tensor_pb2.TensorChunk) -> None:
        """Store a chunk of the next block until the block's message arrives."""
        take_chunk(self._chunks, message)

    async def data(self, block: pb.Block) -> Buffer | None:
        """Return the content of a block, or None if the content does not match the block's checksum. Raises
        RequestFailed if the message is invalid or the block has an unexpected size.
        """
        self.check(block)
        return checked(payload(block.data, self._take, path="block.data", element_bytes=1, shared=self._shared), block)

    def check(self, block: pb.Block) -> None:
        """Raise InvalidArgument if the block or state in the message does not have the expected size."""
        of_states = block.group == STATE_GROUP
        size = self._state_bytes if of_states else self._block_bytes
        if block.data.dtype != tensor_pb2.DATA_TYPE_UINT8 or list(block.data.shape) != [size]:
            raise InvalidArgument(
                f"block.data must be uint8 with shape [{size}], the size of every {'state' if of_states else 'block'}",
                field="block.data",
            )

    def close(self) -> None:
        """Record that the stream has ended, and close shared memory. Idempotent."""
        self._closed()


def checked(data: Buffer, block: pb.Block) -> Buffer | None:
    """Return the content of a block, or None if the content does not match the block's checksum."""
    return data if zlib.crc32(data) == block.crc32 else None
