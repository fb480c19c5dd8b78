"""What a coordinator does in Kubernetes, in one place."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry

from penstock_common.types.cluster import ClusterView
from penstock_coordinator.cluster import Clock
from penstock_coordinator.config import KubernetesConfig
from penstock_coordinator.kubernetes.deletion_costs import CostWriter
from penstock_coordinator.kubernetes.errors import Failures
from penstock_coordinator.kubernetes.replicas import GroupPods, Replicas

_LOOK_EVERY = 1.0
"""Seconds between two looks at what is to be written."""


class KubernetesLink:
    """The API server's client, and what uses it; nothing of it is imported where the configuration asks for nothing."""

    def __init__(self, config: KubernetesConfig, registry: CollectorRegistry, clock: Clock) -> None:
        """``clock`` gives monotonic seconds. Raises ConfigError where this process has no service account to use."""
        self._config = config
        self._now = clock
        self._api = None
        self._writing: list[asyncio.Task[None]] = []
        if config.enabled:
            from penstock_coordinator.kubernetes.api import KubernetesApi  # takes seconds and 30 MiB

            self._api = KubernetesApi.in_cluster()
        self._failures = Failures(registry, "" if self._api is None else self._api.namespace, clock)
        self.replicas = Replicas(config, self._api, self._failures)

    def start(self, view: Callable[[], ClusterView | None], *, slots: int) -> None:
        """Write what pods cost to remove, and how many pods groups have, from now on. ``view``: the engines, None while they are
        not known. ``slots``: requests that an engine runs at once which does not say.
        """
        if self._api is not None and self._config.deletion_costs:
            writer = CostWriter(self._api, self._failures, slots=slots, view=view, clock=self._now)
            self._writing.append(asyncio.create_task(_repeat(writer.write_due), name="deletion costs"))
        if self._api is not None and self._config.stateful_sets:
            pods = GroupPods(self._config, self._api, self._failures, view=view)
            self._writing.append(asyncio.create_task(_repeat(pods.write_due), name="pods of groups"))

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What runs until ``stop``."""
        return self._writing

    async def stop(self) -> None:
        """Write nothing more, and close the connections."""
        for task in self._writing:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._api is not None:
            await self._api.close()


async def _repeat(write_due: Callable[[], Awaitable[None]]) -> None:
    """Write what is due, for ever."""
    while True:
        await write_due()
        await asyncio.sleep(_LOOK_EVERY)
