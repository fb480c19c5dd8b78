"""A worker process' side of what is between it and the engine."""

import faulthandler
import os
import signal
import threading
from functools import partial

import msgspec

from penstock_common.child_process import end_with_parent
from penstock_enginecore.executor.multiproc.ring import RingReader, RingWriter
from penstock_enginecore.executor.multiproc.ring_memory import RingMemory
from penstock_enginecore.executor.multiproc.stack_dumps import DUMP_STACKS
from penstock_enginecore.worker.messages import Start, decode_call


def open_channel(descriptor: int) -> tuple[Start, RingReader, RingWriter]:
    """What the worker was told, where its calls come from and where its answers go. From here on the process ends with the
    engine, leaves signals to it, and says where its threads are when it is asked. ``descriptor``: of a file with a ``Start``.
    """
    with os.fdopen(descriptor, "rb") as file:
        start = msgspec.msgpack.decode(file.read(), type=Start)
    end_with_parent()
    threading.Thread(target=partial(_end_with, start.engine), name="engine-watch", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine decides when its workers stop
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(DUMP_STACKS, file=start.stacks, all_threads=True)
    calls = RingReader(RingMemory(start.calls), start.config.place, rehearse=decode_call)
    answers = RingWriter(RingMemory(start.answers))
    for inherited in (start.calls, start.answers):
        os.close(inherited)
    return start, calls, answers


def _end_with(engine: int) -> None:
    """Wait for the end of who holds the other end of the pipe, and end at once."""
    os.read(engine, 1)
    os._exit(1)
