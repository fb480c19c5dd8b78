"""The event loop of processes that speak gRPC."""

import functools
import socket
from collections.abc import Callable
from typing import Any

import uvloop

_MOST_BYTES = 64 * 1024


class GrpcEventLoop(uvloop.Loop):
    """uvloop's, which gRPC wakes once for many events rather than once for each.

    A thread of gRPC's puts every event into a queue and then writes a byte to a socket. The reader that gRPC adds to the loop
    takes one byte and empties the queue, so all but the first byte of a burst wake the loop for nothing: a turn of it for every
    message that was sent. Here the bytes of a burst are taken together. No event is left behind: it is in the queue before its
    byte is written, and the queue is emptied after the bytes are taken.
    """

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]  # variadic there
        """Call ``callback`` with ``args`` when ``fd`` can be read, as asyncio does; that of gRPC's events once for a burst."""
        if isinstance(fd, socket.socket) and _is_of_grpc(callback):
            super().add_reader(fd, _take_burst, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)


def _is_of_grpc(callback: Callable[..., Any]) -> bool:
    function = callback.func if isinstance(callback, functools.partial) else callback
    return type(getattr(function, "__self__", None)).__name__ == "PollerCompletionQueue"


def _take_burst(events: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    """Leave one byte for the reader, which waits for it."""
    count = len(events.recv(_MOST_BYTES, socket.MSG_PEEK))
    if count > 1:
        events.recv(count - 1)
    callback(*args)
