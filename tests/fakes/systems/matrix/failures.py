"""Failures of an engine in a cell. When ``strike`` is called, the engine is held at the step, with every request of the
cell.

``strike`` causes the failure, and lets the engine continue if it can. ``Rig.heal`` repairs the damage.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from tests.fakes.engines.oracle_process import OracleProcess

if TYPE_CHECKING:
    from tests.fakes.systems.matrix.rig import Rig

STALL_SECONDS = 0.3
PIECE_SECONDS = 0.02
WEDGED = 3600.0


class Failure(msgspec.Struct, frozen=True):
    """A kind of failure. ``moves``: unfinished requests must move to another engine, or to the next incarnation of this
    one. ``silent``: only a timeout shows that the engine is gone.
    """

    name: str
    strike: "Callable[[Rig, OracleProcess], Awaitable[None]]"
    moves: bool = True
    silent: bool = False


async def _kill(rig: "Rig", engine: OracleProcess) -> None:
    await engine.kill()


async def _restart(rig: "Rig", engine: OracleProcess) -> None:
    await engine.restart()


async def _freeze(rig: "Rig", engine: OracleProcess) -> None:
    engine.stop_running()
    await rig.until_moved(engine)
    engine.go_on()
    await engine.set(held=False)


async def _cut(rig: "Rig", engine: OracleProcess) -> None:
    engine.proxy.cut()
    await engine.set(held=False)


async def _unplug(rig: "Rig", engine: OracleProcess) -> None:
    """Data in flight when the connection is restored must be ignored too."""
    engine.proxy.unplug()
    await engine.set(held=False)
    await rig.until_moved(engine)
    engine.proxy.plug_in()


async def _slow(rig: "Rig", engine: OracleProcess) -> None:
    await engine.set(held=False, stalled=True)
    await rig.sleep(STALL_SECONDS)
    await engine.set(stalled=False)


async def _slow_network(rig: "Rig", engine: OracleProcess) -> None:
    engine.proxy.delay = PIECE_SECONDS
    await engine.set(held=False)


async def _wedge(rig: "Rig", engine: OracleProcess) -> None:
    """The engine continues after all, when other engines have its requests."""
    await engine.set(held=False, stalled=True, step_age=WEDGED)
    await rig.until_moved(engine)
    await engine.set(stalled=False, step_age=-1.0)


async def _dead(rig: "Rig", engine: OracleProcess) -> None:
    await engine.call("fail")
    await engine.ended()


async def _session_ends(rig: "Rig", engine: OracleProcess) -> None:
    await engine.call("close")
    await engine.set(held=False)


async def _session_breaks(rig: "Rig", engine: OracleProcess) -> None:
    await engine.call("break")
    await engine.set(held=False)


async def _drain(rig: "Rig", engine: OracleProcess) -> None:
    """The engine is held until the deadline, so that no request finishes."""
    await engine.stop()


async def _duplicate(rig: "Rig", engine: OracleProcess) -> None:
    await engine.set(held=False, packets="twice")


async def _overlap(rig: "Rig", engine: OracleProcess) -> None:
    await engine.set(held=False, packets="again")


async def _late(rig: "Rig", engine: OracleProcess) -> None:
    """The engine's outputs are held back until other engines have its requests, and then sent over every session."""
    await engine.set(held=False, packets="held_back", step_age=WEDGED)
    await rig.until_moved(engine)
    await engine.set(packets="as_they_are", step_age=-1.0)


async def _gap(rig: "Rig", engine: OracleProcess) -> None:
    await engine.set(held=False, packets="with_gap")


FAILURES = [
    Failure("SIGKILL", _kill),
    Failure("SIGKILL and restart", _restart),
    Failure("SIGSTOP, SIGCONT", _freeze, silent=True),
    Failure("connection cut", _cut),
    Failure("cable pulled", _unplug, silent=True),
    Failure("slow", _slow, moves=False),
    Failure("slow network", _slow_network, moves=False),
    Failure("wedged", _wedge),
    Failure("engine_dead", _dead),
    Failure("session ended", _session_ends),
    Failure("session broken", _session_breaks),
    Failure("drain deadline", _drain),
    Failure("packets twice", _duplicate, moves=False),
    Failure("tokens again", _overlap, moves=False),
    Failure("packets late", _late),
    Failure("gap", _gap),
]
