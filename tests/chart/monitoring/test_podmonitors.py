"""monitoring/podmonitors.yaml: scraped ports and labels of the series; nothing is rendered unless enabled."""

import pytest

from tests.chart.rendering import GROUPS, HUB, POOLS, SERVICES, release

ON = "metrics.podMonitor.enabled=true"
EDGE = "frontend.edge.tlsSecretName=edge"


def endpoint(component: str, *settings: str) -> dict:
    (found,) = release(HUB, ON, *settings).one("PodMonitor", component)["spec"]["podMetricsEndpoints"]
    return found


def labels(component: str) -> dict[str, str]:
    """Return the labels of series, each with the pod label from which it is copied."""
    rules = [rule for rule in endpoint(component)["relabelings"] if "targetLabel" in rule]
    return {rule["targetLabel"]: rule["sourceLabels"][0] for rule in rules}


def test_nothing_is_there_unless_it_is_asked_for():
    assert release(HUB).all("PodMonitor") == []


@pytest.mark.parametrize("component", SERVICES)
def test_the_port_is_one_of_the_pods_and_serves_metrics(component: str):
    rendered = release(HUB, ON)
    monitor = rendered.one("PodMonitor", component)
    pod = rendered.pod(component)["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod.items()
    ports = {port["name"]: port["containerPort"] for port in rendered.container(component)["ports"]}
    config = rendered.config(component)
    serves = config["http"]["port"] if component == "frontend" else config["metrics"]["port"]
    assert ports[endpoint(component)["port"]] == serves


@pytest.mark.parametrize("component", SERVICES)
def test_only_the_services_own_container_is_scraped(component: str):
    keep = next(rule for rule in endpoint(component)["relabelings"] if rule.get("action") == "keep")
    assert keep["sourceLabels"] == ["__meta_kubernetes_pod_container_name"]
    assert keep["regex"] == release(HUB).container(component)["name"]


@pytest.mark.parametrize("component", SERVICES)
def test_series_are_labelled_by_labels_that_the_pods_have(component: str):
    pod = release(HUB, ON).pod(component)["metadata"]["labels"]
    meta = {f"__meta_kubernetes_pod_label_{name.replace('.', '_').replace('/', '_')}": name for name in pod}
    found = {target: pod[meta[source]] for target, source in labels(component).items()}
    wanted = {"release": "demo", "component": component}
    assert found == (wanted | {"pool": "default"} if component == "enginecore" else wanted)


def test_a_prometheus_selects_by_labels_and_scrapes_at_its_own_pace():
    settings = ("metrics.podMonitor.labels.team=llm", "metrics.podMonitor.interval=15s")
    monitor = release(HUB, ON, *settings).one("PodMonitor", "coordinator")
    assert monitor["metadata"]["labels"]["team"] == "llm"
    assert (endpoint("coordinator", *settings)["interval"], endpoint("coordinator")["interval"]) == ("15s", "30s")


def test_frontends_with_a_certificate_are_asked_over_tls():
    settings = (EDGE, "metrics.podMonitor.tlsConfig.serverName=llm.example")
    asked = endpoint("frontend", *settings)
    assert (asked["scheme"], asked["tlsConfig"]) == ("https", {"serverName": "llm.example"})
    for component in ("enginecore", "coordinator"):
        plain = endpoint(component, *settings)
        assert plain["scheme"] == "http"
        assert "tlsConfig" not in plain
    assert "tlsConfig" not in endpoint("frontend")


def test_frontends_alone_are_told_who_asks():
    keys = "frontend.edge.apiKeysSecretName=keys"
    settings = ("metrics.podMonitor.authorization.credentials.name=key", "frontend.config.auth.metrics=true", keys)
    assert endpoint("frontend", *settings)["authorization"] == {"credentials": {"name": "key"}}
    assert "authorization" not in endpoint("enginecore", *settings)
    assert "authorization" not in endpoint("frontend")


def test_nothing_is_scraped_by_annotations_as_well():
    for component in SERVICES:
        assert "prometheus.io/scrape" not in release(HUB, ON).pod(component)["metadata"]["annotations"]


def test_one_monitor_finds_the_engines_of_all_pools():
    rendered = release(POOLS, ON)
    selector = rendered.one("PodMonitor", "enginecore")["spec"]["selector"]["matchLabels"]
    pods = {component: rendered.pod(component)["metadata"]["labels"] for component in rendered.components()}
    selected = {component for component, labels in pods.items() if selector.items() <= labels.items()}
    assert selected == {component for component in pods if component.startswith("enginecore")}
    assert all("penstock.io/pool" in pods[component] for component in selected)


def test_all_ranks_of_a_pod_are_scraped():
    endpoints = release(GROUPS).one("PodMonitor", "enginecore")["spec"]["podMetricsEndpoints"]
    for rank, found in enumerate(endpoints):
        container = release(GROUPS).container("enginecore-wide", rank)
        assert found["port"] in [port["name"] for port in container["ports"]]
        keep = next(rule for rule in found["relabelings"] if rule.get("action") == "keep")
        assert keep["regex"] == container["name"]
    assert len(endpoints) == 2
    assert len(release(GROUPS).one("PodMonitor", "frontend")["spec"]["podMetricsEndpoints"]) == 1
