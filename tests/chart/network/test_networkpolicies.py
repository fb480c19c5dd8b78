"""network/networkpolicies.yaml and _rules.tpl: allowed peers and ports of each component; all other traffic is denied."""

from typing import Any

import pytest
import yaml

from charts import lint
from charts.lint import ChartError
from tests.chart.rendering import BARE, DEMO, EXPOSED, GROUPS, HUB, MULTINODE, POOLS, SERVICES, WORKER, Release, release

ON = "networkPolicy.enabled=true"
RELEASE = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": "demo"}


def pods(component: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {**RELEASE, "app.kubernetes.io/component": component}}}


def namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def spec(rendered: Release, component: str) -> dict[str, Any]:
    return rendered.one("NetworkPolicy", component)["spec"]


def rules(rendered: Release, component: str, way: str) -> dict[tuple[int, ...], list[Any] | None]:
    """Return the peers of each set of TCP ports, from the first rule with those ports. None means any peer."""
    whom = {"ingress": "from", "egress": "to"}[way]
    found = {}
    for rule in spec(rendered, component)[way]:
        ports = tuple(port["port"] for port in rule["ports"] if port["protocol"] == "TCP")
        found.setdefault(ports, rule.get(whom))
    return found


def test_without_the_value_there_are_none():
    assert not release(HUB).all("NetworkPolicy")


@pytest.mark.parametrize("component", [*SERVICES, "test"])
def test_each_component_has_one_that_denies_what_it_does_not_list(component: str):
    rendered = spec(release(HUB, ON), component)
    assert {"podSelector": rendered["podSelector"]} == pods(component)
    assert rendered["policyTypes"] == ["Ingress", "Egress"]


def test_every_pod_of_the_release_is_selected_by_exactly_one():
    rendered = release(POOLS, ON)
    selectors = [policy["spec"]["podSelector"]["matchLabels"].items() for policy in rendered.all("NetworkPolicy")]
    for component in rendered.components():
        labels = rendered.pod(component)["metadata"]["labels"].items()
        assert len([selector for selector in selectors if selector <= labels]) == 1


def test_peers_are_pods_of_the_same_release_and_namespace():
    for policy in release(HUB, ON).all("NetworkPolicy"):
        for rule in [*policy["spec"]["ingress"], *policy["spec"]["egress"]]:
            for peer in [*rule.get("from", []), *rule.get("to", [])]:
                if "podSelector" in peer:
                    assert RELEASE.items() <= peer["podSelector"]["matchLabels"].items()
                    assert "namespaceSelector" not in peer


def test_frontends_are_reached_by_anybody_on_their_two_ports():
    assert rules(release(HUB, ON), "frontend", "ingress") == {(50051, 8000): None, (8000,): [namespace("monitoring")]}


def test_frontends_are_reached_by_the_clients_that_are_named_and_by_the_test():
    allowed = rules(release(EXPOSED), "frontend", "ingress")
    assert allowed == {
        (50051, 8000): [namespace("gateways"), pods("test")],
        (8000,): [namespace("monitoring")],
    }


def test_engines_are_reached_by_frontends_and_what_reads_their_metrics():
    assert rules(release(HUB, ON), "enginecore", "ingress") == {
        (50052,): [pods("frontend")],
        (9100,): [namespace("monitoring")],
    }


def test_the_coordinator_is_reachable_for_engines_frontends_and_metrics_scrapers():
    assert rules(release(HUB, ON), "coordinator", "ingress") == {
        (50050,): [pods("frontend"), pods("enginecore")],
        (9100,): [namespace("monitoring")],
    }


def test_the_test_is_reached_by_nobody_and_reaches_frontends():
    assert spec(release(HUB, ON), "test")["ingress"] == []
    assert rules(release(HUB, ON), "test", "egress") == {
        (53,): [namespace("kube-system")],
        (50051, 8000): [pods("frontend")],
    }
    assert not [p for p in release(HUB, ON, "test.enabled=false").all("NetworkPolicy") if "test" in str(p)]


@pytest.mark.parametrize(
    ("component", "reached"),
    [
        ("frontend", {(50052,): [pods("enginecore")], (50050,): [pods("coordinator")]}),
        ("enginecore", {(50050,): [pods("coordinator")]}),
        ("coordinator", {}),
    ],
)
def test_services_reach_each_other_and_names_and_nothing_else(component: str, reached: dict[tuple[int, ...], Any]):
    assert rules(release(DEMO, ON), component, "egress") == {(53,): [namespace("kube-system")], **reached}


def test_names_are_looked_up_over_udp_too():
    (dns, *_) = spec(release(HUB, ON), "coordinator")["egress"]
    assert dns["ports"] == [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]


@pytest.mark.parametrize("component", SERVICES)
def test_models_are_downloaded_from_public_addresses_by_those_that_need_them(component: str):
    found = rules(release(HUB, ON), component, "egress").get((443,))
    if component == "coordinator":
        assert found is None
    else:
        assert found is not None
        assert [peer["ipBlock"]["cidr"] for peer in found] == ["0.0.0.0/0", "::/0"]
        assert "10.0.0.0/8" in found[0]["ipBlock"]["except"]


@pytest.mark.parametrize("component", SERVICES)
def test_traces_go_to_the_port_of_the_collectors_address(component: str):
    assert rules(release(EXPOSED), component, "egress")[(4318,)] == [namespace("monitoring")]
    anywhere = release(HUB, ON, "tracing.endpoint=collector:4317")
    assert rules(anywhere, component, "egress")[(4317,)] is None


def test_without_metrics_their_port_is_closed():
    for component in ("enginecore", "coordinator"):
        assert (9100,) not in rules(release(BARE, ON), component, "ingress")


def test_what_reads_metrics_may_be_named_or_be_nobody():
    own = release(HUB, ON, "networkPolicy.metrics[0].podSelector.matchLabels.app=prometheus")
    assert rules(own, "enginecore", "ingress")[(9100,)] == [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    assert list(rules(release(HUB, ON, "networkPolicy.metrics=null"), "enginecore", "ingress")) == [(50052,)]


@pytest.mark.parametrize(("mode", "asked"), [("none", False), ("hpa", False), ("keda", True)])
def test_what_scales_engines_reaches_the_coordinator_and_that_the_api_server(mode: str, asked: bool):
    found = lint.helm(
        "template",
        "demo",
        str(lint.CHART),
        "--skip-schema-validation",  # this test needs only the policies, not the mode's other values
        "--show-only=templates/network/networkpolicies.yaml",
        f"--set=model.hub.id=a/b,{ON},enginecore.autoscaling.mode={mode}",
    )
    rendered = Release(list(yaml.safe_load_all(found)))
    assert rules(rendered, "coordinator", "ingress").get((50050,)) is not None
    peers = [rule["from"] for rule in spec(rendered, "coordinator")["ingress"] if rule["ports"][0]["port"] == 50050]
    assert ([namespace("keda")] in peers) == asked
    assert ((443, 6443) in rules(rendered, "coordinator", "egress")) == (mode != "none")


def test_rules_may_be_added():
    extra = spec(release(EXPOSED), "enginecore")["ingress"][-1]
    assert extra["from"] == [{"podSelector": {"matchLabels": {"example.com/router": "own"}}}]
    with pytest.raises(ChartError, match="Additional property port is not allowed"):
        release(HUB, "networkPolicy.extra.enginecore.ingress[0].port=1")


@pytest.mark.parametrize("component", SERVICES)
def test_every_port_that_is_opened_is_one_of_the_containers(component: str):
    rendered = release(HUB, ON)
    ports = {port["containerPort"] for port in rendered.container(component)["ports"]}
    opened = {port for group in rules(rendered, component, "ingress") for port in group}
    assert opened == ports


def test_keda_reaches_the_coordinator_where_it_scales_engines():
    def sources(*settings: str) -> list[object]:
        rendered = release(HUB, "networkPolicy.enabled=true", *settings)
        rules = rendered.one("NetworkPolicy", "coordinator")["spec"]["ingress"]
        return [peer for rule in rules if rule["ports"][0]["port"] == 50050 for peer in rule["from"]]

    keda = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
    assert keda in sources("enginecore.autoscaling.mode=keda")
    assert keda not in sources()


def test_the_coordinator_reaches_the_api_server_where_it_has_rights():
    def ports(*settings: str) -> list[int]:
        rendered = release(HUB, "networkPolicy.enabled=true", *settings)
        rules = rendered.one("NetworkPolicy", "coordinator")["spec"]["egress"]
        return [port["port"] for rule in rules for port in rule["ports"]]

    assert {443, 6443} <= set(ports("coordinator.kubernetes.scale=true"))
    assert not {443, 6443} & set(ports())


def policies_of(rendered: Release, component: str) -> list[dict[str, Any]]:
    """Return the policies that select the pods of a component."""
    labels = rendered.pod(component)["metadata"]["labels"]
    return [policy for policy in rendered.all("NetworkPolicy") if selects(policy["spec"]["podSelector"], labels)]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    among = all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", []))
    return among and selector["matchLabels"].items() <= labels.items()


def test_only_pods_of_a_pools_engines_reach_each_other_on_every_port():
    rendered = release(MULTINODE)
    (policy,) = policies_of(rendered, f"enginecore-wide{WORKER}")
    assert policy in policies_of(rendered, "enginecore-wide")
    (ingress,) = policy["spec"]["ingress"]
    assert ingress.keys() == {"from"}  # without ports, the rule allows any port
    (peer,) = ingress["from"]
    assert policy["spec"]["egress"][0] == {"to": [peer]}
    reached = [c for c in rendered.components() if selects(peer["podSelector"], rendered.pod(c)["metadata"]["labels"])]
    assert reached == ["enginecore-wide", f"enginecore-wide{WORKER}"]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_workers_reach_names_and_what_models_are_downloaded_from():
    collector = ("tracing.endpoint=collector:4317", "networkPolicy.extra.enginecore.egress[0].ports[0].port=8443")
    (policy,) = policies_of(release(MULTINODE, *collector), f"enginecore{WORKER}")
    ports = [[port["port"] for port in rule["ports"]] for rule in policy["spec"]["egress"] if "ports" in rule]
    assert ports == [[53, 53], [443], [4317], [8443]]


def test_engines_of_one_pod_have_no_policy_for_groups():
    assert len(policies_of(release(MULTINODE), "enginecore-one")) == 1
    assert len(policies_of(release(MULTINODE), "enginecore")) == 2
    names = [policy["metadata"]["name"] for policy in release(MULTINODE).all("NetworkPolicy")]
    assert len(names) == len(set(names)) == 6
    assert not release(MULTINODE, "networkPolicy.enabled=false").all("NetworkPolicy")


def test_all_ranks_of_a_pod_are_reached_at_their_ports():
    rendered = release(GROUPS)
    assert rules(rendered, "enginecore", "ingress") == {
        (50052, 50053): [pods("frontend")],
        (9100, 9101): [namespace("monitoring")],
    }
    assert rules(rendered, "frontend", "egress")[50052, 50053] == [pods("enginecore")]
    assert (9100,) in rules(rendered, "coordinator", "ingress")


def test_the_ranks_of_a_group_reach_each_other_on_any_port_and_those_of_no_other():
    rendered = release(GROUPS)
    for pool in ("enginecore", "enginecore-wide"):
        policy = rendered.one("NetworkPolicy", pool, suffix="-ranks")["spec"]
        own = {"podSelector": policy["podSelector"]}
        assert policy["ingress"] == [{"from": [own]}]
        assert policy["egress"][0] == {"to": [own]}
        wanted = policy["podSelector"]["matchLabels"]
        engines = [c for c in rendered.components() if c.startswith("enginecore")]
        assert [c for c in engines if wanted.items() <= rendered.pod(c)["metadata"]["labels"].items()] == [pool]
    assert not [p for p in release(POOLS, ON).all("NetworkPolicy") if p["metadata"]["name"].endswith("-ranks")]


def test_frontends_reach_hosts_of_media_where_some_are_allowed():
    domains = "frontend.media.allowedDomains={images.example.org}"
    reached = rules(release(HUB, ON, domains), "frontend", "egress")
    assert [peer["ipBlock"]["cidr"] for peer in reached[443, 80] or []] == ["0.0.0.0/0", "::/0"]
    assert all("10.0.0.0/8" in peer["ipBlock"]["except"] for peer in (reached[443, 80] or [])[:1])
    for settings in ((), ("frontend.media.enabled=false",)):
        assert (443, 80) not in rules(release(HUB, ON, *settings), "frontend", "egress")
    assert (443, 80) not in rules(release(HUB, ON, domains), "enginecore", "egress")


def test_hosts_of_media_may_be_named_by_their_addresses():
    settings = (
        "frontend.media.allowedDomains={images.example.org}",
        "networkPolicy.media.to[0].ipBlock.cidr=192.0.2.7/32",
        "networkPolicy.media.ports={8443}",
    )
    reached = rules(release(HUB, ON, *settings), "frontend", "egress")
    assert reached[8443,] == [{"ipBlock": {"cidr": "192.0.2.7/32"}}]
