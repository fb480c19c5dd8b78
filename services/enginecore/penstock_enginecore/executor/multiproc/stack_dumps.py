"""Where the threads of workers are, which the workers write when they are asked to."""

import contextlib
import os
import select
import signal
from collections.abc import Sequence

from penstock_enginecore.executor.multiproc.step_watchdog import has_ended, is_stopped

DUMP_STACKS = signal.SIGUSR1
"""Has a worker write where its threads are."""
_PATIENT, _QUIET = 1.0, 0.25
"""Seconds without a word after which nothing more is waited for: until each worker that is not stopped has begun, and then."""
_MOST = 64 * 1024


def read_stacks(pipes: Sequence[int], pids: Sequence[int]) -> list[str]:
    """Ask all workers, and read what they write. ``pipes``: a descriptor of each. Returns a text of each; one says so where
    a worker has written nothing.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, DUMP_STACKS)
    texts = [b""] * len(pipes)
    places = {pipe: i for i, pipe in enumerate(pipes)}
    poll = select.poll()
    for pipe in pipes:
        poll.register(pipe, select.POLLIN)
    silent = {i for i, pid in enumerate(pids) if not is_stopped(pid) and not has_ended(pid)}
    while ready := poll.poll(1000 * (_PATIENT if silent else _QUIET)):
        for pipe, _ in ready:
            read = os.read(pipe, _MOST)
            texts[places[pipe]] += read
            silent.discard(places[pipe])
            if not read:
                poll.unregister(pipe)
    return [text.decode(errors="replace") or _silence(pid) for text, pid in zip(texts, pids, strict=True)]


def _silence(pid: int) -> str:
    return "it has ended" if has_ended(pid) else "it does not answer: it is stopped"
