"""Pod deletion costs: which engine goes first when a pool gets smaller, written into the annotations of the pods."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from penstock_common.types.cluster import ClusterView, EngineStatus
from penstock_coordinator.cluster import Clock
from penstock_coordinator.kubernetes.errors import Failures, KubernetesError, Right

_PARTS = 1024
"""Of a full engine, which a cost counts."""
_MOST = 2**30
"""Costs are 32 bits."""


class CostPatch(msgspec.Struct, frozen=True):
    """Effect: the pod's annotation is to have this cost."""

    pod: str
    cost: int


class DeletionCosts:
    """Decides which pods' costs are written, and when: once they differ from what was written last, a pod's every ``interval``
    seconds at most, and first those that were tried longest ago. What another coordinator wrote is not known, so that each is
    written once.

    Times are seconds of one monotonic clock that the caller passes in.
    """

    def __init__(self, *, interval: float, slots: int) -> None:
        """``slots``: requests that an engine runs at once which does not say."""
        self._interval = interval
        self._slots = slots
        self._written: dict[str, tuple[int, float]] = {}
        self._tried_at: dict[str, float] = {}
        self._gone: set[str] = set()

    def due(self, view: ClusterView, now: float) -> Sequence[CostPatch]:
        """What is to be written now. Engines that have left the view are forgotten."""
        self._forget({engine.engine_id for engine in view.engines})
        due = []
        for engine in view.engines:
            cost, at = self._written.get(engine.engine_id, (None, -math.inf))
            patch = CostPatch(engine.engine_id, deletion_cost(engine, self._slots))
            if engine.engine_id not in self._gone and patch.cost != cost and now - at >= self._interval:
                due.append(patch)
        return sorted(due, key=lambda patch: self._tried_at.get(patch.pod, -math.inf))

    def tried(self, pod: str, now: float) -> None:
        """A cost is being written."""
        self._tried_at[pod] = now

    def written(self, patch: CostPatch, now: float) -> None:
        """A cost has been written."""
        self._written[patch.pod] = (patch.cost, now)

    def gone(self, pod: str) -> None:
        """There is no such pod: it is not asked for again while its engine is in the view."""
        self._gone.add(pod)

    def _forget(self, there: set[str]) -> None:
        self._written = {pod: written for pod, written in self._written.items() if pod in there}
        self._tried_at = {pod: at for pod, at in self._tried_at.items() if pod in there}
        self._gone &= there


def deletion_cost(engine: EngineStatus, slots: int) -> int:
    """0 for an idle engine, else its load in powers of two, so that few changes of the load are one of the cost.

    ``slots``: requests that it runs at once if it does not say.
    """
    requests = engine.num_running_reqs + engine.num_waiting_reqs
    if not requests:
        return 0
    parts = math.ceil(requests * _PARTS / (engine.max_num_seqs or slots))
    return min(1 << (parts - 1).bit_length(), _MOST)


# Writes what engines cost to remove into the annotations of their pods.

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
