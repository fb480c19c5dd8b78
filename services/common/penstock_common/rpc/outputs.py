"""Converters between domain types and protobuf messages for errors, log-probabilities, embeddings and KV cache events."""

import sys
from array import array
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from penstock.common.v1 import events_pb2, kv_pb2, logprobs_pb2, pooling_pb2, tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import Internal, InvalidArgument, Unimplemented
from penstock_common.rpc.by_field import from_message, to_message
from penstock_common.tensors.chunks import Buffer, Chunk, IncomingTensors, TensorRef
from penstock_common.tensors.shared_memory import SegmentRef
from penstock_common.types.kv_transfer import (
    AllBlocksCleared,
    BlockMedia,
    BlockRemoved,
    BlockStored,
    KvCacheEvent,
    KvMedium,
    KvSource,
)
from penstock_common.types.outputs import UINT32, EngineCoreOutput, Logprobs, TokenColumns
from penstock_common.types.prompt_embeds import ELEMENT_BYTES, EmbedsDtype, PromptEmbeds
from penstock_common.types.request import PoolingParams, Vectors

# Conversion of token columns, with a few memory copies regardless of the number of outputs.

_NUMBER_BYTES = 4


def fill_columns(message: pb.TokenColumns, columns: TokenColumns) -> None:
    """Write token columns into an empty message."""
    message.request_numbers = _to_bytes(columns.request_numbers)
    message.offsets = _to_bytes(columns.offsets)
    message.counts = _to_bytes(columns.counts)
    message.token_ids = _to_bytes(columns.token_ids)
    message.drafts = _to_bytes(columns.drafts)


def columns_from_proto(message: pb.TokenColumns) -> TokenColumns:
    """Return the token columns of a message. Raises Internal if their lengths differ, because then no request can be
    found for a token.
    """
    columns = TokenColumns(
        request_numbers=_from_bytes(message.request_numbers, "request_numbers"),
        offsets=_from_bytes(message.offsets, "offsets"),
        counts=_from_bytes(message.counts, "counts"),
        token_ids=_from_bytes(message.token_ids, "token_ids"),
        drafts=_from_bytes(message.drafts, "drafts"),
    )
    rows = len(columns)
    _check("offsets", columns.offsets, rows)
    if columns.counts:
        _check("counts", columns.counts, rows)
    if columns.drafts:
        _check("drafts", columns.drafts, rows)
    _check("token_ids", columns.token_ids, sum(columns.counts) if columns.counts else rows)
    return columns


def _to_bytes(column: "array[int]") -> bytes:
    if sys.byteorder == "big":
        column = array(UINT32, column)
        column.byteswap()
    return column.tobytes()


def _from_bytes(data: bytes, name: str) -> "array[int]":
    if len(data) % _NUMBER_BYTES:
        raise Internal(f"token_columns.{name} has {len(data)} bytes; it must be a multiple of {_NUMBER_BYTES} bytes")
    column = array(UINT32, data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _check(name: str, column: "array[int]", length: int) -> None:
    if len(column) != length:
        raise Internal(f"token_columns.{name} has {len(column)} numbers; the other columns require {length}")


_FLOAT32_BYTES = 4
_MEDIA = frozenset(KvMedium)


def logprobs_from_proto(message: logprobs_pb2.Logprobs) -> Logprobs:
    """Return the log-probabilities from an engine's message. Engines send no token texts."""
    return from_message(message, Logprobs, tokens=[])


Place: TypeAlias = TensorRef | SegmentRef
"""Location of a tensor's elements outside the message."""

TakeTensor: TypeAlias = Callable[[tensor_pb2.ChunkReference, str], Buffer]
"""Function that returns the bytes of a tensor that arrived in chunks. The string names the tensor's field, for errors.
"""


TakeShared: TypeAlias = Callable[[tensor_pb2.SharedMemoryReference, str], Buffer]
"""Function that returns the bytes of a tensor in shared memory. The string names the tensor's field, for errors."""


def payload(
    message: tensor_pb2.Tensor,
    take: TakeTensor | None,
    *,
    path: str,
    element_bytes: int,
    shared: TakeShared | None = None,
) -> Buffer:
    """Return the elements of a tensor.

    Elements may be inline, in chunks if ``take`` is given, or in shared memory if ``shared`` is given. Raises the
    errors of ``take`` and ``shared``.

    Raises:
        InvalidArgument: The number of elements does not match the tensor's shape.
        Unimplemented: The elements are at a location that is not supported here.
    """
    size = element_bytes
    for length in message.shape:
        size *= length
    which = message.WhichOneof("payload")
    if which == "chunks" and take is not None:
        data = take(message.chunks, f"{path}.chunks")
    elif which == "shared_memory" and shared is not None:
        data = shared(message.shared_memory, f"{path}.shared_memory")
    elif which == "inline":
        data = message.inline
    else:
        raise Unimplemented(
            f"{path}.{which or 'inline'} is not supported here; send the elements inline", field=f"{path}.inline"
        )
    if len(data) != size:
        raise InvalidArgument(
            f"{path}.{which} has {len(data)} bytes; the tensor's shape and type require {size} bytes",
            field=f"{path}.{which}",
        )
    return data


def vectors_to_proto(vectors: Vectors, ref: TensorRef | None = None) -> tensor_pb2.Tensor:
    """Return a float32 tensor, inline or in chunks."""
    message = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=vectors.shape)
    set_payload(message, vectors.data, ref)
    return message


def vectors_from_proto(message: tensor_pb2.Tensor, take: TakeTensor | None = None) -> Vectors:
    """Return the vectors of a float32 tensor. Raises the errors of ``payload``, and InvalidArgument for another element
    type.
    """
    if message.dtype != tensor_pb2.DATA_TYPE_FLOAT32 or message.WhichOneof("payload") not in ("inline", "chunks"):
        raise InvalidArgument("pooling_output must be a float32 tensor, inline or in chunks", field="pooling_output")
    data = payload(message, take, path="pooling_output", element_bytes=_FLOAT32_BYTES)
    return Vectors(tuple(message.shape), data)


def chunk_to_proto(chunk: Chunk) -> tensor_pb2.TensorChunk:
    """Return the message for a tensor chunk."""
    return tensor_pb2.TensorChunk(**chunk._asdict())


def take_chunk(tensors: IncomingTensors, message: tensor_pb2.TensorChunk) -> None:
    """Store a tensor chunk until a later message refers to the tensor."""
    if message.abandoned:
        tensors.abandon(message.transfer_id)
    else:
        tensors.add(message.transfer_id, message.offset, message.data, size=message.size)


def taker(tensors: IncomingTensors) -> TakeTensor:
    """Return a function that removes the referenced tensor from ``tensors`` and returns its bytes."""
    return lambda reference, field: tensors.take(
        reference.transfer_id, reference.size, keep=reference.keep, field=field
    )


def set_payload(message: tensor_pb2.Tensor, data: Buffer, place: Place | None) -> None:
    """Set the location of a tensor's elements in a message to ``place``. Without a place, write ``data`` inline."""
    match place:
        case None:
            message.inline = bytes(data)
        case TensorRef(transfer_id, size, keep):
            message.chunks.transfer_id, message.chunks.size, message.chunks.keep = transfer_id, size, keep
        case SegmentRef(name, size):
            message.shared_memory.name, message.shared_memory.size = name, size


_EMBEDS_DTYPES: dict[int, EmbedsDtype] = {
    tensor_pb2.DATA_TYPE_FLOAT32: "float32",
    tensor_pb2.DATA_TYPE_FLOAT16: "float16",
    tensor_pb2.DATA_TYPE_BFLOAT16: "bfloat16",
}


def prompt_embeds_from_proto(
    message: tensor_pb2.Tensor,
    is_token: Sequence[bool] = (),
    *,
    path: str = "prompt_embeds",
    take: TakeTensor | None = None,
    shared: TakeShared | None = None,
) -> PromptEmbeds:
    """Return the prompt embeddings from a tensor ``[vectors, hidden size]``, or from a tensor with a row for every
    position.

    ``is_token`` has one entry per position: whether the position is a token ID. ``is_token`` is empty if no position is
    a token ID. Raises the errors of ``payload``, and InvalidArgument for another shape, type or size.
    """
    dtype = _EMBEDS_DTYPES.get(message.dtype)
    if dtype is None:
        known = ", ".join(_EMBEDS_DTYPES.values())
        raise InvalidArgument(f"{path}.dtype is {message.dtype}; known: {known}", field=f"{path}.dtype")
    if len(message.shape) != 2 or not all(message.shape):
        raise InvalidArgument(
            f"{path}.shape is {list(message.shape)}; it must be [tokens, hidden size]", field=f"{path}.shape"
        )
    num_rows, hidden_size = message.shape
    data = payload(message, take, path=path, element_bytes=ELEMENT_BYTES[dtype], shared=shared)
    embeds = PromptEmbeds(
        dtype=dtype, num_tokens=len(is_token) or num_rows, hidden_size=hidden_size, data=data, is_token=bytes(is_token)
    )
    num_vectors = embeds.num_vectors(0, embeds.num_tokens)
    if num_rows == num_vectors:
        return embeds
    if num_rows != embeds.num_tokens:
        raise InvalidArgument(
            f"{path} has {num_rows} rows, but prompt_is_token_ids has {embeds.num_tokens} entries, of which {num_vectors} "
            "are false; send one row per false entry, or one row per entry",
            field="prompt_is_token_ids",
        )
    size = embeds.row_bytes
    rows = b"".join(data[i * size : (i + 1) * size] for i in range(num_rows) if embeds.is_vector(i))
    return msgspec.structs.replace(embeds, data=rows)


def prompt_embeds_to_proto(
    embeds: PromptEmbeds, place: Place | None = None, *, every_position: bool = False
) -> tensor_pb2.Tensor:
    """Return the message for prompt embeddings.

    Args:
        embeds: The prompt embeddings.
        place: Location of the elements, or None if they are inline.
        every_position: Whether the tensor has a row for every position. Rows at positions of token IDs are zeros.
    """
    num_rows = embeds.num_tokens if every_position else embeds.num_vectors(0, embeds.num_tokens)
    dtype = next(number for number, name in _EMBEDS_DTYPES.items() if name == embeds.dtype)
    message = tensor_pb2.Tensor(dtype=tensor_pb2.DataType.ValueType(dtype), shape=(num_rows, embeds.hidden_size))
    set_payload(message, _every_row(embeds) if every_position else embeds.data, place)
    return message


def _every_row(embeds: PromptEmbeds) -> Buffer:
    if not embeds.is_token:
        return embeds.data
    size = embeds.row_bytes
    rows = bytearray(embeds.num_tokens * size)
    taken = 0
    for position in range(embeds.num_tokens):
        if embeds.is_vector(position):
            rows[position * size : (position + 1) * size] = embeds.data[taken : taken + size]
            taken += size
    return rows


def floats(vectors: Vectors) -> list[float]:
    """Return the elements of a float tensor as floats, in row-major order."""
    elements = array("f", vectors.data)
    if sys.byteorder == "big":
        elements.byteswap()
    return elements.tolist()


def pooling_params_to_proto(params: PoolingParams) -> pooling_pb2.PoolingParams:
    """Return the message for pooling parameters."""
    return to_message(params, pooling_pb2.PoolingParams, use_activation=params.use_activation)


def fill_kv(message: pb.EngineCoreOutput, output: EngineCoreOutput) -> None:
    """Copy two fields of ``output`` into ``message``: ``kv_source`` and ``kv_params``.

    The field ``kv_source`` names the engine that keeps the request's KV blocks. The field ``kv_params`` has data of a
    plugin's KV connector.
    """
    if output.kv_source is not None:
        message.kv_source.CopyFrom(to_message(output.kv_source, kv_pb2.KvSource))
    message.kv_transfer_params = output.kv_params


def read_kv(message: pb.EngineCoreOutput, output: EngineCoreOutput) -> None:
    """Read the fields that ``fill_kv`` writes."""
    if message.HasField("kv_source"):
        output.kv_source = from_message(message.kv_source, KvSource)
    if message.kv_transfer_params:
        output.kv_params = message.kv_transfer_params


def kv_event_to_proto(event: KvCacheEvent) -> events_pb2.KvCacheEvent:
    """Return the message for a cache event. For blocks on the device, the medium stays unset, because earlier versions
    know only this medium.
    """
    if isinstance(event, AllBlocksCleared):
        return events_pb2.KvCacheEvent(all_blocks_cleared=events_pb2.AllBlocksCleared())
    medium = None if event.medium is KvMedium.DEVICE else event.medium
    if isinstance(event, BlockRemoved):
        return events_pb2.KvCacheEvent(block_removed=to_message(event, events_pb2.BlockRemoved, medium=medium))
    extra_keys = [
        events_pb2.BlockExtraKeys(media=[to_message(each, events_pb2.BlockMedia) for each in media])
        for media in event.extra_keys
    ]
    stored = to_message(
        event, events_pb2.BlockStored, parent_block_hash=event.parent_hash, extra_keys=extra_keys, medium=medium
    )
    return events_pb2.KvCacheEvent(block_stored=stored)


def kv_event_from_proto(message: events_pb2.KvCacheEvent) -> KvCacheEvent | None:
    """Return the cache event, or None if its kind or medium is unknown to this version."""
    which = message.WhichOneof("event")
    if which == "all_blocks_cleared":
        return AllBlocksCleared()
    if which is None or ((medium := getattr(message, which).medium) and medium not in _MEDIA):
        return None
    if which == "block_removed":
        return from_message(message.block_removed, BlockRemoved)
    stored = message.block_stored
    extra_keys = [[from_message(each, BlockMedia) for each in keys.media] for keys in stored.extra_keys]
    return from_message(stored, BlockStored, parent_hash=stored.parent_block_hash, extra_keys=extra_keys)
