"""Signals that reach a main thread wherever it is.

Python runs a signal handler on the main thread, between two bytecodes. A signal that arrives just before that thread
blocks in C code therefore waits until something else wakes the thread, which for an idle engine may be never. The
wakeup file descriptor is written at once, whatever the main thread does; a thread of ours reads it.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def signals_handled(numbers: tuple[signal.Signals, ...], handle: Callable[[], None]) -> Iterator[None]:
    """While the context is open, each of the signals calls ``handle`` on a thread of its own. Main thread only."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while received := os.read(reader, 1):
            if received[0] in numbers:
                handle()

    thread = threading.Thread(target=watch, name="signals", daemon=True)
    previous_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, _ignore) for number in numbers}
    thread.start()
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_writer)
        os.close(writer)
        thread.join()
        os.close(reader)


def _ignore(*_: object) -> None:
    """A Python handler must be installed for the file descriptor to be written."""
