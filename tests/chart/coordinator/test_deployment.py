"""coordinator/deployment.yaml: one pod, which answers its probes and mounts no model files."""

from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock_common.config.sections import ServerConfig
from penstock_common.rpc.channel import make_channel
from penstock_coordinator.app import Coordinator
from penstock_coordinator.config import CoordinatorConfig
from tests.chart.rendering import AUTOSCALED, BARE, HUB, release


def test_there_is_never_a_second_coordinator():
    spec = release(HUB).one("Deployment", "coordinator")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}


async def test_the_coordinator_answers_all_its_probes():
    coordinator = Coordinator(CoordinatorConfig(server=ServerConfig(host="127.0.0.1")))
    port = await coordinator.start()
    container = release(HUB).container("coordinator")
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                request = health_pb2.HealthCheckRequest(service=container[probe]["grpc"].get("service", ""))
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True, timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await coordinator.stop()


def test_metrics_have_a_port_where_they_are_served():
    assert [port["name"] for port in release(HUB).container("coordinator")["ports"]] == ["grpc", "metrics"]
    assert [port["name"] for port in release(BARE).container("coordinator")["ports"]] == ["grpc"]


def test_no_number_of_coordinators_can_be_asked_for():
    assert release(AUTOSCALED).one("Deployment", "coordinator")["spec"]["replicas"] == 1
    assert "topologySpreadConstraints" not in release(AUTOSCALED).pod_spec("coordinator")
    assert "lifecycle" not in release(AUTOSCALED).container("coordinator")


def test_environment_is_added_where_it_is_given():
    settings = ("coordinator.extraEnv[0].name=GRPC_VERBOSITY", "coordinator.extraEnv[0].value=ERROR")
    assert release(HUB, *settings).env("coordinator").keys() == {"HOME", "GRPC_VERBOSITY"}
    assert release(BARE).env("coordinator").keys() == {"HOME"}
