"""Parts of requests and outputs to messages and back: errors, log-probabilities, vectors, prompts as vectors, cache events."""

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

# Columns of tokens to their message and back: a few copies of memory, however many outputs there are.

_NUMBER_BYTES = 4


def fill_columns(message: pb.TokenColumns, columns: TokenColumns) -> None:
    """Write the columns into an empty message."""
    message.request_numbers = _to_bytes(columns.request_numbers)
    message.offsets = _to_bytes(columns.offsets)
    message.counts = _to_bytes(columns.counts)
    message.token_ids = _to_bytes(columns.token_ids)
    message.drafts = _to_bytes(columns.drafts)


def columns_from_proto(message: pb.TokenColumns) -> TokenColumns:
    """The columns. Raises Internal for those that do not fit together: it cannot be told whose the tokens are."""
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
        raise Internal(f"token_columns.{name} has {len(data)} bytes; numbers have {_NUMBER_BYTES} each")
    column = array(UINT32, data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _check(name: str, column: "array[int]", length: int) -> None:
    if len(column) != length:
        raise Internal(f"token_columns.{name} has {len(column)} numbers; the other columns ask for {length}")


_FLOAT32_BYTES = 4
_MEDIA = frozenset(KvMedium)


def logprobs_from_proto(message: logprobs_pb2.Logprobs) -> Logprobs:
    """The domain's log-probabilities of an engine, which has no texts."""
    return from_message(message, Logprobs, tokens=[])


Place: TypeAlias = TensorRef | SegmentRef
"""Where the elements of a tensor are that are not inline."""

TakeTensor: TypeAlias = Callable[[tensor_pb2.ChunkReference, str], Buffer]
"""The bytes of a tensor that came in chunks; the text names its field, for errors."""


TakeShared: TypeAlias = Callable[[tensor_pb2.SharedMemoryReference, str], Buffer]
"""The bytes of a tensor that lies in shared memory; the text names its field, for errors."""


def payload(
    message: tensor_pb2.Tensor,
    take: TakeTensor | None,
    *,
    path: str,
    element_bytes: int,
    shared: TakeShared | None = None,
) -> Buffer:
    """The elements of a tensor, inline or, with ``take``, in chunks, or, with ``shared``, in shared memory. Raises
    InvalidArgument unless they are as many as its shape says, Unimplemented for elements that are elsewhere, and what ``take``
    and ``shared`` raise.
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
        raise Unimplemented(f"{path}.{which or 'inline'} is not served yet; give inline", field=f"{path}.inline")
    if len(data) != size:
        raise InvalidArgument(
            f"{path}.{which} has {len(data)} bytes; its shape and type ask for {size}", field=f"{path}.{which}"
        )
    return data


def vectors_to_proto(vectors: Vectors, ref: TensorRef | None = None) -> tensor_pb2.Tensor:
    """A float32 tensor, inline or in chunks."""
    message = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=vectors.shape)
    set_payload(message, vectors.data, ref)
    return message


def vectors_from_proto(message: tensor_pb2.Tensor, take: TakeTensor | None = None) -> Vectors:
    """The vectors of a float32 tensor. Raises InvalidArgument for another kind, and what ``payload`` raises."""
    if message.dtype != tensor_pb2.DATA_TYPE_FLOAT32 or message.WhichOneof("payload") not in ("inline", "chunks"):
        raise InvalidArgument("pooling_output is not a float32 tensor, inline or in chunks", field="pooling_output")
    data = payload(message, take, path="pooling_output", element_bytes=_FLOAT32_BYTES)
    return Vectors(tuple(message.shape), data)


def chunk_to_proto(chunk: Chunk) -> tensor_pb2.TensorChunk:
    """The message of a piece of a tensor."""
    return tensor_pb2.TensorChunk(**chunk._asdict())


def take_chunk(tensors: IncomingTensors, message: tensor_pb2.TensorChunk) -> None:
    """Keep a piece of a tensor for the messages to come."""
    if message.abandoned:
        tensors.abandon(message.transfer_id)
    else:
        tensors.add(message.transfer_id, message.offset, message.data, size=message.size)


def taker(tensors: IncomingTensors) -> TakeTensor:
    """Takes from ``tensors`` what a message refers to."""
    return lambda reference, field: tensors.take(
        reference.transfer_id, reference.size, keep=reference.keep, field=field
    )


def set_payload(message: tensor_pb2.Tensor, data: Buffer, place: Place | None) -> None:
    """Say where the elements of a tensor are: at ``place``, or inline."""
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
    """The vectors of a prompt, ``[vectors, hidden size]``, or with a row for every position. ``is_token``: which positions are
    token ids, none if empty. Raises InvalidArgument for another shape, type or size, and what ``payload`` raises.
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
            f"{path} has {num_rows} rows; prompt_is_token_ids has {embeds.num_tokens} entries, of which {num_vectors} are of "
            "vectors",
            field="prompt_is_token_ids",
        )
    size = embeds.row_bytes
    rows = b"".join(data[i * size : (i + 1) * size] for i in range(num_rows) if embeds.is_vector(i))
    return msgspec.structs.replace(embeds, data=rows)


def prompt_embeds_to_proto(
    embeds: PromptEmbeds, place: Place | None = None, *, every_position: bool = False
) -> tensor_pb2.Tensor:
    """The message of the vectors. ``place``: where they are; None: inline. ``every_position``: with a row, of zeros, for each
    token id too.
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
    """The elements, in row-major order."""
    elements = array("f", vectors.data)
    if sys.byteorder == "big":
        elements.byteswap()
    return elements.tolist()


def pooling_params_to_proto(params: PoolingParams) -> pooling_pb2.PoolingParams:
    """The message for these parameters."""
    return to_message(params, pooling_pb2.PoolingParams, use_activation=params.use_activation)


def fill_kv(message: pb.EngineCoreOutput, output: EngineCoreOutput) -> None:
    """Write who keeps the request's keys and values, and what a plugin's connector says of them."""
    if output.kv_source is not None:
        message.kv_source.CopyFrom(to_message(output.kv_source, kv_pb2.KvSource))
    message.kv_transfer_params = output.kv_params


def read_kv(message: pb.EngineCoreOutput, output: EngineCoreOutput) -> None:
    """The reverse of ``fill_kv``."""
    if message.HasField("kv_source"):
        output.kv_source = from_message(message.kv_source, KvSource)
    if message.kv_transfer_params:
        output.kv_params = message.kv_transfer_params


def kv_event_to_proto(event: KvCacheEvent) -> events_pb2.KvCacheEvent:
    """The message of a cache event. The device goes unsaid, as before there were other media."""
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
    """The domain's event; None for a kind or a medium that this version does not know."""
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
