"""Parts of requests and outputs to messages and back: log-probabilities, vectors, prompts as vectors, cache events."""

import sys
from array import array
from collections.abc import Sequence

from penstock.common.v1 import events_pb2, logprobs_pb2, pooling_pb2, tensor_pb2
from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvCacheEvent
from penstock_common.types.logprobs import Logprobs
from penstock_common.types.pooling import PoolingParams, PoolingTask, Vectors
from penstock_common.types.prompt_embeds import ELEMENT_BYTES, EmbedsDtype, PromptEmbeds

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


_EMBEDS_DTYPES: dict[int, EmbedsDtype] = {
    tensor_pb2.DATA_TYPE_FLOAT32: "float32",
    tensor_pb2.DATA_TYPE_FLOAT16: "float16",
    tensor_pb2.DATA_TYPE_BFLOAT16: "bfloat16",
}


def prompt_embeds_from_proto(
    message: tensor_pb2.Tensor, is_token: Sequence[bool] = (), *, path: str = "prompt_embeds"
) -> PromptEmbeds:
    """The vectors of a prompt, ``[tokens, hidden size]``. Raises InvalidArgument for another shape, type or size, Unimplemented
    for elements that are not in the message.
    """
    dtype = _EMBEDS_DTYPES.get(message.dtype)
    if dtype is None:
        known = ", ".join(_EMBEDS_DTYPES.values())
        raise InvalidArgument(f"{path}.dtype is {message.dtype}; known: {known}", field=f"{path}.dtype")
    if (payload := message.WhichOneof("payload")) != "inline":
        raise Unimplemented(f"{path}.{payload or 'inline'} is not served yet; give inline", field=f"{path}.inline")
    if len(message.shape) != 2 or not all(message.shape):
        raise InvalidArgument(
            f"{path}.shape is {list(message.shape)}; it must be [tokens, hidden size]", field=f"{path}.shape"
        )
    num_tokens, hidden_size = message.shape
    size = num_tokens * hidden_size * ELEMENT_BYTES[dtype]
    if len(message.inline) != size:
        raise InvalidArgument(
            f"{path}.inline has {len(message.inline)} bytes; its shape and type ask for {size}", field=f"{path}.inline"
        )
    return PromptEmbeds(
        dtype=dtype, num_tokens=num_tokens, hidden_size=hidden_size, data=message.inline, is_token=tuple(is_token)
    )


def prompt_embeds_to_proto(embeds: PromptEmbeds) -> tensor_pb2.Tensor:
    """The message of the vectors."""
    dtype = next(number for number, name in _EMBEDS_DTYPES.items() if name == embeds.dtype)
    return tensor_pb2.Tensor(
        dtype=tensor_pb2.DataType.ValueType(dtype), shape=(embeds.num_tokens, embeds.hidden_size), inline=embeds.data
    )


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
