"""Plugin that kills a rank of a data-parallel group at a named point.

As with ``worker_faults``, a test arms a ``Fault`` of rank 0 by writing it to the file that ``VARIABLE`` names. Each
engine has its own file.
"""

import os
import sys
from pathlib import Path
from typing import Any, Literal, get_args

from tests.fakes.engines.worker_faults import Faults, wrap

NAME = "rank-faults"
VARIABLE = "PENSTOCK_RANK_FAULT"

Serving = Literal[
    "before an exchange",
    "in an exchange",
    "agreed",
    "before the forward pass",
    "before the first dispatch",
    "before the first combine",
    "before the last dispatch",
    "before the last combine",
    "before sampling",
    "sampled",
    "before outputs",
]
SERVING: tuple[Serving, ...] = get_args(Serving)
"""Points of each step: in an exchange: The other ranks have this rank's row. agreed: The ranks are about to compute.
    dispatch, combine: Tokens go to experts, or the results return, in the first and in the last layer. sampled: The
    result is known to this rank only. before outputs: Outputs have left the loop, but not the process.
"""
Changing = Literal["preparing", "met", "prepared", "switching", "opening", "opened"]
CHANGING: tuple[Changing, ...] = get_args(Changing)
"""Points of a membership change on members of the next group: preparing: The rank got the command. met: The ranks have
    met, while the old group still serves. Missing weights are not read yet. prepared: The rank is prepared. switching:
    All have agreed to switch. A new rank waits for this. opening: Before the first exchange of the new group. opened:
    After that exchange.
"""
Leaving = Literal["preparing", "prepared", "leaving"]
LEAVING: tuple[Leaving, ...] = get_args(Leaving)
"""Point of a rank that is not in the next group. leaving: all have agreed to switch, and the destination of its
requests is not known yet.
"""


def install() -> None:
    """Install the plugin. Without a file in the environment, it does nothing."""
    path = os.environ.get(VARIABLE)
    if path is None or "penstock_enginecore.app" not in sys.modules:
        return
    faults = Faults(Path(path))
    faults.rank = 0
    _watch_steps(faults)
    _watch_changes(faults)


def _watch_steps(faults: Faults) -> None:
    from penstock_enginecore.core.busy_loop import BusyLoop
    from penstock_enginecore.data_parallel.core.driver import GroupDriver
    from penstock_enginecore.executor.generation.runner import GenerationRunner
    from penstock_enginecore.parallel.group_collectives import EXCHANGE, Peer, SocketLink

    wrap(SocketLink, "exchange", before=lambda *_: faults.at("before an exchange"))
    entered = [False]

    def begin(_: Any, kind: int, *__: Any) -> None:
        entered[0] = kind == EXCHANGE

    wrap(Peer, "begin", before=begin)
    wrap(Peer, "go_on", after=lambda *_: faults.at("in an exchange") if entered[0] else None)
    wrap(GroupDriver, "step", before=lambda *_: faults.at("agreed"))
    wrap(GenerationRunner, "execute", before=lambda *_: faults.at("before the forward pass"))
    _watch_experts(faults)
    wrap(
        GenerationRunner,
        "sample",
        before=lambda *_: faults.at("before sampling"),
        after=lambda *_: faults.at("sampled"),
    )
    wrap(BusyLoop, "_emit", before=lambda _, frames: faults.at("before outputs") if frames else None)


def _watch_experts(faults: Faults) -> None:
    from penstock_enginecore.experts.layer import DispatchedExperts

    layers: set[int] = set()

    def at(experts: DispatchedExperts, what: str) -> None:
        for which, layer in (("first", min(layers)), ("last", max(layers))):
            if experts.layer == layer:
                faults.at(f"before the {which} {what}")

    wrap(DispatchedExperts, "hold", after=lambda experts, _: layers.add(experts.layer))
    wrap(DispatchedExperts, "_dispatch", before=lambda experts, *_: at(experts, "dispatch"))
    wrap(DispatchedExperts, "_compute", after=lambda experts, *_: at(experts, "combine"))


def _watch_changes(faults: Faults) -> None:
    from penstock_enginecore.data_parallel.core.driver import GroupDriver
    from penstock_enginecore.data_parallel.core.group_channels import Connected
    from penstock_enginecore.data_parallel.core.rank import Exchange, Join, Leave, Prepare
    from penstock_enginecore.parallel.group_collectives import SocketLink

    def doing(driver: Any, effect: Any) -> None:
        match effect:
            case Prepare():
                faults.at("preparing")
            case Join():
                faults.at("switching")
            case Exchange() if driver._rank.opening:
                faults.at("opening")
            case Leave():
                faults.at("leaving")

    wrap(GroupDriver, "_do", before=doing)
    wrap(GroupDriver, "take", after=lambda _, event: faults.at("prepared") if isinstance(event, Connected) else None)
    wrap(GroupDriver, "_gathered", before=lambda driver, _: faults.at("opened") if driver._rank.opening else None)
    wrap(SocketLink, "connect", after=lambda _: faults.at("met"))
