"""Access of the coordinator to Kubernetes, and the background tasks that change Kubernetes objects."""

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
"""Seconds between two checks whether deletion costs or numbers of pods must be written."""


class KubernetesLink:
    """Kubernetes client, and the components that use it.

    The client library is imported only if the configuration needs Kubernetes.
    """

    def __init__(self, config: KubernetesConfig, registry: CollectorRegistry, clock: Clock) -> None:
        """Create the link. ``clock`` returns monotonic seconds.

        Raises ConfigError if a service account is needed but missing.
        """
        self._config = config
        self._now = clock
        self._api = None
        self._writing: list[asyncio.Task[None]] = []
        if config.enabled:
            from penstock_coordinator.kubernetes.api import KubernetesApi  # this import takes seconds and 30 MiB

            self._api = KubernetesApi.in_cluster()
        self._failures = Failures(registry, "" if self._api is None else self._api.namespace, clock)
        self.replicas = Replicas(config, self._api, self._failures)

    def start(self, view: Callable[[], ClusterView | None], *, slots: int) -> None:
        """Start to write deletion costs, and the numbers of pods of groups.

        ``view`` returns the current engines, or None while they are unknown. ``slots`` is the number of requests that
        an engine can run at once. It is used for engines that do not report this number.
        """
        if self._api is not None and self._config.deletion_costs:
            writer = CostWriter(self._api, self._failures, slots=slots, view=view, clock=self._now)
            self._writing.append(asyncio.create_task(_repeat(writer.write_due), name="deletion costs"))
        if self._api is not None and self._config.stateful_sets:
            pods = GroupPods(self._config, self._api, self._failures, view=view)
            self._writing.append(asyncio.create_task(_repeat(pods.write_due), name="pods of groups"))

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Background tasks that run until ``stop`` is called."""
        return self._writing

    async def stop(self) -> None:
        """Stop writing, and close the connections."""
        for task in self._writing:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._api is not None:
            await self._api.close()


async def _repeat(write_due: Callable[[], Awaitable[None]]) -> None:
    """Call ``write_due`` periodically until this task is cancelled."""
    while True:
        await write_due()
        await asyncio.sleep(_LOOK_EVERY)
