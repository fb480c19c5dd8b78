"""How many pods the data-parallel groups have, where operators decide on their ranks: as many as these take."""

import re
from collections.abc import Callable

from penstock_common.observability.logging import get_logger
from penstock_common.types.cluster import ClusterView
from penstock_common.types.data_parallel import PoolGroup, engine_of
from penstock_coordinator.config import KubernetesConfig
from penstock_coordinator.kubernetes.errors import KubernetesError
from penstock_coordinator.kubernetes.failures import Failures
from penstock_coordinator.kubernetes.replicas import ScaleApi
from penstock_coordinator.kubernetes.rights import SCALING
from penstock_coordinator.kubernetes.workload import Workload, WorkloadKind


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
