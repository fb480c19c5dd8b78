"""Writes what engines cost to remove into the annotations of their pods."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from penstock_common.types.cluster import ClusterView
from penstock_coordinator.cluster import Clock
from penstock_coordinator.kubernetes.deletion_costs import CostPatch, DeletionCosts
from penstock_coordinator.kubernetes.errors import KubernetesError
from penstock_coordinator.kubernetes.failures import Failures
from penstock_coordinator.kubernetes.rights import Right

INTERVAL = 15.0
"""Seconds between two changes of one pod's annotation, at least."""
_AT_ONCE = 8
"""Annotations that are written at the same time."""


class PodApi(Protocol):
    """What writes an annotation."""

    async def set_deletion_cost(self, pod: str, cost: int) -> None:
        """Write the annotation of a pod. Raises KubernetesError."""


class CostWriter:
    """Runs beside the service, which never waits for it. An engine's id is its pod's name."""

    def __init__(
        self, api: PodApi, failures: Failures, *, slots: int, view: Callable[[], ClusterView | None], clock: Clock
    ) -> None:
        """``slots``: requests that an engine runs at once which does not say. ``view``: the engines now, None while they are not
        known. ``clock`` gives monotonic seconds.
        """
        self._api = api
        self._failures = failures
        self._view = view
        self._now = clock
        self._costs = DeletionCosts(interval=INTERVAL, slots=slots)

    async def write_due(self) -> None:
        """Write what is due, until something fails."""
        view = self._view()
        if view is None or not self._failures.due(Right.PATCH_PODS):
            return
        due = self._costs.due(view, self._now())
        for begin in range(0, len(due), _AT_ONCE):
            results = await asyncio.gather(*map(self._write, due[begin : begin + _AT_ONCE]))
            errors = [error for error in results if error is not None]
            if errors:
                self._failures.failed(*errors)
                return
            self._failures.worked(Right.PATCH_PODS)

    async def _write(self, patch: CostPatch) -> KubernetesError | None:
        self._costs.tried(patch.pod, self._now())
        try:
            await self._api.set_deletion_cost(patch.pod, patch.cost)
        except KubernetesError as e:
            if e.reason != "NotFound":
                return e
            self._costs.gone(patch.pod)
        else:
            self._costs.written(patch, self._now())
        return None
