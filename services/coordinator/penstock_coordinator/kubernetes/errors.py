"""Errors of requests to the Kubernetes API: what the coordinator may do there, and how it goes on when that fails."""

import enum
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter

from penstock_common.errors import PenstockError
from penstock_common.observability.logging import get_logger
from penstock_coordinator.cluster import Clock

# What makes the pods of a pool's engines.


class WorkloadKind(enum.Enum):
    """Its kind, by the name that logs have for it."""

    DEPLOYMENT = "deployment"
    LEADER_WORKER_SET = "leader_worker_set"
    """Of engines of several pods, which it counts and not the pods."""
    STATEFUL_SET = "stateful_set"
    """Of the ranks of a data-parallel group, of which a pod may have several."""


class Workload(msgspec.Struct, frozen=True):
    """One of the namespace's."""

    kind: WorkloadKind
    name: str


# What the coordinator may do in Kubernetes, and how it goes on when that fails.

_FIRST_DELAY = 1.0
_LONGEST_DELAY = 60.0
"""Seconds between two attempts, doubled each time."""


class Right(enum.Enum):
    """A verb and a resource, as a Role names them."""

    PATCH_PODS = "patch pods"
    GET_SCALE = "get deployments/scale"
    PATCH_SCALE = "patch deployments/scale"
    GET_GROUPS_SCALE = "get leaderworkersets/scale"
    PATCH_GROUPS_SCALE = "patch leaderworkersets/scale"
    GET_SETS_SCALE = "get statefulsets/scale"
    PATCH_SETS_SCALE = "patch statefulsets/scale"


class ScalingRights(NamedTuple):
    """What changing the number of a workload's engines takes."""

    get: Right
    patch: Right


SCALING = {
    WorkloadKind.DEPLOYMENT: ScalingRights(Right.GET_SCALE, Right.PATCH_SCALE),
    WorkloadKind.LEADER_WORKER_SET: ScalingRights(Right.GET_GROUPS_SCALE, Right.PATCH_GROUPS_SCALE),
    WorkloadKind.STATEFUL_SET: ScalingRights(Right.GET_SETS_SCALE, Right.PATCH_SETS_SCALE),
}


class _Failing(msgspec.Struct):
    reason: str
    delay: float
    again_at: float


class RightsInUse:
    """What fails, so that it is told once, and tried again less and less often.

    Times are seconds of one monotonic clock that the caller passes in.
    """

    def __init__(self) -> None:
        self._failing: dict[Right, _Failing] = {}

    def due(self, right: Right, now: float) -> bool:
        """Whether it may be used now: it works, or failed long enough ago."""
        failing = self._failing.get(right)
        return failing is None or now >= failing.again_at

    def failed(self, right: Right, reason: str, now: float) -> bool:
        """It has failed for ``reason``, a word that stays the same. Returns whether that is news."""
        failing = self._failing.get(right)
        delay = _FIRST_DELAY if failing is None else min(failing.delay * 2, _LONGEST_DELAY)
        self._failing[right] = _Failing(reason, delay, now + delay)
        return failing is None or failing.reason != reason

    def worked(self, right: Right) -> bool:
        """It has worked. Returns whether that is news."""
        return self._failing.pop(right, None) is not None


class KubernetesError(PenstockError):
    """The API server refused, did not answer, or could not be reached.

    ``reason`` is one word: ``Forbidden``, ``NotFound``, ``Conflict`` and others of the API, ``Timeout`` or ``Unreachable``.
    """

    def __init__(self, right: Right, reason: str, message: str) -> None:
        super().__init__(f"{right.value}: {message}")
        self.right = right
        self.reason = reason


# What the API server does not do: told once, counted, and tried again.


class Failures:
    """Keeps track of the rights that do not work, for logs and metrics."""

    def __init__(self, registry: CollectorRegistry, namespace: str, clock: Clock) -> None:
        """``namespace``: where the rights are needed. ``clock`` gives monotonic seconds."""
        self._namespace = namespace
        self._now = clock
        self._rights = RightsInUse()
        self._counter = Counter(
            "penstock_coordinator_kubernetes_failures",
            "Requests that the Kubernetes API server refused or did not answer.",
            ["right", "reason"],
            registry=registry,
        )

    def due(self, right: Right) -> bool:
        """Whether a right may be used now: it works, or failed long enough ago."""
        return self._rights.due(right, self._now())

    def failed(self, *errors: KubernetesError) -> None:
        """What was asked for at once has failed, with at least one error: all of them count, one is told."""
        for error in errors:
            self._counter.labels(error.right.value, error.reason).inc()
        error = errors[0]
        if self._rights.failed(error.right, error.reason, self._now()):
            get_logger().warning(
                "Kubernetes did not let the coordinator have its way; it goes on without, and tries again",
                right=error.right.value,
                namespace=self._namespace,
                reason=error.reason,
                error=str(error),
            )

    def worked(self, right: Right) -> None:
        """A right has been used."""
        if self._rights.worked(right):
            get_logger().info("Kubernetes lets the coordinator have its way again", right=right.value)
