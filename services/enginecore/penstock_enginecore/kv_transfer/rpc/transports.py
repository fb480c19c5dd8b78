"""The ways on which the bytes of blocks go: at the engine that has them, on their way, and at the one that wants them."""

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
from penstock_common.types.kv_transfer import BlockName

# Bytes on their way from the engine that has them.

MESSAGE_BYTES = 1024 * 1024
"""Of blocks in a message, about."""
WINDOW_BYTES = 32 * 1024 * 1024
"""That are sent and not acknowledged, at most."""


class Window:
    """How much of a stream was sent, and how much has come. A block larger than the window is sent alone."""

    def __init__(self, limit: int = WINDOW_BYTES) -> None:
        self._limit = limit
        self.num_sent = 0
        self.num_acknowledged = 0

    @property
    def num_under_way(self) -> int:
        """Bytes that have not come yet, as far as is known."""
        return self.num_sent - self.num_acknowledged

    def has_room(self, size: int) -> bool:
        """Whether so many bytes may be sent now."""
        return not self.num_under_way or self.num_under_way + size <= self._limit

    def sent(self, size: int) -> None:
        """So many bytes are on their way."""
        self.num_sent += size

    def acknowledged(self, num_bytes: int) -> None:
        """So many have come since the begin. Raises InvalidArgument for fewer than before, or more than were sent."""
        if not self.num_acknowledged <= num_bytes <= self.num_sent:
            raise InvalidArgument(
                f"ack.num_bytes is {num_bytes}; between {self.num_acknowledged} and {self.num_sent} bytes may have come",
                field="ack.num_bytes",
            )
        self.num_acknowledged = num_bytes


# At the engine that has the blocks.

GRPC = "grpc"
SHARED_MEMORY = "shared_memory"
NIXL = "nixl"
log = get_logger()


class Sender(Protocol):
    """Of one stream. ``name``: as the protocol calls it; ``agent``: ``Opened.nixl_agent``."""

    name: str
    agent: bytes

    def messages(self, fetch_id: int, name: BlockName, data: bytes) -> Iterator[pb.PullResponse]:
        """What brings a block over."""

    def acknowledged(self, num_bytes: int) -> None:
        """So many bytes of blocks have come since the begin."""

    def close(self) -> None:
        """The stream is over."""


class GrpcSender:
    """Blocks in messages of about 1 MiB: inline, larger ones in chunks."""

    name = GRPC
    agent = b""

    def __init__(self) -> None:
        self._last_id = 0

    def messages(self, fetch_id: int, name: BlockName, data: bytes) -> Iterator[pb.PullResponse]:
        """The chunks of a block, if it has any, and the block."""
        block = block_message(fetch_id, name, data)
        if len(data) <= MESSAGE_BYTES:
            block.data.inline = data
        else:
            self._last_id += 1
            for offset in range(0, len(data), MESSAGE_BYTES):
                piece = data[offset : offset + MESSAGE_BYTES]
                size = 0 if offset else len(data)
                yield pb.PullResponse(
                    chunk=tensor_pb2.TensorChunk(transfer_id=self._last_id, offset=offset, data=piece, size=size)
                )
            block.data.chunks.transfer_id, block.data.chunks.size = self._last_id, len(data)
        yield pb.PullResponse(block=block)

    def acknowledged(self, num_bytes: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


class SharedSlots(Protocol):
    """What an ``Arena`` is to a sender. ``name``: of the memory."""

    name: str

    def put(self, data: bytes) -> int | None:
        """Where these bytes are from now on; None where there is no room. Raises OSError."""

    def give_back(self, offset: int) -> None:
        """Nobody reads what is there any more."""


class SlotSender(GrpcSender):
    """Blocks in slots of this process that another one reads. Where all are used they go in messages."""

    def __init__(self, name: str, arena: SharedSlots, agent: bytes = b"") -> None:
        super().__init__()
        self.name = name
        self.agent = agent
        self._arena = arena
        self._num_sent = 0
        self._unread: deque[tuple[int, int]] = deque()
        """Slots, each with the bytes of blocks up to its end that were sent on the stream."""

    def messages(self, fetch_id: int, name: BlockName, data: bytes) -> Iterator[pb.PullResponse]:
        """The block, or what brings it over otherwise."""
        self._num_sent += len(data)
        try:
            offset = self._arena.put(data)
        except OSError as e:
            log.warning("shared memory cannot be written; blocks go in messages", why=str(e))
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
        """Give back what was read."""
        while self._unread and self._unread[0][0] <= num_bytes:
            self._arena.give_back(self._unread.popleft()[1])

    def close(self) -> None:
        """Nobody reads any more what was sent: who does sees that its checksum is wrong."""
        while self._unread:
            self._arena.give_back(self._unread.popleft()[1])


def block_message(fetch_id: int, name: BlockName, data: bytes) -> pb.Block:
    """The message of a block, without its bytes."""
    return pb.Block(
        fetch_id=fetch_id,
        group=name.group,
        hash=name.hash,
        crc32=zlib.crc32(data),
        data=tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=(len(data),)),
    )


# At the engine that wants them.


class Receiver:
    """Those of one stream. ``shared``: copies what lies in memory that both ends see; None: nothing does. ``closed``: called when
    nothing more comes.
    """

    def __init__(
        self, block_bytes: int, shared: TakeShared | None = None, *, closed: Callable[[], None] = lambda: None
    ) -> None:
        self._block_bytes = block_bytes
        self._chunks = IncomingTensors(max_bytes=block_bytes + MESSAGE_BYTES)
        self._take = taker(self._chunks)
        self._shared = shared
        self._closed = closed

    def chunk(self, message: tensor_pb2.TensorChunk) -> None:
        """A piece of the block that follows."""
        take_chunk(self._chunks, message)

    async def data(self, block: pb.Block) -> Buffer | None:
        """The bytes of a block; None where they are not those that its checksum is of. Raises RequestFailed for a message that is
        none of the protocol's, and one of a block of another size.
        """
        self.check(block)
        return checked(payload(block.data, self._take, path="block.data", element_bytes=1, shared=self._shared), block)

    def check(self, block: pb.Block) -> None:
        """Raise InvalidArgument for a message of a block of another size."""
        if block.data.dtype != tensor_pb2.DATA_TYPE_UINT8 or list(block.data.shape) != [self._block_bytes]:
            raise InvalidArgument(
                f"block.data is no uint8 [{self._block_bytes}], which all blocks are", field="block.data"
            )

    def close(self) -> None:
        """Nothing more comes. Idempotent."""
        self._closed()


def checked(data: Buffer, block: pb.Block) -> Buffer | None:
    """The bytes, None where they are not those that the block's checksum is of."""
    return data if zlib.crc32(data) == block.crc32 else None
