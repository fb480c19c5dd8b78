"""Scripts of hostile connections, step by step, with the allowed answers of the server."""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Send(NamedTuple):
    """Send ``data`` in pieces of ``piece`` bytes, with ``pause`` seconds after each."""

    data: bytes
    piece: int = 2**16
    pause: float = 0.0


class Flood(NamedTuple):
    """Send ``data`` again and again, for at most ``seconds`` and ``most`` bytes."""

    data: bytes
    seconds: float
    most: int


class Wait(NamedTuple):
    """Do nothing for ``seconds``, or until the server ends the connection."""

    seconds: float


class UntilHeard(NamedTuple):
    """Wait until ``count`` matches of ``pattern`` have come, or the server ends the connection."""

    pattern: re.Pattern[bytes]
    count: int = 1


class UntilClosed(NamedTuple):
    """Wait until the server ends the connection."""


class EndOutput(NamedTuple):
    """Shut down the side that sends. The other side stays open."""


class Reset(NamedTuple):
    """End the connection with a reset instead of a regular end."""


Step = Send | Flood | Wait | UntilHeard | UntilClosed | EndOutput | Reset
CLIENT_ERRORS = frozenset(range(400, 500))


class Script(NamedTuple):
    """Script of one connection.

    Args:
        kind: Name of the script's kind, for tables.
        port: Port of the connection: http, guarded (HTTP with API keys), frontend, admin, engine or coordinator
            (gRPC).
        steps: Steps of the script.
        reads: Whether the client reads answers.
        most: The largest number of final answers that the server may give.
        least: The smallest number of final answers that the server must give.
        allowed: Statuses that the server may answer with; empty means any below 500.
        known: Name of the request whose known answer every 200 or every gRPC message must equal; empty if answers are
            not compared.
        window: The largest number of bytes that the server may send in DATA frames; -1 means that they are not counted.
    """

    kind: str
    port: str
    steps: Sequence[Step]
    reads: bool = True
    most: int = 1
    least: int = 0
    allowed: frozenset[int] = frozenset()
    known: str = ""
    window: int = -1

    @property
    def is_grpc(self) -> bool:
        """Whether the port speaks gRPC."""
        return self.port not in ("http", "guarded")

    @property
    def shown(self) -> str:
        """Return the steps as shortened text."""
        return ", ".join(_shown(step) for step in self.steps)[:1500]

    @property
    def size(self) -> int:
        """Return the maximum number of bytes that the client sends."""
        return sum(
            len(step.data) if isinstance(step, Send) else step.most
            for step in self.steps
            if isinstance(step, Send | Flood)
        )


def _shown(step: Step) -> str:
    match step:
        case Send(data, piece, pause):
            how = f" in pieces of {piece}, {1e3 * pause:.0f} ms apart" if piece < len(data) else ""
            return f"send {len(data)} bytes {data[:200]!r}{how}"
        case Flood(data, seconds, most):
            return f"flood {data[:60]!r} for {seconds:.1f} s, at most {most} bytes"
        case Wait(seconds):
            return f"wait {seconds:.2f} s"
        case UntilHeard(pattern, count):
            return f"until {count} of {pattern.pattern!r}"
        case UntilClosed():
            return "until it is closed"
        case EndOutput():
            return "end the output"
        case _:
            return "reset"
