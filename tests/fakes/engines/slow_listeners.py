"""A plugin with which an engine, its nodes and its workers go on a second after each of their listening sockets has opened.

A rank listens for other ranks only for the milliseconds in which they meet. With this, something else can connect first.
"""

import functools
import socket
import time
from typing import Any

NAME = "slow-listeners"
SECONDS = 1.0
"""Far below the time in which ranks give up one another."""


def install() -> None:
    """What the plugin does."""
    create = socket.create_server

    @functools.wraps(create)
    def create_slowly(*args: Any, **kwargs: Any) -> socket.socket:
        listener = create(*args, **kwargs)
        time.sleep(SECONDS)
        return listener

    socket.create_server = create_slowly
