"""Parts of an engine's outputs to messages and back: log-probabilities, vectors, cache events."""

import sys
from array import array

from penstock.common.v1 import events_pb2, logprobs_pb2, pooling_pb2, tensor_pb2
from penstock_common.errors import InvalidArgument
from penstock_common.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvCacheEvent
from penstock_common.types.logprobs import Logprobs
from penstock_common.types.pooling import PoolingParams, PoolingTask, Vectors

_FLOAT32_BYTES = 4


def logprobs_to_proto(logprobs: Logprobs) -> logprobs_pb2.Logprobs:
    """The message of these log-probabilities."""
    return logprobs_pb2.Logprobs(
        offsets=logprobs.offsets,
        token_ids=logprobs.token_ids,
        logprobs=logprobs.logprobs,
        ranks=logprobs.ranks,
        tokens=logprobs.tokens,
    )


def logprobs_from_proto(message: logprobs_pb2.Logprobs) -> Logprobs:
    """The domain's log-probabilities."""
    return Logprobs(
        offsets=list(message.offsets) or [0],
        token_ids=list(message.token_ids),
        logprobs=list(message.logprobs),
        ranks=list(message.ranks),
    )


def vectors_to_proto(vectors: Vectors) -> tensor_pb2.Tensor:
    """A float32 tensor, inline."""
    return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=vectors.shape, inline=vectors.data)


def vectors_from_proto(message: tensor_pb2.Tensor) -> Vectors:
    """The vectors of an inline float32 tensor. Raises InvalidArgument for another kind, or a wrong number of bytes."""
    if message.dtype != tensor_pb2.DATA_TYPE_FLOAT32 or message.WhichOneof("payload") != "inline":
        raise InvalidArgument("pooling_output is not an inline float32 tensor", field="pooling_output")
    size = _FLOAT32_BYTES
    for length in message.shape:
        size *= length
    if len(message.inline) != size:
        raise InvalidArgument(
            f"pooling_output has {len(message.inline)} bytes; its shape asks for {size}", field="pooling_output"
        )
    return Vectors(tuple(message.shape), message.inline)


def floats(vectors: Vectors) -> list[float]:
    """The elements, in row-major order."""
    elements = array("f", vectors.data)
    if sys.byteorder == "big":
        elements.byteswap()
    return elements.tolist()


def pooling_params_from_proto(message: pooling_pb2.PoolingParams, *, path: str = "pooling_params") -> PoolingParams:
    """The domain's parameters. Raises InvalidArgument for an unknown task."""
    known = [int(task) for task in PoolingTask]
    if message.task not in known:
        raise InvalidArgument(
            f"{path}.task is {message.task}; known: {', '.join(task.name for task in PoolingTask)}",
            field=f"{path}.task",
        )
    return PoolingParams(
        task=PoolingTask(message.task),
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        normalize=message.normalize if message.HasField("normalize") else None,
        use_activation=message.use_activation if message.HasField("use_activation") else True,
    )


def pooling_params_to_proto(params: PoolingParams) -> pooling_pb2.PoolingParams:
    """The message for these parameters."""
    return pooling_pb2.PoolingParams(
        task=pooling_pb2.PoolingTask.ValueType(params.task),
        dimensions=params.dimensions,
        normalize=params.normalize,
        use_activation=params.use_activation,
    )


def kv_event_to_proto(event: KvCacheEvent) -> events_pb2.KvCacheEvent:
    """The message of a cache event."""
    match event:
        case BlockStored():
            stored = events_pb2.BlockStored(
                block_hashes=event.block_hashes,
                parent_block_hash=event.parent_hash,
                token_ids=event.token_ids,
                block_size=event.block_size,
            )
            return events_pb2.KvCacheEvent(block_stored=stored)
        case BlockRemoved():
            return events_pb2.KvCacheEvent(block_removed=events_pb2.BlockRemoved(block_hashes=event.block_hashes))
        case AllBlocksCleared():
            return events_pb2.KvCacheEvent(all_blocks_cleared=events_pb2.AllBlocksCleared())


def kv_event_from_proto(message: events_pb2.KvCacheEvent) -> KvCacheEvent | None:
    """The domain's event; None for a kind that this version does not know."""
    match message.WhichOneof("event"):
        case "block_stored":
            stored = message.block_stored
            return BlockStored(
                block_hashes=list(stored.block_hashes),
                parent_hash=stored.parent_block_hash,
                token_ids=list(stored.token_ids),
                block_size=stored.block_size,
            )
        case "block_removed":
            return BlockRemoved(block_hashes=list(message.block_removed.block_hashes))
        case "all_blocks_cleared":
            return AllBlocksCleared()
        case _:
            return None
