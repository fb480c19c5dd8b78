"""Program that matches regular expressions of an adapter's settings, with limits on CPU time and memory.

Expressions can be hostile: a short expression can need seconds of time or gigabytes of memory. The engine runs this
file as a separate process, once for each setting that has expressions. An expression can therefore neither block the
engine's interpreter lock nor exhaust the engine's memory.

The program imports only the standard library, so that it starts in about 20 ms. It reads one job from its standard
input and writes one reply to its standard output, both as JSON.
"""

import json
import os
import re
import resource
import signal
import sys
import time
from typing import Any

_NICENESS = 10
"""Increment of the process's niceness while it matches, so that the engine's steps have priority on the CPU."""


def main() -> None:
    """Answer the job on standard input.

    The job has ``expressions`` and ``names`` (lists of strings), ``seconds`` (limit of CPU time) and ``bytes`` (limit
    of memory, in addition to the memory of the interpreter).

    The reply is ``{"memory": true}`` if there is too little memory. Otherwise the reply has ``seconds``, the CPU time
    used, and ``answers``, with one answer for each expression. If the expression is invalid, the answer is a string
    with the reason. Otherwise the answer is an object. Its keys are the names that the expression matches completely.
    Its values are the text of the group ``index``, or "".

    If the CPU time exceeds the limit, SIGPROF ends the process before it replies.
    """
    job = json.loads(sys.stdin.buffer.read())
    _limit(job["seconds"], job["bytes"])
    started = time.process_time()
    try:
        answers = [_answer(expression, job["names"]) for expression in job["expressions"]]
        reply = json.dumps({"answers": answers, "seconds": time.process_time() - started})
    except MemoryError:
        reply = json.dumps({"memory": True})
    sys.stdout.write(reply)


def _limit(seconds: float, num_bytes: int) -> None:
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - pathlib would take longer to import than this program
        pages = int(statm.read().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Ignored and blocked signals are inherited from the parent. While ``re`` matches an expression, only a signal's
    # default action works.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(expression: str, names: list[str]) -> str | dict[str, str]:
    try:
        compiled = re.compile(expression)
    except (re.error, OverflowError, RecursionError, ValueError) as e:
        return str(e) or type(e).__name__
    found: dict[str, str] = {}
    for name in names:
        if match := compiled.fullmatch(name):
            groups: dict[str, Any] = match.groupdict()
            found[name] = groups.get("index") or ""
    return found


if __name__ == "__main__":
    main()
