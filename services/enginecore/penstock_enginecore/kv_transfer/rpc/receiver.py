"""The bytes of blocks as they come."""

import zlib
from collections.abc import Callable

from penstock.common.v1 import tensor_pb2
from penstock.kvtransfer.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.rpc.outputs import TakeShared, payload, take_chunk, taker
from penstock_common.tensors.incoming import IncomingTensors
from penstock_common.tensors.sizes import Buffer
from penstock_enginecore.kv_transfer.rpc.window import MESSAGE_BYTES


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
