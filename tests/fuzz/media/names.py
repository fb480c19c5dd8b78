"""Host names of media as resolved by a hostile name server, in a frontend's process in place of the system's resolver.

Loopback addresses represent networks: ``PUBLIC`` is the internet, all others are private networks.
"""

import itertools
import socket
import time
from collections.abc import Sequence
from typing import Any

VARIABLE = "FUZZ_NAMES"
"""Environment variable that enables the hostile name server in a process."""
PUBLIC, PRIVATE = "127.77.0.1", "127.0.0.1"
PUBLIC_NETWORK = "127.77.0.0/16"
SLOW = 0.7
"""Seconds until the slow name server answers."""
NAMES: dict[str, Sequence[Sequence[str]]] = {
    "images.test": [[PUBLIC]],
    "cdn.images.test": [[PUBLIC]],
    "slow.images.test": [[PUBLIC]],
    "private.images.test": [[PRIVATE]],
    "ten.images.test": [["10.0.0.1"]],
    "metadata.images.test": [["169.254.169.254"]],
    "zero.images.test": [["0.0.0.0"]],
    "six.images.test": [["::1"]],
    "mixed.images.test": [[PUBLIC, PRIVATE]],
    "mapped.images.test": [["::ffff:127.0.0.1"]],
    "nat64.images.test": [["64:ff9b::7f00:1"]],
    "scoped.images.test": [["fe80::1%lo"]],
    "rebinding.images.test": [[PUBLIC], [PRIVATE]],
    "later.images.test": [[PRIVATE], [PUBLIC], [PRIVATE, PUBLIC]],
    "none.images.test": [[]],
}
"""Answers by name, repeated in a cycle. All other names are unknown."""


def install() -> None:
    """Replace the name resolution of this process."""
    answers = {name: itertools.cycle(found) for name, found in NAMES.items()}
    asked = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *given: Any, **named: Any) -> Any:
        if not isinstance(host, str) or not host.endswith(".test"):
            return asked(host, port, *given, **named)
        if host not in answers:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        if host.startswith("slow."):
            time.sleep(SLOW)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in next(answers[host])]

    socket.getaddrinfo = getaddrinfo
