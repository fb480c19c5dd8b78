"""Keeps as many processes as the data-parallel group of a command is to have ranks."""

import asyncio
from collections.abc import Callable

from penstock_common.types.cluster import ClusterView
from penstock_common.types.data_parallel import engine_of
from penstock_local.rpc.coordinator import cluster_view
from penstock_local.serving.process import ProcessSpec
from penstock_local.serving.supervisor import Supervisor
from penstock_local.terminal.console import say

_POLL_SECONDS = 0.25
_DEADLINE = 2.0


class GroupRanks:
    """Starts ranks when the group is to grow, and stops those that it has let go. ``make_spec``: the process of the engine with
    this number.
    """

    def __init__(self, supervisor: Supervisor, coordinator: str, make_spec: Callable[[int], ProcessSpec]) -> None:
        self._supervisor = supervisor
        self._coordinator = coordinator
        self._make_spec = make_spec

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            view = await cluster_view(self._coordinator, deadline=_DEADLINE)
            if view is not None and view.groups:
                await self._follow(view)
            await asyncio.sleep(_POLL_SECONDS)

    async def _follow(self, view: ClusterView) -> None:
        group = view.groups[0]
        members = {engine_of(rank)[0] for rank in group.view.group.members}
        names = [name for name in self._supervisor.names if name.startswith("engine-")]
        if len(names) < group.target_size:
            free = (number for number in range(len(names) + 1) if f"engine-{number}" not in names)
            spec = self._make_spec(next(free))
            say(f"the group is to have {group.target_size} ranks: starting {spec.name}")
            await self._supervisor.add(spec)
        elif len(members) == group.target_size < len(names):
            let_go = [name for name in names if name not in members]
            for name in let_go[: len(names) - group.target_size]:
                say(f"the group has {group.target_size} ranks: stopping {name}")
                await self._supervisor.retire(name)
