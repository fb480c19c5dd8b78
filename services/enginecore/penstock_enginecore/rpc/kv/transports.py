"""The ways on which the bytes of blocks go, as the engine sees them that has the blocks."""

import zlib
from collections.abc import Iterator
from typing import Protocol

from penstock.common.v1 import tensor_pb2
from penstock.kvtransfer.v1 import messages_pb2 as pb
from penstock_common.types.kv_transfer import BlockName
from penstock_enginecore.rpc.kv.window import MESSAGE_BYTES

GRPC = "grpc"
SHARED_MEMORY = "shared_memory"
NIXL = "nixl"


class Sender(Protocol):
    """Of one stream. ``name``: as the protocol calls it."""

    name: str

    def has_room(self, size: int) -> bool:
        """Whether a block of ``size`` bytes can be sent now."""

    def messages(self, fetch_id: int, name: BlockName, data: bytes) -> Iterator[pb.PullResponse]:
        """What brings a block over. Raises RuntimeError where there is no room."""

    def acknowledged(self, num_bytes: int) -> None:
        """So many bytes of blocks have come since the begin."""

    def close(self) -> None:
        """The stream is over."""


class GrpcSender:
    """Blocks in messages of about 1 MiB: inline, larger ones in chunks."""

    name = GRPC

    def __init__(self) -> None:
        self._last_id = 0

    def has_room(self, size: int) -> bool:  # noqa: ARG002 - the window alone counts
        """Always."""
        return True

    def messages(self, fetch_id: int, name: BlockName, data: bytes) -> Iterator[pb.PullResponse]:
        """The chunks of a block, if it has any, and the block."""
        block = block_message(fetch_id, name, data)
        if len(data) <= MESSAGE_BYTES:
            block.data.inline = data
        else:
            self._last_id += 1
            for offset in range(0, len(data), MESSAGE_BYTES):
                piece = data[offset : offset + MESSAGE_BYTES]
                yield pb.PullResponse(
                    chunk=tensor_pb2.TensorChunk(transfer_id=self._last_id, offset=offset, data=piece)
                )
            block.data.chunks.transfer_id, block.data.chunks.size = self._last_id, len(data)
        yield pb.PullResponse(block=block)

    def acknowledged(self, num_bytes: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


def block_message(fetch_id: int, name: BlockName, data: bytes) -> pb.Block:
    """The message of a block, without its bytes."""
    return pb.Block(
        fetch_id=fetch_id,
        group=name.group,
        hash=name.hash,
        crc32=zlib.crc32(data),
        data=tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=(len(data),)),
    )
