"""Scripts by number. Each script depends only on the seed and the script's number."""

from collections.abc import Callable, Mapping
from random import Random

from tests.fuzz.connections import grpc_scripts, http_scripts
from tests.fuzz.connections.script import Script, Send, Step, UntilClosed, UntilHeard
from tests.fuzz.http2 import call

Maker = Callable[[Random, float], Script]
_HTTP_SHARE = 0.55


def script_of(seed: int, number: int, hold: float) -> Script:
    """Return the script with this number. ``hold`` is the maximum duration in seconds."""
    rng = Random(f"connection {seed} {number}")
    makers: Mapping[Maker, float] = http_scripts.MAKERS if rng.random() < _HTTP_SHARE else grpc_scripts.MAKERS
    maker = rng.choices(list(makers), list(makers.values()))[0]
    return maker(rng, hold)


def plain_scripts() -> dict[str, Script]:
    """Return valid requests by name. Their answers are the expected answers for all scripts with these names."""
    bodies = {
        "ping": http_scripts.head(b"GET", b"/ping", b"connection: close\r\n"),
        "tokenize": http_scripts.post(b"/tokenize", http_scripts.TOKENIZE, b"connection: close\r\n"),
    }
    found = {name: Script(name, "http", [Send(raw), UntilClosed()], least=1) for name, raw in bodies.items()}
    for name, (path, payload) in grpc_scripts.CALLS.items():
        steps: list[Step] = [
            Send(grpc_scripts.START + call(1, path, payload)),
            UntilHeard(grpc_scripts.TRAILERS),
        ]
        found[name] = Script(name, "frontend", steps, least=1)
    return found
