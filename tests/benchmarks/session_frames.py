"""Cost of a step's outputs as a frame, without a stream: creation, encoding, parsing and reading, in columns and as
messages.

``python -m tests.benchmarks.session_frames`` prints microseconds of processor time per output: the minimum of the
rounds, in which all variants are measured in turn. The frames are those of ``hop``, which sends them over a stream.
"""

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.types.outputs import EngineCoreOutputs
from penstock_enginecore.rpc.convert import outputs_to_proto
from penstock_frontend.rpc.session_messages import engine_core_outputs
from tests.benchmarks.hop import frame_of

SIZES = (1, 16, 64, 256)
OUTPUTS_PER_TURN = 20_000
FORMS = {"columns": True, "messages": False}


class Row(msgspec.Struct, frozen=True):
    """Microseconds of processor time per output."""

    form: str
    outputs_per_frame: int
    write_us: float
    read_us: float
    bytes_per_output: float


def measure(rounds: int) -> list[Row]:
    """Print one row per size and form."""
    written: dict[tuple[int, str], list[float]] = defaultdict(list)
    read: dict[tuple[int, str], list[float]] = defaultdict(list)
    lengths: dict[tuple[int, str], int] = {}
    for _ in range(rounds):
        for size in SIZES:
            for form, in_columns in FORMS.items():
                frame, repeats = frame_of(size, in_columns=in_columns), OUTPUTS_PER_TURN // size
                data = _write(frame)
                lengths[size, form] = len(data)
                written[size, form].append(_seconds(partial(_write, frame), repeats))
                read[size, form].append(_seconds(partial(_read, data), repeats))
    return [
        Row(
            form,
            size,
            write_us=min(written[size, form]) * 1e6 / size,
            read_us=min(read[size, form]) * 1e6 / size,
            bytes_per_output=lengths[size, form] / size,
        )
        for size, form in written
    ]


def _write(frame: EngineCoreOutputs) -> bytes:
    return pb.SessionResponse(outputs=outputs_to_proto(frame)).SerializeToString()


def _read(data: bytes) -> EngineCoreOutputs:
    return engine_core_outputs(pb.SessionResponse.FromString(data).outputs)


def _seconds(work: Callable[[], object], repeats: int) -> float:
    gc.collect()
    gc.disable()
    began = time.process_time()
    for _ in range(repeats):
        work()
    seconds = (time.process_time() - began) / repeats
    gc.enable()
    return seconds


def table(rows: list[Row]) -> Table:
    """The rows as they are printed."""
    made = Table("outputs per frame", "form", "write, us per output", "read, us per output", "bytes per output")
    for row in rows:
        cells = (f"{row.write_us:.3f}", f"{row.read_us:.3f}", f"{row.bytes_per_output:.1f}")
        made.add_row(str(row.outputs_per_frame), row.form, *cells)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    Console(width=120).print(table(measure(parser.parse_args().rounds)))
