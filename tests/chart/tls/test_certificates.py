"""tls/certificates.yaml: cert-manager issues certificates for the services' names, in the Secrets that pods mount."""

from pathlib import Path

import pytest

from penstock_common.config.sections import PeersConfig, TlsConfig
from penstock_frontend.config import FrontendConfig
from tests.chart.rendering import EXPOSED, HUB, POOLS, SERVICES, load, release

ISSUER = "tls.certManager.issuerRef.name=penstock"


def test_without_an_issuer_there_are_none():
    assert not release(HUB).all("Certificate")


@pytest.mark.parametrize("component", SERVICES)
def test_a_service_is_known_by_its_role_as_server_and_as_client(component: str):
    spec = release(HUB, ISSUER).one("Certificate", component)["spec"]
    assert spec["dnsNames"] == [f"penstock-{component}"]
    assert {"server auth", "client auth"} <= set(spec["usages"])
    assert spec["issuerRef"] == {"name": "penstock", "kind": "Issuer", "group": "cert-manager.io"}
    assert (spec["duration"], spec["renewBefore"]) == ("2160h", "720h")
    assert spec["privateKey"]["rotationPolicy"] == "Always"


def test_the_names_are_those_that_peers_are_let_in_by():
    rendered = release(HUB, ISSUER, "tls.certManager.operator=true")
    issued = {name for certificate in rendered.all("Certificate") for name in certificate["spec"]["dnsNames"]}
    peers = PeersConfig()
    assert {*peers.frontends, *peers.engines, *peers.operators} <= issued
    assert rendered.config("frontend")["engine_tls"]["server_name"] in issued
    assert rendered.config("enginecore")["coordinator"]["tls"]["server_name"] in issued


@pytest.mark.parametrize("component", SERVICES)
def test_pods_mount_what_is_issued_and_speak_tls_with_it(component: str, tmp_path: Path):
    rendered = release(HUB, ISSUER)
    issued = rendered.one("Certificate", component)["spec"]["secretName"]
    assert rendered.volumes(component)["tls"]["secret"]["secretName"] == issued == f"demo-penstock-{component}-tls"
    config = load(rendered, component, tmp_path)
    if component == "frontend":
        assert config.engine_tls.enabled
    else:
        assert config.server.tls.ca == "/etc/penstock-tls/ca.crt"
        assert rendered.container(component)["livenessProbe"]["grpc"]["port"] == 50049


def test_all_pools_show_the_same():
    rendered = release(POOLS, ISSUER)
    engines = [component for component in rendered.components() if component.startswith("enginecore")]
    mounted = {rendered.volumes(component)["tls"]["secret"]["secretName"] for component in engines}
    assert (len(engines) > 1, mounted) == (True, {"demo-penstock-enginecore-tls"})


def test_operators_get_one_where_it_is_asked_for():
    assert not [c for c in release(HUB, ISSUER).all("Certificate") if "operator" in c["metadata"]["name"]]
    assert release(EXPOSED).one("Certificate", "operator")["spec"]["dnsNames"] == ["penstock-operator"]


def test_the_edge_has_an_issuer_and_names_of_its_own(tmp_path: Path):
    rendered = release(EXPOSED)
    spec = rendered.one("Certificate", "edge")["spec"]
    assert spec["dnsNames"] == ["llm.example.org", "grpc.example.org"]
    assert spec["issuerRef"]["name"] == "public"
    assert "client auth" not in spec["usages"]
    assert rendered.volumes("frontend")["edge"]["secret"]["secretName"] == spec["secretName"]
    config = load(rendered, "frontend", tmp_path)
    assert isinstance(config, FrontendConfig)
    own = TlsConfig(certificate="/etc/penstock-edge/tls.crt", key="/etc/penstock-edge/tls.key")
    assert (config.server.tls, config.http.tls) == (own, own)
    assert not [c for c in release(HUB, ISSUER).all("Certificate") if c["metadata"]["name"].endswith("-edge")]


def test_keda_has_a_certificate_and_knows_the_coordinator_by_its_address():
    issuer = "tls.certManager.issuerRef.name=internal"
    rendered = release(HUB, issuer, "enginecore.autoscaling.mode=keda")
    scaler = rendered.one("Certificate", "scaler")["spec"]
    assert scaler["dnsNames"] == ["penstock-scaler"]
    [authentication] = rendered.all("TriggerAuthentication")
    assert {ref["name"] for ref in authentication["spec"]["secretTargetRef"]} == {scaler["secretName"]}
    [trigger] = rendered.one("ScaledObject", "enginecore")["spec"]["triggers"]
    host = trigger["metadata"]["scalerAddress"].partition(":")[0]
    assert rendered.one("Certificate", "coordinator")["spec"]["dnsNames"] == ["penstock-coordinator", host]
    without = release(HUB, issuer)
    assert without.one("Certificate", "coordinator")["spec"]["dnsNames"] == ["penstock-coordinator"]
    assert [c for c in without.all("Certificate") if c["metadata"]["name"].endswith("-scaler")] == []
