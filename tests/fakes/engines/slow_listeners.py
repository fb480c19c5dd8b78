"""Plugin with which an engine, its nodes and its workers pause for a second after opening each listening socket.

A rank listens for other ranks only for milliseconds, while they form a group. With this pause, a test can connect
first.
"""

import functools
import socket
import time
from typing import Any

NAME = "slow-listeners"
SECONDS = 1.0
"""Duration of the pause in seconds, far below the time after which ranks stop waiting for each other."""


def install() -> None:
    """Install the plugin."""
    create = socket.create_server

    @functools.wraps(create)
    def create_slowly(*args: Any, **kwargs: Any) -> socket.socket:
        listener = create(*args, **kwargs)
        time.sleep(SECONDS)
        return listener

    socket.create_server = create_slowly
