"""Rows as the bytes of an all-gather: of one length, whatever they say."""

import struct

from penstock_common.types.data_parallel import PauseMode, Pauses
from penstock_enginecore.data_parallel.core.row import Row

_ROW = struct.Struct("<QQQQQBB")


def pack_row(row: Row) -> bytes:
    """The row's bytes."""
    pauses = row.pauses
    numbers = (row.epoch, row.wave, row.step, pauses.number, row.prepared)
    return _ROW.pack(*numbers, pauses.mode, row.unfinished)


def unpack_row(data: bytes) -> Row:
    """The row of these bytes. Raises struct.error, and ValueError for a mode that there is not."""
    epoch, wave, step, number, prepared, mode, unfinished = _ROW.unpack(data)
    return Row(epoch, wave, step, bool(unfinished), Pauses(number, PauseMode(mode)), prepared)
