"""The client against an API server that fails. The tests in a cluster use a real API server."""

from collections.abc import AsyncIterator

import pytest
import structlog.testing
from prometheus_client import CollectorRegistry

from penstock_common.errors import FailedPrecondition, InvalidArgument, Unavailable
from penstock_common.types.cluster import ClusterView, EngineStatus
from penstock_coordinator.config import KubernetesConfig
from penstock_coordinator.kubernetes import api as api_module
from penstock_coordinator.kubernetes.api import ANNOTATION, KubernetesApi
from penstock_coordinator.kubernetes.deletion_costs import CostWriter
from penstock_coordinator.kubernetes.errors import Failures, KubernetesError
from penstock_coordinator.kubernetes.replicas import Replicas
from tests.fakes.network.kubernetes_api import REASONS, Server, account_at


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


@pytest.fixture
async def api(server: Server) -> AsyncIterator[KubernetesApi]:
    api = KubernetesApi(account_at(server.url))
    yield api
    await api.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def failures(registry: CollectorRegistry, clock: Clock) -> Failures:
    return Failures(registry, "serving", clock)


def count(registry: CollectorRegistry, right: str, reason: str) -> float | None:
    labels = {"right": right, "reason": reason}
    return registry.get_sample_value("penstock_coordinator_kubernetes_failures_total", labels)


def view(running: int = 0) -> ClusterView:
    engine = EngineStatus(engine_id="a", incarnation="1", address="h:1", num_running_reqs=running, max_num_seqs=4)
    return ClusterView(engines=(engine,))


async def test_a_cost_is_written_into_the_annotation_and_nothing_else(api: KubernetesApi, server: Server) -> None:
    await api.set_deletion_cost("a", 256)
    assert server.requests == [
        ("PATCH", "/api/v1/namespaces/serving/pods/a", {"metadata": {"annotations": {ANNOTATION: "256"}}})
    ]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (403, "Forbidden"),
        (404, "NotFound"),
        (409, "Conflict"),
        (500, "InternalError"),
        (-1, "Status502"),
        (0, "Timeout"),
    ],
)
async def test_a_failure_has_the_name_of_the_right_and_a_reason(
    api: KubernetesApi, server: Server, status: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "TIMEOUT", 0.2 if status == 0 else 5.0)
    server.status = status
    with pytest.raises(KubernetesError, match="^patch pods: ") as e:
        await api.set_deletion_cost("a", 1)
    assert e.value.reason == reason


async def test_a_server_that_is_not_there_is_unreachable(api: KubernetesApi, server: Server) -> None:
    await server.stop()
    with pytest.raises(KubernetesError) as e:
        await api.set_deletion_cost("a", 1)
    assert e.value.reason == "Unreachable"


async def test_a_missing_right_is_told_once_counted_and_tried_again(
    api: KubernetesApi, server: Server, failures: Failures, registry: CollectorRegistry, clock: Clock
) -> None:
    writer = CostWriter(api, failures, slots=256, view=lambda: view(running=2), clock=clock)
    server.status = 403
    with structlog.testing.capture_logs() as logs:
        for now in (0.0, 0.5, 1.0, 1.5, 3.0):
            clock.now = now
            await writer.write_due()
        server.status = 200
        clock.now = 7.0
        await writer.write_due()
        await writer.write_due()
    assert count(registry, "patch pods", "Forbidden") == 3
    assert [(log["log_level"], log["right"]) for log in logs] == [("warning", "patch pods"), ("info", "patch pods")]
    assert logs[0]["namespace"] == "serving"
    assert len(server.requests) == 4


async def test_an_engine_that_is_no_pod_is_no_failure(
    api: KubernetesApi, server: Server, failures: Failures, registry: CollectorRegistry, clock: Clock
) -> None:
    writer = CostWriter(api, failures, slots=256, view=view, clock=clock)
    server.status = 404
    await writer.write_due()
    await writer.write_due()
    assert len(server.requests) == 1
    assert count(registry, "patch pods", "NotFound") is None


async def test_nothing_is_written_while_the_cluster_is_not_known(
    api: KubernetesApi, server: Server, failures: Failures, clock: Clock
) -> None:
    await CostWriter(api, failures, slots=256, view=lambda: None, clock=clock).write_due()
    assert server.requests == []


def replicas(api: KubernetesApi | None, failures: Failures, **config: object) -> Replicas:
    values = {"deployments": {"default": "engines"}, "max_replicas": 8} | config
    return Replicas(KubernetesConfig(**values), api, failures)


async def test_scale_changes_the_number_and_tells_the_one_before(
    api: KubernetesApi, server: Server, failures: Failures
) -> None:
    assert await replicas(api, failures).scale("", 5) == 2
    assert server.replicas == 5
    path = "/apis/apps/v1/namespaces/serving/deployments/engines/scale"
    assert server.requests == [("GET", path, None), ("PATCH", path, {"spec": {"replicas": 5}})]


async def test_engines_of_several_pods_are_scaled_by_their_groups(
    api: KubernetesApi, server: Server, failures: Failures, registry: CollectorRegistry
) -> None:
    scaled = replicas(api, failures, leader_worker_sets={"wide": "engines-wide"})
    assert await scaled.scale("wide", 5) == 2
    path = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/serving/leaderworkersets/engines-wide/scale"
    assert server.requests == [("GET", path, None), ("PATCH", path, {"spec": {"replicas": 5}})]
    server.status = 403
    with pytest.raises(FailedPrecondition, match="get leaderworkersets/scale: it is Forbidden"):
        await scaled.scale("wide", 4)
    assert count(registry, "get leaderworkersets/scale", "Forbidden") == 1
    assert count(registry, "get deployments/scale", "Forbidden") is None


async def test_scale_takes_a_pool_to_zero_and_back(api: KubernetesApi, server: Server, failures: Failures) -> None:
    scaled = replicas(api, failures)
    assert await scaled.scale("default", 0) == 2
    assert server.replicas == 0
    assert await scaled.scale("default", 3) == 0
    assert server.replicas == 3


@pytest.mark.parametrize(
    ("pool", "number", "error", "text"),
    [
        ("", None, InvalidArgument, "replicas is not set"),
        ("", 9, InvalidArgument, "replicas is 9; it must be from 0 to 8 in pool 'default'"),
        ("steady", 1, InvalidArgument, "replicas is 1; it must be from 2 to 8 in pool 'steady'"),
        ("steady", 0, InvalidArgument, "replicas is 0; it must be from 2 to 8 in pool 'steady'"),
        ("spot", 1, FailedPrecondition, "the number of engines of pool 'spot' is set by ScaledObject engines-spot"),
        (
            "defualt",
            1,
            InvalidArgument,
            r"pool is 'defualt'; existing pools: default, spot, steady; did you mean 'default'\?",
        ),
    ],
)
async def test_scale_refuses_what_is_not_its_own(
    api: KubernetesApi,
    server: Server,
    failures: Failures,
    pool: str,
    number: int | None,
    error: type[Exception],
    text: str,
) -> None:
    config = {
        "deployments": {"default": "engines", "steady": "engines-steady"},
        "owners": {"spot": "ScaledObject engines-spot"},
        "min_replicas": {"steady": 2},
    }
    with pytest.raises(error, match=text):
        await replicas(api, failures, **config).scale(pool, number)
    assert server.requests == []


async def test_outside_kubernetes_there_is_nothing_to_scale(failures: Failures) -> None:
    with pytest.raises(FailedPrecondition, match=r"kubernetes\.deployments and .* are empty"):
        await replicas(None, failures, deployments={}).scale("", 1)


@pytest.mark.parametrize(
    ("status", "error"), [(403, FailedPrecondition), (404, FailedPrecondition), (409, Unavailable), (500, Unavailable)]
)
async def test_scale_says_which_right_fails(
    api: KubernetesApi,
    server: Server,
    failures: Failures,
    registry: CollectorRegistry,
    status: int,
    error: type[Exception],
) -> None:
    server.status = status
    with pytest.raises(error, match="get deployments/scale: it is"):
        await replicas(api, failures).scale("", 3)
    assert count(registry, "get deployments/scale", REASONS[status]) == 1
