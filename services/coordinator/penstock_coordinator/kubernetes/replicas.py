"""RPC Scale, with which operators set the number of engines of a pool.

For data-parallel groups, the number of pods is adjusted.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Protocol

from penstock_common.errors import FailedPrecondition, InvalidArgument, Unavailable, nearest, quoted
from penstock_common.observability.logging import get_logger
from penstock_common.types.cluster import DEFAULT_POOL, ClusterView
from penstock_common.types.data_parallel import PoolGroup, engine_of
from penstock_coordinator.config import KubernetesConfig
from penstock_coordinator.kubernetes.errors import SCALING, Failures, KubernetesError, Workload, WorkloadKind

_NOT_WITHOUT_HELP = frozenset({"Forbidden", "NotFound", "Unauthorized"})
"""Reasons of errors that persist until an operator changes something."""


class ScaleApi(Protocol):
    """API that reads and changes the number of replicas of a workload. Both methods raise KubernetesError."""

    async def replicas(self, workload: Workload) -> int:
        """Return the target number of replicas."""

    async def set_replicas(self, workload: Workload, replicas: int) -> None:
        """Set the target number of replicas."""


class Replicas:
    """Changes the number of engines of pools. Refuses pools whose number of engines belongs to another controller."""

    def __init__(self, config: KubernetesConfig, api: ScaleApi | None, failures: Failures) -> None:
        """Create the object. ``api`` is None if the coordinator does not use Kubernetes."""
        self._config = config
        self._api = api
        self._failures = failures
        self._changing = asyncio.Lock()

    async def scale(self, pool: str, replicas: int | None) -> int:
        """Set the number of engines of ``pool``. Return the previous target. An empty ``pool`` means the default pool.

        Raises:
            InvalidArgument: The pool is unknown, or ``replicas`` is missing or out of range.
            FailedPrecondition: Another controller sets the number of engines, or a permission is missing.
            Unavailable: Kubernetes did not answer.
        """
        if replicas is None:
            raise InvalidArgument("replicas is not set; set it to the wanted number of engines", field="replicas")
        pool = pool or DEFAULT_POOL
        self._check_pool(pool)
        if owner := self._config.owners.get(pool):
            raise FailedPrecondition(
                f"the number of engines of pool {quoted(pool)} is set by {owner}; change the limits of that controller instead",
                field="pool",
                reason="REPLICAS_OWNED",
            )
        if pool in self._config.stateful_sets:
            raise FailedPrecondition(
                f"pool {quoted(pool)} has no ranks yet; try again when its engines have registered",
                field="pool",
                reason="NO_GROUP",
            )
        workload = self._workload(pool)
        if self._api is None or workload is None:
            raise FailedPrecondition(
                "this coordinator cannot change the number of engines, because kubernetes.deployments and "
                "kubernetes.leader_worker_sets are empty",
                reason="NOT_IN_KUBERNETES",
            )
        self._check_number(pool, replicas)
        async with self._changing:
            previous = await self._change(self._api, workload, replicas)
        changed = {workload.kind.value: workload.name}
        get_logger().info(
            "changed the number of engines in a pool", pool=pool, replicas=replicas, previous=previous, **changed
        )
        return previous

    def check_ranks(self, pool: str, ranks: int) -> None:
        """Raise InvalidArgument if the pods of a group cannot have this number of ranks."""
        if pool not in self._config.stateful_sets:
            return
        self._check_number(pool, ranks)
        each = self._config.ranks_per_pod.get(pool, 1)
        if ranks % each:
            raise InvalidArgument(
                f"replicas is {ranks}; each pod of pool {quoted(pool)} has {each} ranks, so it must be a multiple of {each}",
                field="replicas",
            )

    def _workload(self, pool: str) -> Workload | None:
        if name := self._config.deployments.get(pool):
            return Workload(WorkloadKind.DEPLOYMENT, name)
        if name := self._config.leader_worker_sets.get(pool):
            return Workload(WorkloadKind.LEADER_WORKER_SET, name)
        return None

    def _check_pool(self, pool: str) -> None:
        known = self._config.pools
        if known and pool not in known:
            raise InvalidArgument(
                f"pool is {quoted(pool)}; existing pools: {', '.join(sorted(known))}{nearest(pool, known)}",
                field="pool",
            )

    def _check_number(self, pool: str, replicas: int) -> None:
        fewest, most = self._config.min_replicas.get(pool, 0), self._config.max_replicas
        if not fewest <= replicas <= most:
            raise InvalidArgument(
                f"replicas is {replicas}; it must be from {fewest} to {most} in pool {quoted(pool)}", field="replicas"
            )

    async def _change(self, api: ScaleApi, workload: Workload, replicas: int) -> int:
        rights = SCALING[workload.kind]
        try:
            previous = await api.replicas(workload)
            self._failures.worked(rights.get)
            await api.set_replicas(workload, replicas)
            self._failures.worked(rights.patch)
        except KubernetesError as e:
            self._failures.failed(e)
            if e.reason in _NOT_WITHOUT_HELP:
                raise FailedPrecondition(str(e), reason="KUBERNETES_REFUSED") from None
            raise Unavailable(str(e), reason="KUBERNETES_FAILED", retry_after=1.0) from None
        return previous


# The code below adjusts the number of pods of data-parallel groups to their number of ranks.


class GroupPods:
    """Adjusts the StatefulSets of groups to the groups' numbers of ranks, in the background.

    Pods are added as soon as the target number of ranks is higher. The last pods are removed when none of their ranks
    is in the group any more. The coordinator writes a StatefulSet's number of pods only when the needed number changes.
    A manual change of the StatefulSet therefore stays until the next change of the needed number.
    """

    def __init__(
        self, config: KubernetesConfig, api: ScaleApi, failures: Failures, *, view: Callable[[], ClusterView | None]
    ) -> None:
        """Create the object. ``view`` returns the current groups, or None while they are unknown."""
        self._config = config
        self._api = api
        self._failures = failures
        self._view = view
        self._written: dict[str, int] = {}

    async def write_due(self) -> None:
        """Write the StatefulSets' numbers of pods that differ from the last written numbers. Failed writes are retried
        later.
        """
        view = self._view()
        for group in () if view is None else view.groups:
            name = self._config.stateful_sets.get(group.pool)
            if (
                name is None or not group.view.group.epoch
            ):  # a group that was never formed keeps its initial number of pods
                continue
            wanted = pods_of(group, name, self._config.ranks_per_pod.get(group.pool, 1))
            rights = SCALING[WorkloadKind.STATEFUL_SET]
            if (
                wanted != self._written.get(name)
                and self._failures.due(rights.get)
                and self._failures.due(rights.patch)
            ):
                await self._write(group.pool, name, wanted)

    async def _write(self, pool: str, name: str, wanted: int) -> None:
        workload, rights = Workload(WorkloadKind.STATEFUL_SET, name), SCALING[WorkloadKind.STATEFUL_SET]
        try:
            previous = await self._api.replicas(workload)
            self._failures.worked(rights.get)
            if previous != wanted:
                await self._api.set_replicas(workload, wanted)
                self._failures.worked(rights.patch)
                get_logger().info(
                    "changed the number of engines in a pool",
                    pool=pool,
                    replicas=wanted,
                    previous=previous,
                    stateful_set=name,
                )
        except KubernetesError as e:
            self._failures.failed(e)
        else:
            self._written[name] = wanted


def pods_of(group: PoolGroup, name: str, ranks_per_pod: int) -> int:
    """Return the number of pods that ``group`` needs in the StatefulSet ``name``.

    The pods must have space for the target number of ranks. All pods up to the last pod with a member of the group are
    also needed.
    """
    pods = -(-group.target_size // ranks_per_pod)
    for rank in group.view.group.members:
        if found := re.fullmatch(rf"{re.escape(name)}-(\d+)(-\d+)?", engine_of(rank)[0]):
            pods = max(pods, int(found[1]) + 1)
    return pods
