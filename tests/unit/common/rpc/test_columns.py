"""Columns of tokens, and their way over the wire."""

import pytest

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import Internal
from penstock_common.rpc.outputs import columns_from_proto, fill_columns
from penstock_common.types.outputs import TokenColumns

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
