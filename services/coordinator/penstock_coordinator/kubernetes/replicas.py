"""Replicas of pools and pods of data-parallel groups, where operators decide on them: the Scale RPC."""

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
"""Reasons that do not go away by themselves."""


class ScaleApi(Protocol):
    """What reads and changes the number of engines of a workload. Both raise KubernetesError."""

    async def replicas(self, workload: Workload) -> int:
        """The number it is to have."""

    async def set_replicas(self, workload: Workload, replicas: int) -> None:
        """Change it."""


class Replicas:
    """Changes the number of engines of those pools whose number belongs to nobody else."""

    def __init__(self, config: KubernetesConfig, api: ScaleApi | None, failures: Failures) -> None:
        """``api``: None where this process has no business with Kubernetes."""
        self._config = config
        self._api = api
        self._failures = failures
        self._changing = asyncio.Lock()

    async def scale(self, pool: str, replicas: int | None) -> int:
        """Have ``replicas`` engines in ``pool``; empty: the default one. Returns how many there were to be before.

        Raises InvalidArgument, FailedPrecondition where somebody else owns the number or a right is missing, and Unavailable.
        """
        if replicas is None:
            raise InvalidArgument("replicas is not set", field="replicas")
        pool = pool or DEFAULT_POOL
        self._check_pool(pool)
        if owner := self._config.owners.get(pool):
            raise FailedPrecondition(
                f"the number of engines of pool {quoted(pool)} belongs to {owner}: change its bounds instead",
                field="pool",
                reason="REPLICAS_OWNED",
            )
        if pool in self._config.stateful_sets:
            raise FailedPrecondition(
                f"pool {quoted(pool)} has no rank yet; ask again when its engines have registered",
                field="pool",
                reason="NO_GROUP",
            )
        workload = self._workload(pool)
        if self._api is None or workload is None:
            raise FailedPrecondition(
                "this coordinator changes no number of engines: its kubernetes.deployments is empty, and so is "
                "kubernetes.leader_worker_sets",
                reason="NOT_IN_KUBERNETES",
            )
        self._check_number(pool, replicas)
        async with self._changing:
            previous = await self._change(self._api, workload, replicas)
        changed = {workload.kind.value: workload.name}
        get_logger().info("scaled", pool=pool, replicas=replicas, previous=previous, **changed)
        return previous

    def check_ranks(self, pool: str, ranks: int) -> None:
        """Raise InvalidArgument where the pods of a group are not to have so many ranks."""
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
                f"pool is {quoted(pool)}; pools: {', '.join(sorted(known))}{nearest(pool, known)}", field="pool"
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


# How many pods the data-parallel groups have, where operators decide on their ranks: as many as these take.


class GroupPods:
    """Has the StatefulSets of groups follow their ranks. Runs beside the service, which never waits for it.

    Pods are added as soon as a group is to have more ranks, and the last ones are taken away once no rank of theirs is in it. A
    number is written when the one that is wanted changes, so that whoever changes it otherwise is not contradicted before.
    """

    def __init__(
        self, config: KubernetesConfig, api: ScaleApi, failures: Failures, *, view: Callable[[], ClusterView | None]
    ) -> None:
        """``view``: the groups now, None while they are not known."""
        self._config = config
        self._api = api
        self._failures = failures
        self._view = view
        self._written: dict[str, int] = {}

    async def write_due(self) -> None:
        """Write the numbers of pods that are not those that were written last. One that has failed is due again later."""
        view = self._view()
        for group in () if view is None else view.groups:
            name = self._config.stateful_sets.get(group.pool)
            if name is None or not group.view.group.epoch:  # a group that was never formed has the pods to begin with
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
                get_logger().info("scaled", pool=pool, replicas=wanted, previous=previous, stateful_set=name)
        except KubernetesError as e:
            self._failures.failed(e)
        else:
            self._written[name] = wanted


def pods_of(group: PoolGroup, name: str, ranks_per_pod: int) -> int:
    """Pods of the StatefulSet ``name`` that ``group`` takes: those of the ranks that it is to have, and all up to the last one
    that has a rank in it.
    """
    pods = -(-group.target_size // ranks_per_pod)
    for rank in group.view.group.members:
        if found := re.fullmatch(rf"{re.escape(name)}-(\d+)(-\d+)?", engine_of(rank)[0]):
            pods = max(pods, int(found[1]) + 1)
    return pods
