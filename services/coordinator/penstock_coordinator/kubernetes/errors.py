"""Permissions that the coordinator uses in Kubernetes, and tracking of failed requests to Kubernetes."""

import enum
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter

from penstock_common.errors import PenstockError
from penstock_common.observability.logging import get_logger
from penstock_coordinator.cluster import Clock

# The classes below describe the workloads that create the pods of engines.


class WorkloadKind(enum.Enum):
    """Kind of a Kubernetes workload. The values are the names of the kinds in logs."""

    DEPLOYMENT = "deployment"
    LEADER_WORKER_SET = "leader_worker_set"
    """Workload for engines with several pods per engine. Its number of replicas is the number of engines."""
    STATEFUL_SET = "stateful_set"
    """Workload for the ranks of a data-parallel group. A pod may have several ranks."""


class Workload(msgspec.Struct, frozen=True):
    """A workload in the coordinator's namespace."""

    kind: WorkloadKind
    name: str


# The classes below track permissions and retry delays.

_FIRST_DELAY = 1.0
_LONGEST_DELAY = 60.0
"""Maximum delay in seconds between two uses of a permission that fails. The delay doubles after each failure."""


class Right(enum.Enum):
    """Permission: a verb and a resource, named as in a Kubernetes Role."""

    PATCH_PODS = "patch pods"
    GET_SCALE = "get deployments/scale"
    PATCH_SCALE = "patch deployments/scale"
    GET_GROUPS_SCALE = "get leaderworkersets/scale"
    PATCH_GROUPS_SCALE = "patch leaderworkersets/scale"
    GET_SETS_SCALE = "get statefulsets/scale"
    PATCH_SETS_SCALE = "patch statefulsets/scale"


class ScalingRights(NamedTuple):
    """Permissions that are necessary to change the number of engines of a workload."""

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
    """Tracks permissions whose use fails. A failure is logged once, and retried with increasing delays.

    Callers pass the time as seconds of a monotonic clock.
    """

    def __init__(self) -> None:
        self._failing: dict[Right, _Failing] = {}

    def due(self, right: Right, now: float) -> bool:
        """Return whether a permission may be used now: the permission works, or its retry delay has passed."""
        failing = self._failing.get(right)
        return failing is None or now >= failing.again_at

    def failed(self, right: Right, reason: str, now: float) -> bool:
        """Record a failure.

        ``reason`` is a word that stays the same for the same cause. Return whether the failure is new.
        """
        failing = self._failing.get(right)
        delay = _FIRST_DELAY if failing is None else min(failing.delay * 2, _LONGEST_DELAY)
        self._failing[right] = _Failing(reason, delay, now + delay)
        return failing is None or failing.reason != reason

    def worked(self, right: Right) -> bool:
        """Record a success. Return whether the last use of the permission failed."""
        return self._failing.pop(right, None) is not None


class KubernetesError(PenstockError):
    """Error for a request that the API server refused or did not answer, or that did not reach the API server.

    ``reason`` is a reason of the Kubernetes API such as ``Forbidden``, ``NotFound`` or ``Conflict``, or ``Timeout``, or
    ``Unreachable``.
    """

    def __init__(self, right: Right, reason: str, message: str) -> None:
        super().__init__(f"{right.value}: {message}")
        self.right = right
        self.reason = reason


# The class below logs each failure once, counts failed requests, and decides when to retry.


class Failures:
    """Tracks permissions whose use fails, for logs and metrics."""

    def __init__(self, registry: CollectorRegistry, namespace: str, clock: Clock) -> None:
        """Create the tracker. ``namespace`` is the Kubernetes namespace. ``clock`` returns monotonic seconds."""
        self._namespace = namespace
        self._now = clock
        self._rights = RightsInUse()
        self._counter = Counter(
            "penstock_coordinator_kubernetes_failures",
            "Number of requests that the Kubernetes API server refused or did not answer.",
            ["right", "reason"],
            registry=registry,
        )

    def due(self, right: Right) -> bool:
        """Return whether a permission may be used now: the permission works, or its retry delay has passed."""
        return self._rights.due(right, self._now())

    def failed(self, *errors: KubernetesError) -> None:
        """Record the errors of concurrent requests. Count all errors, and log one of them."""
        for error in errors:
            self._counter.labels(error.right.value, error.reason).inc()
        error = errors[0]
        if self._rights.failed(error.right, error.reason, self._now()):
            get_logger().warning(
                "request to the Kubernetes API server failed; the coordinator retries it later",
                right=error.right.value,
                namespace=self._namespace,
                reason=error.reason,
                error=str(error),
            )

    def worked(self, right: Right) -> None:
        """Record a successful use of a permission."""
        if self._rights.worked(right):
            get_logger().info("requests to the Kubernetes API server succeed again", right=right.value)
