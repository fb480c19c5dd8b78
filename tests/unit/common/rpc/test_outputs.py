"""Log-probabilities, vectors and cache events on the wire and in the domain."""

from array import array

import pytest

from penstock.common.v1 import events_pb2, logprobs_pb2, tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import Internal, InvalidArgument
from penstock_common.rpc import outputs as parts
from penstock_common.rpc.by_field import from_message, to_message
from penstock_common.rpc.outputs import columns_from_proto, fill_columns
from penstock_common.types.kv_transfer import (
    AllBlocksCleared,
    BlockMedia,
    BlockRemoved,
    BlockStored,
    KvCacheEvent,
    KvMedium,
    of_device,
)
from penstock_common.types.outputs import Logprobs, TokenColumns
from penstock_common.types.request import PoolingParams, PoolingTask, Vectors


def some_logprobs() -> Logprobs:
    logprobs = Logprobs()
    logprobs.add([5, 6], [-0.5, -1.0], [1, 2])
    logprobs.add([7], [-2.0], [9])
    return logprobs


def test_logprobs_survive_the_wire() -> None:
    assert parts.logprobs_from_proto(to_message(some_logprobs(), logprobs_pb2.Logprobs)) == some_logprobs()
    assert parts.logprobs_from_proto(to_message(Logprobs(), logprobs_pb2.Logprobs)) == Logprobs()


def test_logprobs_are_cut_and_joined_by_position() -> None:
    whole = some_logprobs()
    joined = whole.slice(0, 1)
    joined.extend(whole.slice(1, 2))
    assert joined == whole
    assert len(joined) == 2


def test_vectors_survive_the_wire() -> None:
    vectors = Vectors((2, 3), array("f", [1, 2, 3, 4, 5, 6.5]).tobytes())
    assert parts.vectors_from_proto(parts.vectors_to_proto(vectors)) == vectors
    assert parts.floats(vectors) == [1, 2, 3, 4, 5, 6.5]


@pytest.mark.parametrize(
    "tensor",
    [
        tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_INT8, shape=[1], inline=b"1"),
        tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2], inline=b"1234"),
        tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1], shared_memory={"name": "x"}),
    ],
)
def test_other_bytes_than_a_float32_vector_are_refused(tensor: tensor_pb2.Tensor) -> None:
    with pytest.raises(InvalidArgument, match="pooling_output"):
        parts.vectors_from_proto(tensor)


@pytest.mark.parametrize(
    "params",
    [
        PoolingParams(task=PoolingTask.EMBED),
        PoolingParams(task=PoolingTask.TOKEN_CLASSIFY, dimensions=3, normalize=False, use_activation=False),
    ],
)
def test_pooling_parameters_survive_the_wire(params: PoolingParams) -> None:
    assert from_message(parts.pooling_params_to_proto(params), PoolingParams) == params


@pytest.mark.parametrize(
    "event",
    [
        BlockStored(block_hashes=[b"a", b"b"], parent_hash=b"", token_ids=[1, 2], block_size=1),
        BlockStored(block_hashes=[b"a"], parent_hash=b"p", token_ids=[1], block_size=1, lora_name="pirate"),
        BlockStored(
            block_hashes=[b"a", b"b"],
            parent_hash=b"p",
            token_ids=[1, 2],
            block_size=1,
            extra_keys=[[BlockMedia("i", -3), BlockMedia("j", 0)], []],
        ),
        BlockRemoved(block_hashes=[b"a"]),
        BlockStored(block_hashes=[b"a"], parent_hash=b"", token_ids=[1], block_size=1, medium=KvMedium.HOST),
        BlockRemoved(block_hashes=[b"a"], medium=KvMedium.DISK),
        AllBlocksCleared(),
    ],
)
def test_cache_events_survive_the_wire(event: KvCacheEvent) -> None:
    assert parts.kv_event_from_proto(parts.kv_event_to_proto(event)) == event


def test_an_event_of_an_unknown_medium_is_none_and_one_of_no_medium_is_the_devices() -> None:
    message = events_pb2.KvCacheEvent(block_removed=events_pb2.BlockRemoved(block_hashes=[b"a"]))
    assert parts.kv_event_from_proto(message) == BlockRemoved(block_hashes=[b"a"])
    for event in (
        BlockRemoved(block_hashes=[b"a"]),
        BlockStored(block_hashes=[b"a"], parent_hash=b"", token_ids=[1], block_size=1),
    ):
        message = parts.kv_event_to_proto(event)
        getattr(message, message.WhichOneof("event")).medium = 99
        assert parts.kv_event_from_proto(events_pb2.KvCacheEvent.FromString(message.SerializeToString())) is None


def test_events_of_the_device_are_told_from_those_of_other_memory() -> None:
    device = [BlockRemoved(block_hashes=[b"a"]), AllBlocksCleared()]
    assert of_device([*device, BlockRemoved(block_hashes=[b"a"], medium=KvMedium.HOST)]) == device


# Columns of tokens: encoding and decoding.

SINGLE = [(1, 0, [5]), (2**32 - 1, 7, [2**32 - 1]), (3, 2**31, [0])]
SEVERAL = [(1, 0, [5]), (2, 7, [1, 2, 3]), (3, 9, []), (4, 1, [8])]


def columns(rows: list[tuple[int, int, list[int]]]) -> TokenColumns:
    made = TokenColumns()
    for row in rows:
        made.add(*row)
    return made


def over_the_wire(made: TokenColumns) -> TokenColumns:
    message = pb.TokenColumns()
    fill_columns(message, made)
    return columns_from_proto(pb.TokenColumns.FromString(message.SerializeToString()))


@pytest.mark.parametrize("rows", [[], SINGLE, SEVERAL, SEVERAL[::-1]])
def test_rows_come_over_the_wire_as_they_are(rows: list[tuple[int, int, list[int]]]) -> None:
    assert list(over_the_wire(columns(rows)).rows()) == rows


def test_rows_of_one_token_each_have_no_counts() -> None:
    assert not columns(SINGLE).counts


@pytest.mark.parametrize("token_ids", [[-1], [2**32], [1, -1], [1, 2**32]])
@pytest.mark.parametrize("rows", [SINGLE, SEVERAL])
def test_a_token_that_is_none_is_refused_and_leaves_the_columns_alone(
    rows: list[tuple[int, int, list[int]]], token_ids: list[int]
) -> None:
    made = columns(rows)
    with pytest.raises(OverflowError):
        made.add(9, 0, token_ids)
    made.add(10, 1, [6])
    assert list(made.rows()) == [*rows, (10, 1, [6])]


@pytest.mark.parametrize("rows", [SINGLE, SEVERAL])
def test_columns_are_cut_into_pieces_of_rows(rows: list[tuple[int, int, list[int]]]) -> None:
    pieces = columns(rows).cut(2)
    assert [len(piece) for piece in pieces[:-1]] == [2] * (len(pieces) - 1)
    assert [row for piece in pieces for row in piece.rows()] == rows


@pytest.mark.parametrize("rows", [SINGLE, SEVERAL])
def test_drafts_come_over_the_wire_beside_their_rows(rows: list[tuple[int, int, list[int]]]) -> None:
    made = TokenColumns()
    for number_of_drafts, row in zip([0, 5, 0, 3], rows, strict=False):
        made.add(*row, number_of_drafts)
    read = over_the_wire(made)
    assert list(read.rows()) == rows
    accepted = len(rows[1][2]) - 1
    assert next(iter(read.drafted())) == (rows[1][0], 5, accepted)
    assert [row[0] for row in read.drafted()] == [row[0] for row in rows[1::2]]
    assert [row for piece in read.cut(1) for row in piece.drafted()] == list(read.drafted())


def test_rows_without_drafts_have_no_column_of_them() -> None:
    assert not columns(SEVERAL).drafts
    assert list(columns(SEVERAL).drafted()) == []


def test_a_token_that_is_none_leaves_drafts_alone() -> None:
    made = columns(SINGLE)
    with pytest.raises(OverflowError):
        made.add(9, 0, [-1, 3], 4)
    made.add(10, 1, [6, 7], 4)
    assert list(over_the_wire(made).drafted()) == [(10, 4, 1)]


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("request_numbers", b"123"),
        ("offsets", b""),
        ("offsets", bytes(20)),
        ("counts", bytes(4)),
        ("token_ids", bytes(8)),
        ("token_ids", b"1"),
        ("drafts", bytes(4)),
    ],
)
@pytest.mark.parametrize("rows", [SINGLE, SEVERAL])
def test_columns_that_do_not_fit_together_are_refused_by_name(
    rows: list[tuple[int, int, list[int]]], column: str, change: bytes
) -> None:
    message = pb.TokenColumns()
    fill_columns(message, columns(rows))
    setattr(message, column, change)
    with pytest.raises(Internal, match="token_columns"):
        columns_from_proto(message)
