"""Client of the Kubernetes API server, with the calls that the coordinator needs."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Self

import httpx2
import lightkube
from lightkube.config.kubeconfig import KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.core.exceptions import ConfigError as LightkubeConfigError
from lightkube.generic_resource import GenericNamespacedScale, create_namespaced_resource
from lightkube.resources.apps_v1 import Deployment, DeploymentScale, StatefulSet, StatefulSetScale
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType

from penstock_common.errors import ConfigError
from penstock_coordinator.kubernetes.errors import SCALING, KubernetesError, Right, Workload, WorkloadKind

TIMEOUT = 5.0
"""Timeout of a request in seconds."""
ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
"""Pod annotation with the deletion cost. A ReplicaSet that shrinks removes the pods with the lowest cost first."""
_SCALES: dict[WorkloadKind, type[DeploymentScale | GenericNamespacedScale | StatefulSetScale]] = {
    WorkloadKind.DEPLOYMENT: Deployment.Scale,
    WorkloadKind.LEADER_WORKER_SET: create_namespaced_resource(
        "leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", "leaderworkersets"
    ).Scale,
    WorkloadKind.STATEFUL_SET: StatefulSet.Scale,
}


class KubernetesApi:
    """Client of the Kubernetes cluster in which this process runs. It uses only the namespace of this process's pod."""

    def __init__(self, config: KubeConfig) -> None:
        self._client = lightkube.AsyncClient(
            config=config,
            timeout=httpx2.Timeout(TIMEOUT),
            trust_env=False,
            field_manager="penstock-coordinator",
        )
        self.namespace: str = self._client.namespace

    @classmethod
    def in_cluster(cls) -> Self:
        """Create a client with this pod's service account. Raises ConfigError if the service account cannot be read."""
        try:
            return cls(KubeConfig.from_service_account())
        except (LightkubeConfigError, KeyError) as e:
            raise ConfigError(f"the service account of this pod cannot be read: {e}") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def set_deletion_cost(self, pod: str, cost: int) -> None:
        patch = {"metadata": {"annotations": {ANNOTATION: str(cost)}}}
        async with _failures(Right.PATCH_PODS):
            await self._client.patch(Pod, pod, patch, patch_type=PatchType.MERGE)

    async def replicas(self, workload: Workload) -> int:
        """Return the target number of engines, or of pods with ranks, of ``workload``. Raises KubernetesError if the
        request to the Kubernetes API server fails.
        """
        async with _failures(SCALING[workload.kind].get):
            scale = await self._client.get(_SCALES[workload.kind], workload.name)
        return (scale.spec.replicas if scale.spec else None) or 0

    async def set_replicas(self, workload: Workload, replicas: int) -> None:
        """Set the target number that ``replicas`` returns. Raises KubernetesError if the request to the Kubernetes API
        server fails.
        """
        patch = {"spec": {"replicas": replicas}}
        async with _failures(SCALING[workload.kind].patch):
            await self._client.patch(_SCALES[workload.kind], workload.name, patch, patch_type=PatchType.MERGE)


@contextlib.asynccontextmanager
async def _failures(right: Right) -> AsyncIterator[None]:
    """Convert the client library's errors to KubernetesError. The request must finish within ``TIMEOUT`` seconds."""
    try:
        async with asyncio.timeout(TIMEOUT):
            yield
    except (httpx2.TimeoutException, TimeoutError):
        raise KubernetesError(right, "Timeout", f"the API server did not answer within {TIMEOUT:g} s") from None
    except ApiError as e:
        reason = e.status.reason or f"Status{e.response.status_code}"
        raise KubernetesError(right, reason, e.status.message or reason) from None
    except httpx2.HTTPStatusError as e:
        code = e.response.status_code
        raise KubernetesError(right, f"Status{code}", f"the API server answered with status {code}") from None
    except (httpx2.HTTPError, ssl.SSLError, OSError) as e:
        raise KubernetesError(right, "Unreachable", f"the API server cannot be reached: {e}") from None
    except ValueError as e:
        raise KubernetesError(right, "Malformed", f"the API server's answer cannot be read: {e}") from None
