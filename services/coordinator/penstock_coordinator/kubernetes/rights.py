"""What the coordinator may do in Kubernetes, and how it goes on when that fails."""

import enum
from typing import NamedTuple

import msgspec

from penstock_coordinator.kubernetes.workload import WorkloadKind

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
