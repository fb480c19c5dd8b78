"""A data-parallel group of engine processes, with access to the state of its ranks."""

import asyncio
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.admin.v1 import service_pb2_grpc as admin_rpc
from penstock.common.v1 import data_parallel_pb2
from penstock_common.addresses import with_port
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.status import from_rpc_error
from penstock_common.types.cluster import DEFAULT_POOL
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster

LEASE = 2.0
"""Duration of the coordinator's leases in seconds."""


def _own(seen: admin_pb.GetClusterResponse) -> list[data_parallel_pb2.GroupView]:
    """Return the groups of this pool's engines."""
    return [group for group in seen.groups if group.pool == DEFAULT_POOL]


def metric(service: Service, name: str) -> float:
    """Return the value of a metric that has only one series."""
    with urllib.request.urlopen(f"http://{with_port(service.host, service.metrics_port)}/metrics") as response:
        lines = response.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}{{")).rpartition(" ")[2])


async def until(condition: Callable[..., bool], *args: Any) -> None:
    """Wait for a condition, which is evaluated in a thread."""
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(condition, *args):
            await asyncio.sleep(0.02)


class RankGroup(Cluster):
    """Group of ``size`` ranks, and ``spares``, engines that replace lost ranks.

    ``admin`` calls the operators' API of the frontend.
    """

    def __init__(
        self,
        model: Path,
        *,
        size: int,
        spares: int = 0,
        lease_seconds: float = LEASE,
        frontend_flags: Mapping[str, object] | None = None,
        **engine_flags: Any,
    ) -> None:
        self.size = size
        self._admin_address = f"127.0.0.1:{(port := free_port())}"
        super().__init__(
            model,
            engines=size + spares,
            spares=spares,
            lease_seconds=lease_seconds,
            frontend_flags={"admin__port": port, **(frontend_flags or {})},
            data_parallel__size=size,
            **engine_flags,
        )
        for engine in self.engines:
            engine.add_flag("data-parallel.address", engine.host)

    async def __aenter__(self) -> "RankGroup":
        await super().__aenter__()
        self.admin = admin_rpc.AdminServiceStub(
            await self._stack.enter_async_context(make_channel(self._admin_address))
        )
        return self

    async def members(self) -> list[tuple[Service, int]]:
        """Return the engines in order of their ranks, each with the index that requests use for it."""
        seen = await self.admin.GetCluster(admin_pb.GetClusterRequest())
        by_id = {f"engine-{number}": engine for number, engine in enumerate(self.engines)}
        index = {engine.engine_id: engine.index for engine in seen.engines}
        (told,) = _own(seen)
        return [(by_id[member.engine_id], index[member.engine_id]) for member in told.group.members]

    async def whole(self, size: int | None = None) -> None:
        """Wait until ``size`` ranks (default ``self.size``) are in one group and the frontend knows the group."""
        async with asyncio.timeout(PATIENCE):
            while not await self._is_whole(self.size if size is None else size):
                await asyncio.sleep(0.05)

    async def _is_whole(self, size: int) -> bool:
        told = await self._told()
        if told is None or len(told.group.members) != size or told.suspended:
            return False
        ranks = [engine for engine, _ in await self.members()]
        return await asyncio.to_thread(lambda: all(_is_in(engine, told.group.epoch) for engine in ranks))

    async def scale(self, size: int) -> None:
        """Change the group to ``size`` ranks and wait for it. Also waits for a change in progress."""
        async with asyncio.timeout(PATIENCE):
            while not await self._is_whole(size):
                told = await self._told()
                if told is not None and told.target_size != size and len(told.group.members) == told.target_size:
                    await self.ask_for(size)
                await asyncio.sleep(0.05)

    async def ask_for(self, size: int) -> int:
        """Ask for ``size`` ranks, once the coordinator knows its group. Returns the previous target.

        Raises the frontend's error if the call is refused.
        """
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    asked = await self.admin.Scale(admin_pb.ScaleRequest(replicas=size))
                except grpc.aio.AioRpcError as e:
                    if from_rpc_error(e).reason not in ("RECONFIGURING", "COORDINATOR_AWAY"):
                        raise
                    await asyncio.sleep(0.05)
                else:
                    return int(asked.previous_replicas)

    async def _told(self) -> data_parallel_pb2.GroupView | None:
        return next(iter(_own(await self.admin.GetCluster(admin_pb.GetClusterRequest()))), None)


def held(engine: Service) -> tuple[int, int]:
    """Return the numbers of threads and of file descriptors of a process."""
    return tuple(len(list(Path(f"/proc/{engine.pid}/{what}").iterdir())) for what in ("task", "fd"))  # type: ignore[return-value]


def resident(engine: Service) -> float:
    """Return the memory of a process in MiB."""
    lines = Path(f"/proc/{engine.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024


def _is_in(engine: Service, epoch: int) -> bool:
    try:
        return metric(engine, "penstock:group_epoch") == epoch and not metric(engine, "penstock:group_suspended")
    except OSError:
        return False  # the service does not listen yet, or no longer listens
