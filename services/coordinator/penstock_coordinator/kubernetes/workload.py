"""What makes the pods of a pool's engines."""

import enum

import msgspec


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
