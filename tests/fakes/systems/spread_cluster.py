"""Engines with a second node each. Nodes are processes at separate loopback addresses."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fakes.network.ports import free_port
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster


class SpreadCluster(Cluster):
    """Cluster: ``async with SpreadCluster(model)``. Each pipeline stage runs on a node. ``nodes``: second node per
    engine.
    """

    def __init__(self, model: Path, *, engines: int, tensor_parallel_size: int = 1, **more: Any) -> None:
        """Create the cluster. ``more``: flags of the engines and of their nodes."""
        flags: dict[str, Any] = more | {
            "executor__tensor_parallel_size": tensor_parallel_size,
            "executor__pipeline_parallel_size": 2,
            "executor__nodes__size": 2,
            "executor__nodes__address": "127.0.0.1",
        }
        super().__init__(model, engines=engines, **flags)
        self.nodes: list[Service] = []
        for number, engine in enumerate(self.engines):
            port = free_port()
            engine.add_flag("executor.nodes.port", port)
            theirs = flags | {
                "model__path": model,
                "cache__kv_cache_memory": "64MiB",
                "executor__num_threads": 1,
                "executor__nodes__index": 1,
                "executor__nodes__leader": f"127.0.0.1:{port}",
                "executor__nodes__address": f"127.0.0.{number + 2}",
            }
            self.nodes.append(Service("penstock_enginecore", "worker", **theirs))

    async def __aenter__(self) -> Self:
        for node in self.nodes:
            await node.start()
        return await super().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        for node in self.nodes:
            assert await node.ended() == 0, node.log()
            node.remove_log()
