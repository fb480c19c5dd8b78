"""_helpers.tpl: the common parts of all services' pods; optional parts are rendered only if their value is set."""

import re

import pytest
import yaml

from charts import lint
from charts.config_schema import STRUCTS
from charts.image_tag import chart_version
from penstock.coordinator.v1 import service_pb2 as coordinator_api
from penstock.enginecore.v1 import service_pb2 as enginecore_api
from penstock.inference.v1 import service_pb2 as inference_api
from penstock_common.config.settings import reread_sections
from penstock_common.rpc.server import LIVENESS, STARTUP
from tests.chart.rendering import AUTOSCALED, BARE, CLAIMED, DEMO, EXPOSED, FETCHED, HUB, SERVICES, release

DRAINING = ("frontend", "enginecore")
API = {
    "frontend": inference_api.DESCRIPTOR.services_by_name["InferenceService"],
    "enginecore": enginecore_api.DESCRIPTOR.services_by_name["EngineCoreService"],
    "coordinator": coordinator_api.DESCRIPTOR.services_by_name["CoordinatorService"],
}


def test_images_are_named_by_version_device_and_registry():
    version = chart_version(lint.CHART.parents[1])
    assert release(HUB).container("frontend")["image"] == f"penstock/frontend:{version}"
    tagged = release(HUB, "image.tag=1.2.3-abc", "coordinator.image.tag=mine")
    images = {service: tagged.container(service)["image"] for service in ("frontend", "enginecore", "coordinator")}
    assert images == {
        "frontend": "penstock/frontend:1.2.3-abc",
        "enginecore": "penstock/enginecore:1.2.3-abc-cuda",
        "coordinator": "penstock/coordinator:mine",
    }
    assert release(HUB).container("enginecore")["image"] == f"penstock/enginecore:{version}-cuda"
    assert release(DEMO).container("enginecore")["image"] == f"penstock/enginecore:{version}-cpu"
    assert release(AUTOSCALED).container("coordinator")["image"] == f"registry.example/penstock/coordinator:{version}"
    assert release(AUTOSCALED).pod_spec("coordinator")["imagePullSecrets"] == [{"name": "registry-key"}]


def test_image_pull_secrets_are_given_as_names_or_as_pods_have_them():
    rendered = release(HUB, "image.pullSecrets[0].name=registry-key", "image.pullSecrets[1]=other")
    assert rendered.pod_spec("coordinator")["imagePullSecrets"] == [{"name": "registry-key"}, {"name": "other"}]


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


def test_frontends_sleep_before_they_stop_and_engines_need_not():
    assert release(HUB).container("frontend")["lifecycle"] == {"preStop": {"sleep": {"seconds": 10}}}
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


@pytest.mark.parametrize("component", SERVICES)
def test_every_service_is_alive_whether_or_not_it_accepts_requests(component: str):
    assert release(HUB).container(component)["livenessProbe"]["grpc"]["service"] == LIVENESS


@pytest.mark.parametrize("component", DRAINING)
def test_a_rollout_waits_for_an_engine_that_drains_and_for_one_that_loads(component: str):
    settings = ("enginecore.probes.startup.periodSeconds=10", "enginecore.probes.startup.failureThreshold=720")
    settings = (*settings, "enginecore.terminationGracePeriodSeconds=600")
    assert release(HUB, *settings).one("Deployment", component)["spec"]["progressDeadlineSeconds"] > 7200 + 600


def replaced(*settings: str) -> list[str]:
    """Return the services whose pods change with these settings."""
    before, after = release(HUB), release(HUB, *settings)
    return [c for c in SERVICES if before.pod(c) != after.pod(c)]


@pytest.mark.parametrize("component", SERVICES)
def test_a_changed_config_replaces_the_pods_of_its_service_only(component: str):
    assert replaced(f"{component}.config.server.max_concurrent_streams=7") == [component]


@pytest.mark.parametrize(
    ("setting", "component"),
    [
        *((setting, c) for setting in ("log.level=debug", "log.format=text", "log.requests=true") for c in SERVICES),
        ("frontend.config.limits.max_requests=7", "frontend"),
        ("frontend.config.fairness.weights.gold=2", "frontend"),
    ],
)
def test_reloadable_settings_change_the_file_and_replace_no_pod(setting: str, component: str):
    assert release(HUB, setting).config(component) != release(HUB).config(component)
    assert replaced(setting) == []


def test_the_chart_leaves_out_of_the_checksum_what_the_services_read_anew():
    helpers = (lint.CHART / "templates" / "_helpers.tpl").read_text(encoding="utf-8")
    [listed] = re.findall(r'{{- define "penstock\.reread" -}}\n(.*?){{- end -}}', helpers, re.DOTALL)
    assert yaml.safe_load(listed) == {c: list(reread_sections(STRUCTS[c])) for c in SERVICES}


@pytest.mark.parametrize("component", SERVICES)
def test_the_config_is_mounted_as_a_directory_so_that_the_kubelet_updates_it(component: str):
    mount = release(HUB).mounts(component)["/etc/penstock"]
    assert "subPath" not in mount
    assert release(HUB).one("ConfigMap", component).get("immutable") is None


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


@pytest.mark.parametrize("name", [FETCHED, EXPOSED, AUTOSCALED, CLAIMED])
def test_common_labels_and_annotations_are_on_every_object_and_pod(name: str):
    common = (r"commonLabels.example\.com/team=llm", r"commonAnnotations.example\.com/contact=llm@example.com")
    rendered = release(name, *common)
    pods = [deployment["spec"]["template"] for deployment in rendered.all("Deployment")]
    for part in (*rendered.manifests, *pods):
        assert part["metadata"]["labels"]["example.com/team"] == "llm", part
        assert part["metadata"]["annotations"]["example.com/contact"] == "llm@example.com", part


def test_a_components_value_overrides_the_common_value():
    tiers = {c: release(FETCHED).pod(c)["metadata"]["labels"]["example.com/tier"] for c in SERVICES}
    assert tiers == {"frontend": "edge", "enginecore": "all", "coordinator": "all"}
    settings = (r"commonAnnotations.prometheus\.io/port=no", r"frontend.podAnnotations.prometheus\.io/path=/m")
    annotations = release(HUB, *settings).pod("frontend")["metadata"]["annotations"]
    assert (annotations["prometheus.io/port"], annotations["prometheus.io/path"]) == ("8000", "/m")


def test_nothing_is_added_to_objects_that_nobody_asked_for():
    annotations = {key for m in release(HUB).manifests for key in m["metadata"].get("annotations", {})}
    assert not [key for key in annotations if not key.startswith("helm.sh/hook")]


def test_labels_of_ones_own_select_nothing():
    for deployment in release(FETCHED).all("Deployment"):
        assert not [key for key in deployment["spec"]["selector"]["matchLabels"] if key.startswith("example.com/")]
