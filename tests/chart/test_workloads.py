"""Each option of the chart: what it adds, and that nothing of it is there without it."""

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from charts.lint import ChartError
from penstock.coordinator.v1 import service_pb2 as coordinator_api
from penstock.enginecore.v1 import service_pb2 as enginecore_api
from penstock.inference.v1 import service_pb2 as inference_api
from penstock_common.config.sections import ServerConfig
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.server import LIVENESS, STARTUP
from penstock_coordinator.app import Coordinator
from penstock_coordinator.config import CoordinatorConfig
from tests.chart.rendering import AUTOSCALED, BARE, DEMO, HUB, SERVICES, release

DRAINING = ("frontend", "enginecore")
API = {
    "frontend": inference_api.DESCRIPTOR.services_by_name["InferenceService"],
    "enginecore": enginecore_api.DESCRIPTOR.services_by_name["EngineCoreService"],
    "coordinator": coordinator_api.DESCRIPTOR.services_by_name["CoordinatorService"],
}


def test_autoscaling_scales_on_waiting_requests_per_engine():
    spec = release(AUTOSCALED).one("HorizontalPodAutoscaler", "enginecore")["spec"]
    deployment = release(AUTOSCALED).one("Deployment", "enginecore")
    assert spec["scaleTargetRef"] == {
        "apiVersion": deployment["apiVersion"],
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 16)
    assert spec["metrics"] == [
        {
            "type": "Pods",
            "pods": {
                "metric": {"name": "vllm_num_requests_waiting"},
                "target": {"type": "AverageValue", "averageValue": "8"},
            },
        }
    ]


def test_the_autoscaler_and_the_chart_do_not_both_set_the_number_of_engines():
    assert "replicas" not in release(AUTOSCALED).one("Deployment", "enginecore")["spec"]
    assert release(AUTOSCALED).one("Deployment", "frontend")["spec"]["replicas"] == 3


def test_without_autoscaling_the_chart_sets_the_number_of_engines():
    assert release(HUB).all("HorizontalPodAutoscaler") == []
    assert release(HUB).one("Deployment", "enginecore")["spec"]["replicas"] == 1
    assert release(BARE).one("Deployment", "enginecore")["spec"]["replicas"] == 0


def test_an_empty_autoscaling_range_is_refused():
    with pytest.raises(ChartError, match="minReplicas is 17; it must not exceed maxReplicas = 16"):
        release(AUTOSCALED, "enginecore.autoscaling.minReplicas=17")


def test_gpus_are_added_to_requests_and_limits_alike():
    resources = release(AUTOSCALED).container("enginecore")["resources"]
    assert resources == {
        "requests": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 2},
        "limits": {"memory": "32Gi", "nvidia.com/gpu": 2},
    }
    pod = release(AUTOSCALED).pod_spec("enginecore")
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["nodeSelector"] == {"example.com/gpu": "h100"}
    assert release(AUTOSCALED).config("enginecore")["model"]["device"] == "cuda"


def test_another_vendors_resource_can_be_named():
    resources = release(HUB, r"enginecore.gpu.resourceName=nvidia\.com/mig-1g\.10gb").container("enginecore")[
        "resources"
    ]
    assert resources["limits"]["nvidia.com/mig-1g.10gb"] == 1
    assert "nvidia.com/gpu" not in resources["limits"]


@pytest.mark.parametrize("name", [DEMO, BARE])
def test_without_gpus_nothing_asks_for_one(name: str):
    rendered = release(name)
    assert "nvidia" not in str(rendered.manifests)
    assert "runtimeClassName" not in rendered.pod_spec("enginecore")
    assert rendered.config("enginecore")["model"]["device"] == "cpu"


@pytest.mark.parametrize("component", ["frontend", "coordinator"])
def test_only_engines_get_gpus(component: str):
    pod = release(AUTOSCALED).pod_spec(component)
    assert "nvidia" not in str(pod)
    assert "tolerations" not in pod


def test_images_are_named_by_version_device_and_registry():
    assert release(HUB).container("frontend")["image"] == "penstock/frontend:0.1.0"
    assert release(HUB).container("enginecore")["image"] == "penstock/enginecore:0.1.0-cuda"
    assert release(DEMO).container("enginecore")["image"] == "penstock/enginecore:0.1.0-cpu"
    assert release(AUTOSCALED).container("coordinator")["image"] == "registry.example/penstock/coordinator:0.1.0"
    assert release(AUTOSCALED).pod_spec("coordinator")["imagePullSecrets"] == [{"name": "registry-key"}]


def test_a_given_tag_or_digest_wins():
    assert release(BARE).container("enginecore")["image"] == "penstock/enginecore:1.2"
    assert release(BARE).container("frontend")["image"] == f"mirror/penstock-frontend@sha256:{'0' * 63}1"


@pytest.mark.parametrize("component", DRAINING)
def test_the_grace_period_exceeds_sleep_and_drain(component: str):
    for name in (HUB, AUTOSCALED, BARE, DEMO):
        rendered = release(name)
        hook = rendered.container(component).get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
        needed = hook["sleep"]["seconds"] + rendered.config(component)["drain_timeout"]
        assert rendered.pod_spec(component)["terminationGracePeriodSeconds"] > needed


def test_a_grace_period_that_would_cut_the_drain_short_is_refused():
    enough = release(HUB, "enginecore.preStopSleepSeconds=4", "enginecore.terminationGracePeriodSeconds=125")
    assert enough.pod_spec("enginecore")["terminationGracePeriodSeconds"] == 125
    with pytest.raises(ChartError, match=r"enginecore.terminationGracePeriodSeconds is 124; it must exceed .* = 124"):
        release(HUB, "enginecore.preStopSleepSeconds=4", "enginecore.terminationGracePeriodSeconds=124")
    with pytest.raises(ChartError, match=r"frontend.terminationGracePeriodSeconds is 60; it must exceed .* = 65"):
        release(HUB, "frontend.drainTimeoutSeconds=60")


def test_frontends_sleep_before_they_stop_and_engines_need_not():
    assert release(HUB).container("frontend")["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    assert "lifecycle" not in release(HUB).container("enginecore")
    assert release(AUTOSCALED).container("enginecore")["lifecycle"] == {"preStop": {"sleep": {"seconds": 10}}}
    assert "lifecycle" not in release(BARE).container("frontend")


@pytest.mark.parametrize("component", SERVICES)
def test_readiness_is_asked_of_the_grpc_service(component: str):
    container = release(HUB).container(component)
    port = release(HUB).config(component)["server"]["port"]
    assert {"name": "grpc", "containerPort": port} in container["ports"]
    assert container["readinessProbe"]["grpc"] == {"port": port, "service": API[component].full_name}


@pytest.mark.parametrize("component", SERVICES)
def test_a_service_has_started_when_it_says_that_it_has_loaded_what_it_needs(component: str):
    assert release(HUB).container(component)["startupProbe"]["grpc"]["service"] == STARTUP


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


@pytest.mark.parametrize("component", SERVICES)
def test_every_service_is_alive_whether_or_not_it_accepts_requests(component: str):
    assert release(HUB).container(component)["livenessProbe"]["grpc"]["service"] == LIVENESS


@pytest.mark.parametrize("component", DRAINING)
def test_loading_a_model_may_take_as_long_as_the_startup_probe_allows(component: str):
    settings = ("enginecore.probes.startup.periodSeconds=10", "enginecore.probes.startup.failureThreshold=720")
    assert release(HUB, *settings).one("Deployment", component)["spec"]["progressDeadlineSeconds"] > 7200


def test_there_is_never_a_second_coordinator():
    spec = release(HUB).one("Deployment", "coordinator")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}


def test_rollouts_follow_the_values():
    strategy = release(AUTOSCALED).one("Deployment", "enginecore")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"}}


def test_frontends_have_one_address_and_one_per_pod():
    service = release(HUB).one("Service", "frontend")["spec"]
    headless = release(HUB).one("Service", "frontend", suffix="-headless")["spec"]
    assert service["type"] == "ClusterIP"
    assert "clusterIP" not in service
    assert headless["clusterIP"] == "None"
    for spec in (service, headless):
        assert {port["name"]: port["port"] for port in spec["ports"]} == {"grpc": 50051, "http": 8000}


def test_the_public_service_can_be_published_on_other_ports():
    service = release(BARE).one("Service", "frontend")["spec"]
    assert service["type"] == "LoadBalancer"
    assert service["ports"][0]["port"] == 443
    assert release(AUTOSCALED).one("Service", "frontend")["metadata"]["annotations"] == {"example.com/team": "llm"}


def test_engines_register_under_the_address_of_their_pod():
    env = release(HUB).env("enginecore")
    assert env["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert env["PENSTOCK_COORDINATOR__ADVERTISE"]["value"] == "$(POD_IP):50052"
    assert env["PENSTOCK_ENGINE_ID"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    names = list(env)
    assert names.index("POD_IP") < names.index("PENSTOCK_COORDINATOR__ADVERTISE")  # a reference must come later


@pytest.mark.parametrize("component", SERVICES)
def test_a_changed_config_replaces_the_pods_of_its_service_only(component: str):
    def checksums(*settings: str) -> dict[str, str]:
        rendered = release(HUB, *settings)
        return {c: rendered.pod(c)["metadata"]["annotations"]["checksum/config"] for c in SERVICES}

    before, after = checksums(), checksums(f"{component}.config.server.max_concurrent_streams=7")
    assert [c for c in SERVICES if before[c] != after[c]] == [component]


@pytest.mark.parametrize("component", SERVICES)
def test_metrics_are_announced_where_they_are_served(component: str):
    rendered = release(HUB)
    annotations = rendered.pod(component)["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert int(annotations["prometheus.io/port"]) in [
        p["containerPort"] for p in rendered.container(component)["ports"]
    ]
    silent = release(HUB, "metrics.scrapeAnnotations=false").pod(component)["metadata"]["annotations"]
    assert list(silent) == ["checksum/config"]


def test_metrics_can_be_switched_off():
    rendered = release(BARE)
    for component in ("enginecore", "coordinator"):
        assert rendered.config(component)["metrics"]["port"] == -1
        assert [port["name"] for port in rendered.container(component)["ports"]] == ["grpc"]
        assert "prometheus.io/scrape" not in rendered.pod(component)["metadata"]["annotations"]


@pytest.mark.parametrize("component", DRAINING)
def test_pods_spread_over_nodes_unless_told_otherwise(component: str):
    (constraint,) = release(HUB).pod_spec(component)["topologySpreadConstraints"]
    selector = release(HUB).one("Deployment", component)["spec"]["selector"]
    assert constraint["topologyKey"] == "kubernetes.io/hostname"
    assert constraint["labelSelector"] == selector
    assert "topologySpreadConstraints" not in release(BARE).pod_spec(component)


def test_shared_memory_is_mounted_on_request():
    assert release(AUTOSCALED).volumes("enginecore")["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert release(AUTOSCALED).mounts("enginecore")["/dev/shm"]["name"] == "shm"
    assert "shm" not in release(HUB).volumes("enginecore")


def test_pod_settings_are_passed_on():
    rendered = release(AUTOSCALED)
    assert rendered.pod("enginecore")["metadata"]["labels"]["example.com/tier"] == "gpu"
    assert rendered.pod("frontend")["metadata"]["annotations"]["example.com/owner"] == "llm"
    assert rendered.pod_spec("enginecore")["priorityClassName"] == "serving"
    assert "nodeAffinity" in rendered.pod_spec("enginecore")["affinity"]
    assert rendered.pod_spec("frontend")["serviceAccountName"] == "penstock"
    bare = release(BARE).pod_spec("enginecore")
    assert not {"priorityClassName", "affinity", "serviceAccountName", "nodeSelector", "imagePullSecrets"} & bare.keys()


def test_a_fixed_user_can_be_left_to_the_cluster():
    assert release(BARE).pod_spec("frontend")["securityContext"].keys() == {
        "runAsNonRoot",
        "fsGroupChangePolicy",
        "seccompProfile",
    }


def test_extra_environment_is_added():
    assert release(AUTOSCALED).env("frontend")["HTTPS_PROXY"]["value"] == "http://proxy.example:3128"
    assert "valueFrom" in release(AUTOSCALED).env("enginecore")["NCCL_DEBUG"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("PENSTOCK_LOG__LEVEL", "settings of the service belong in enginecore.config"),
        ("HF_HOME", "is set by the chart"),
    ],
)
def test_extra_environment_cannot_override_what_the_chart_sets(name: str, message: str):
    with pytest.raises(ChartError, match=rf"enginecore.extraEnv: {name}.*{message}"):
        release(HUB, f"enginecore.extraEnv[0].name={name}", "enginecore.extraEnv[0].value=x")
