"""What the API server does not do: told once, counted, and tried again."""

from prometheus_client import CollectorRegistry, Counter

from penstock_common.observability.logging import get_logger
from penstock_coordinator.cluster import Clock
from penstock_coordinator.kubernetes.errors import KubernetesError
from penstock_coordinator.kubernetes.rights import Right, RightsInUse


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
