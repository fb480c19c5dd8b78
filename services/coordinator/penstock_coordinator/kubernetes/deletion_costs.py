"""Pod deletion costs, which decide which engine Kubernetes removes first when a pool shrinks."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from penstock_common.types.cluster import ClusterView, EngineStatus
from penstock_coordinator.cluster import Clock
from penstock_coordinator.kubernetes.errors import Failures, KubernetesError, Right

_PARTS = 1024
"""Deletion cost of a fully loaded engine."""
_MOST = 2**30
"""Maximum deletion cost. The limit exists because costs are 32-bit numbers."""


class CostPatch(msgspec.Struct, frozen=True):
    """Request to write a cost into the annotation of a pod."""

    pod: str
    cost: int


class DeletionCosts:
    """Decides for which pods a cost is written, and when.

    A cost is written if it differs from the last written cost of the pod, at most once per ``interval`` seconds and
    pod. The pod whose last attempt is longest ago comes first. After a start, each cost is written once, because the
    costs that an earlier coordinator wrote are unknown.

    Callers pass the time as seconds of a monotonic clock.
    """

    def __init__(self, *, interval: float, slots: int) -> None:
        """Create the tracker.

        ``slots`` is the number of requests that an engine can run at once. It is used for engines that do not report
        this number.
        """
        self._interval = interval
        self._slots = slots
        self._written: dict[str, tuple[int, float]] = {}
        self._tried_at: dict[str, float] = {}
        self._gone: set[str] = set()

    def due(self, view: ClusterView, now: float) -> Sequence[CostPatch]:
        """Return the deletion costs to write now. Forget engines that are no longer in the view."""
        self._forget({engine.engine_id for engine in view.engines})
        due = []
        for engine in view.engines:
            cost, at = self._written.get(engine.engine_id, (None, -math.inf))
            patch = CostPatch(engine.engine_id, deletion_cost(engine, self._slots))
            if engine.engine_id not in self._gone and patch.cost != cost and now - at >= self._interval:
                due.append(patch)
        return sorted(due, key=lambda patch: self._tried_at.get(patch.pod, -math.inf))

    def tried(self, pod: str, now: float) -> None:
        """Record an attempt to write the deletion cost of a pod."""
        self._tried_at[pod] = now

    def written(self, patch: CostPatch, now: float) -> None:
        """Record that the deletion cost of a pod was written."""
        self._written[patch.pod] = (patch.cost, now)

    def gone(self, pod: str) -> None:
        """Record that a pod does not exist. While its engine is in the view, no cost is written for this pod."""
        self._gone.add(pod)

    def _forget(self, there: set[str]) -> None:
        self._written = {pod: written for pod, written in self._written.items() if pod in there}
        self._tried_at = {pod: at for pod, at in self._tried_at.items() if pod in there}
        self._gone &= there


def deletion_cost(engine: EngineStatus, slots: int) -> int:
    """Return the deletion cost of an engine's pod: 0 for an idle engine, else the engine's load, rounded up to a power
    of two.

    Rounding avoids frequent changes of the cost. ``slots`` is the number of requests that the engine can run at once,
    if the engine does not report this number.
    """
    requests = engine.num_running_reqs + engine.num_waiting_reqs
    if not requests:
        return 0
    parts = math.ceil(requests * _PARTS / (engine.max_num_seqs or slots))
    return min(1 << (parts - 1).bit_length(), _MOST)


# The code below writes deletion costs into the annotations of pods.

INTERVAL = 15.0
"""Minimum number of seconds between two changes of a pod's annotation."""
_AT_ONCE = 8
"""Number of annotations that are written concurrently."""


class PodApi(Protocol):
    """API that writes the annotation of a pod."""

    async def set_deletion_cost(self, pod: str, cost: int) -> None:
        """Write the annotation of a pod. Raises KubernetesError if the request to the Kubernetes API server fails."""


class CostWriter:
    """Writes deletion costs in the background. The id of an engine must be the name of its pod."""

    def __init__(
        self, api: PodApi, failures: Failures, *, slots: int, view: Callable[[], ClusterView | None], clock: Clock
    ) -> None:
        """Create the writer.

        ``slots`` is the number of requests that an engine can run at once. It is used for engines that do not report
        this number. ``view`` returns the current engines, or None while they are unknown. ``clock`` returns monotonic
        seconds.
        """
        self._api = api
        self._failures = failures
        self._view = view
        self._now = clock
        self._costs = DeletionCosts(interval=INTERVAL, slots=slots)

    async def write_due(self) -> None:
        """Write the deletion costs that are due. Stop at the first write that fails."""
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
