"""Where the threads of workers are, which the workers write when they are asked to."""

import contextlib
import os
import select
import signal
from collections.abc import Mapping, Sequence

DUMP_STACKS = signal.SIGUSR1
"""Has a worker write where its threads are."""
_QUIET = 1.0
"""Seconds without a word after which nothing more is waited for: a worker that is stopped writes nothing."""
_MOST = 64 * 1024


def read_stacks(pipes: Mapping[int, int], pids: Sequence[int]) -> dict[int, str]:
    """Ask all workers, and read what they write. ``pipes``: descriptors by rank. Returns texts by rank; one says so where a
    worker has written nothing.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, DUMP_STACKS)
    texts = dict.fromkeys(pipes, b"")
    ranks = {pipe: rank for rank, pipe in pipes.items()}
    poll = select.poll()
    for pipe in ranks:
        poll.register(pipe, select.POLLIN)
    while ready := poll.poll(1000 * _QUIET):
        for pipe, _ in ready:
            read = os.read(pipe, _MOST)
            texts[ranks[pipe]] += read
            if not read:
                poll.unregister(pipe)
    return {rank: text.decode(errors="replace") or "it does not answer: it is stopped" for rank, text in texts.items()}
