"""Operators change the number of engines: a frontend, a coordinator, and an API server that can fail."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog.testing

from penstock.admin.v1 import messages_pb2 as pb
from penstock.coordinator.v1 import messages_pb2 as coordinator_pb
from penstock.coordinator.v1 import service_pb2_grpc as coordinator_rpc
from penstock_common.config.sections import ServerConfig
from penstock_common.errors import FailedPrecondition, RequestFailed, Unavailable
from penstock_common.observability.tracing import current_call
from penstock_common.rpc.server import RpcServer
from penstock_coordinator.app import Coordinator
from penstock_coordinator.config import KubernetesConfig
from penstock_coordinator.kubernetes.api import KubernetesApi
from penstock_frontend.config import CoordinatorClientConfig
from penstock_frontend.rpc import coordinator_client
from penstock_local.cli import main
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, failure
from tests.fakes.network.certificates import Authority
from tests.fakes.network.kubernetes_api import Server, account_at
from tests.fakes.network.ports import free_port
from tests.fakes.systems.cluster_members import address_of, running

POOLS = KubernetesConfig(
    deployments={"default": "engines", "steady": "engines-steady"},
    owners={"spot": "ScaledObject engines-spot", "auto": "HorizontalPodAutoscaler engines-auto"},
    min_replicas={"steady": 1},
    max_replicas=8,
)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    """Yield a fake Kubernetes API server for the coordinator's cluster."""
    async with Server() as server:
        monkeypatch.setattr(KubernetesApi, "in_cluster", lambda: KubernetesApi(account_at(server.url)))
        yield server


@pytest.fixture
async def coordinator(server: Server) -> AsyncIterator[Coordinator]:
    async with running(kubernetes=POOLS) as coordinator:
        yield coordinator


@contextlib.asynccontextmanager
async def frontend_of(model: Path, address: str, **options: Any) -> AsyncIterator[FrontendServer]:
    coordinator = options.pop("coordinator", CoordinatorClientConfig(address=address))
    async with FrontendServer(model, coordinator=coordinator, **options) as frontend:
        yield frontend


@pytest.fixture
async def frontend(coordinator: Coordinator, model: Path) -> AsyncIterator[FrontendServer]:
    async with frontend_of(model, address_of(coordinator)) as frontend:
        yield frontend


async def scale(frontend: FrontendServer, replicas: int | None, pool: str = "") -> int:
    response = await frontend.admin.Scale(pb.ScaleRequest(replicas=replicas, pool=pool))
    return int(response.previous_replicas)


def facts(error: RequestFailed) -> tuple[str, str, str, float | None]:
    return error.code, error.reason, error.field, error.retry_after


async def test_a_pool_grows_and_goes_to_zero_and_comes_back(frontend: FrontendServer, server: Server) -> None:
    assert await scale(frontend, 5) == 2
    assert server.replicas == 5
    assert await scale(frontend, 0, "default") == 5
    assert server.replicas == 0
    assert await scale(frontend, 1) == 0
    assert server.replicas == 1
    assert await scale(frontend, 3, "steady") == 1
    assert server.requests[-1][:2] == ("PATCH", "/apis/apps/v1/namespaces/serving/deployments/engines-steady/scale")


async def test_both_services_log_the_change(frontend: FrontendServer) -> None:
    with structlog.testing.capture_logs() as logs:
        await scale(frontend, 5)
    told = [log for log in logs if log["event"] == "changed the number of engines in a pool"]
    assert [(log["pool"], log["replicas"], log["previous"]) for log in told] == [("default", 5, 2)] * 2
    assert [log["deployment"] for log in told if "deployment" in log] == ["engines"]


@pytest.mark.parametrize(
    ("pool", "replicas", "code", "reason", "field", "message"),
    [
        ("", None, "INVALID_ARGUMENT", "INVALID_FIELD", "replicas", "replicas is not set"),
        ("", 9, "INVALID_ARGUMENT", "INVALID_FIELD", "replicas", "replicas is 9; it must be from 0 to 8"),
        ("steady", 0, "INVALID_ARGUMENT", "INVALID_FIELD", "replicas", "replicas is 0; it must be from 1 to 8"),
        ("stedy", 2, "INVALID_ARGUMENT", "INVALID_FIELD", "pool", "pools: auto, default, spot, steady; did you mean"),
        ("spot", 2, "FAILED_PRECONDITION", "REPLICAS_OWNED", "pool", "is set by ScaledObject engines-spot"),
        ("auto", 2, "FAILED_PRECONDITION", "REPLICAS_OWNED", "pool", "is set by HorizontalPodAutoscaler engines-auto"),
    ],
)
async def test_a_refusal_of_the_coordinator_arrives_unchanged(
    frontend: FrontendServer,
    server: Server,
    pool: str,
    replicas: int | None,
    code: str,
    reason: str,
    field: str,
    message: str,
) -> None:
    error = await failure(scale(frontend, replicas, pool))
    assert facts(error) == (code, reason, field, None)
    assert message in error.message
    assert server.requests == []


@pytest.mark.parametrize(
    ("status", "code", "reason", "retry_after"),
    [
        (403, "FAILED_PRECONDITION", "KUBERNETES_REFUSED", None),
        (404, "FAILED_PRECONDITION", "KUBERNETES_REFUSED", None),
        (500, "UNAVAILABLE", "KUBERNETES_FAILED", 1.0),
    ],
)
async def test_what_kubernetes_refuses_is_told_by_the_rights_name(
    frontend: FrontendServer, server: Server, status: int, code: str, reason: str, retry_after: float | None
) -> None:
    server.status = status
    error = await failure(scale(frontend, 5))
    assert facts(error) == (code, reason, "", retry_after)
    assert "get deployments/scale: it is" in error.message


async def test_outside_kubernetes_the_setting_is_named(model: Path) -> None:
    async with running() as coordinator, frontend_of(model, address_of(coordinator)) as frontend:
        error = await failure(scale(frontend, 5))
        assert facts(error) == ("FAILED_PRECONDITION", "NOT_IN_KUBERNETES", "", None)
        assert "kubernetes.deployments and kubernetes.leader_worker_sets are empty" in error.message


async def test_engines_of_the_configuration_are_nobodys_to_scale(engine: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        error = await failure(scale(frontend, 5))
        assert facts(error) == ("FAILED_PRECONDITION", "NO_COORDINATOR", "", None)
        assert "this frontend has no coordinator" in error.message


async def test_a_coordinator_that_is_away_is_unavailable(model: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with frontend_of(model, address) as frontend:
        error = await failure(scale(frontend, 5))
        assert facts(error) == ("UNAVAILABLE", "COORDINATOR_AWAY", "", 1.0)
        assert f"the coordinator at {address} does not answer: " in error.message


async def test_a_coordinator_that_does_not_answer_in_time_is_unavailable(
    frontend: FrontendServer, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, "SCALE_TIMEOUT", 0.2)
    server.status = 0
    error = await failure(scale(frontend, 5))
    assert facts(error) == ("UNAVAILABLE", "COORDINATOR_AWAY", "", 1.0)


async def test_a_coordinator_that_waits_for_engines_to_come_back_scales_already(server: Server, model: Path) -> None:
    async with (
        running(kubernetes=POOLS, restart_grace=600.0) as coordinator,
        frontend_of(model, address_of(coordinator)) as frontend,
    ):
        assert not (await frontend.admin.GetCluster(pb.GetClusterRequest())).coordinator_connected
        assert await scale(frontend, 5) == 2


async def test_under_tls_operators_scale_by_frontends_and_engines_do_not(
    server: Server, model: Path, tmp_path: Path
) -> None:
    authority = Authority()

    def files(name: str) -> Any:
        return authority.issue(name).write(tmp_path / name)

    listener = ServerConfig(host="127.0.0.1", port=0, tls=files("penstock-coordinator").server())
    async with running(kubernetes=POOLS, server=listener) as coordinator:
        address = address_of(coordinator)

        def through(name: str) -> Any:
            return frontend_of(
                model,
                address,
                coordinator=CoordinatorClientConfig(address=address, tls=files(name).client()),
                admin=ServerConfig(host="127.0.0.1", port=0, tls=files("penstock-frontend").server()),
                client=files("penstock-operator").credentials(),
            )

        with structlog.testing.capture_logs() as logs:
            async with through("penstock-frontend") as frontend:
                assert await scale(frontend, 5) == 2
        assert [log["by"] for log in logs if "by" in log] == ["penstock-operator, localhost"]
        async with through("penstock-somebody") as frontend:
            error = await failure(scale(frontend, 3))
            assert (type(error), error.reason) == (FailedPrecondition, "PEER_NOT_ALLOWED")
            assert error.message.startswith(
                "the coordinator refuses this frontend: the peer's certificate has the names"
            )
        async with files("penstock-enginecore").credentials().channel(address, []) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as e:
                await coordinator_rpc.CoordinatorServiceStub(channel).Scale(coordinator_pb.ScaleRequest(replicas=3))
            assert e.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert server.replicas == 5


async def test_a_coordinator_that_does_not_trust_the_frontend_is_unavailable(
    server: Server, model: Path, tmp_path: Path
) -> None:
    tls = Authority().issue("penstock-coordinator").write(tmp_path / "coordinator").server()
    listener = ServerConfig(host="127.0.0.1", port=0, tls=tls)
    async with (
        running(kubernetes=POOLS, server=listener) as coordinator,
        frontend_of(model, address_of(coordinator)) as frontend,
    ):
        error = await failure(scale(frontend, 3))
        assert (type(error), error.reason) == (Unavailable, "COORDINATOR_AWAY")


async def test_the_call_belongs_to_the_operators_trace() -> None:
    traced = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    seen: list[Any] = []

    class Recorder(coordinator_rpc.CoordinatorServiceServicer):
        async def Scale(self, request: Any, context: Any) -> coordinator_pb.ScaleResponse:
            seen.extend(context.invocation_metadata())
            return coordinator_pb.ScaleResponse()

    rpc = RpcServer(ServerConfig(host="127.0.0.1", port=0), service_names=())
    coordinator_rpc.add_CoordinatorServiceServicer_to_server(Recorder(), rpc.server)  # type: ignore[abstract]
    client = coordinator_client.CoordinatorClient(
        f"127.0.0.1:{await rpc.start()}", frontend_id="f", incarnation="1", on_view=lambda view: None
    )
    current_call.set(traced)
    try:
        await client.scale("", 3)
    finally:
        await rpc.stop(0)
    assert traced.items() <= dict(seen).items()


async def test_the_command_scales_the_cluster(
    frontend: FrontendServer, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{frontend.frontend.admin_port}"

    async def command(*arguments: str) -> int:
        return await asyncio.to_thread(main, ["scale", "--admin-address", address, *arguments])

    assert await command("5") == 0
    assert server.replicas == 5
    assert "pool default: 2 engines wanted before, 5 now\n" in capsys.readouterr().out
    assert await command("--pool", "sport", "5") == 1
    assert "pools: auto, default, spot, steady; did you mean 'spot'?" in capsys.readouterr().err
    assert await command("--pool", "spot", "5") == 1
    assert "is set by ScaledObject engines-spot; change the limits of that controller" in capsys.readouterr().err
