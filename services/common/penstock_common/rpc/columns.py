"""Columns of tokens to their message and back: a few copies of memory, however many outputs there are."""

import sys
from array import array

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import Internal
from penstock_common.types.token_columns import UINT32, TokenColumns

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
