"""Code of the fork server, a process whose forks compile constraints and compute masks. The engine's process does not
run this module.

Importing xgrammar takes seconds, and reading a large vocabulary takes half a second. The fork server imports xgrammar
and reads the vocabulary only once. A fork is therefore available without delay, even as a replacement for a process
that ended. The fork server has one thread, which waits for requests and for forks that end.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec
import xgrammar

from penstock_enginecore.structured_output import compiling_process, following_process
from penstock_enginecore.structured_output.grammar_processes import MAX_PACKET, Compile, Fork, detach, read_file

_FILES = 2


def main(channel: socket.socket) -> None:
    """Read the vocabulary from the file in the first packet. Then fork a process for each Fork message, and answer with
    the pid and pidfd of the new process, until ``channel`` is closed.

    The packet of a Fork message carries two open files. The first file is the channel between the new process and the
    engine. The second file is a pipe to which the fork server writes the exit code of the new process.
    """
    detach(0)
    _, files, _, _ = socket.recv_fds(channel, MAX_PACKET, _FILES)
    if not files:
        return
    info = xgrammar.TokenizerInfo.deserialize_json(read_file(files[0]).decode())
    # Freeze the existing objects. Otherwise a garbage collection in a fork would copy every memory page that the forks
    # share.
    gc.freeze()
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pipes: dict[int, int] = {}
    decoder: msgspec.msgpack.Decoder[Fork] = msgspec.msgpack.Decoder(Fork)
    while True:
        ready, _, _ = select.select([channel, wake], [], [])
        if wake in ready:
            wake.recv(4096)
            _reap(pipes)
        if channel not in ready:
            continue
        data, files, _, _ = socket.recv_fds(channel, MAX_PACKET, _FILES)
        if not data:
            return
        theirs, pipe = files
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (channel, wake, woken):
                inherited.close()
            for other in (pipe, *pipes.values()):
                os.close(other)
            _work(theirs, info, decoder.decode(data))
        pipes[pid] = pipe
        os.close(theirs)
        pidfd = os.pidfd_open(pid)  # _reap runs only in this loop, so the pid still belongs to the fork.
        with contextlib.suppress(OSError):  # Ignore the error if the engine has ended.
            socket.send_fds(channel, [str(pid).encode()], [pidfd])
        os.close(pidfd)


def _reap(pipes: dict[int, int]) -> None:
    """Write the exit codes of forks that have ended to their pipes."""
    while pipes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        pipe = pipes.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, struct.pack("=i", os.waitstatus_to_exitcode(status)))
        os.close(pipe)


def _work(channel: int, info: xgrammar.TokenizerInfo, fork: Fork) -> NoReturn:
    """Run the work of a new fork, and then exit."""
    code = 1
    try:
        if isinstance(fork, Compile):
            compiling_process.main(Connection(channel), info, fork.memory)
        else:
            following_process.main(socket.socket(fileno=channel), info, fork.settings)
        code = 0
    finally:
        os._exit(code)  # Exit even after an exception, because the outer stack frames belong to the fork server's loop.


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
