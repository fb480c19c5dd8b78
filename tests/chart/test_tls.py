"""Certificates, keys and key sets from Secrets are in both the pods and the config files, or in neither."""

from pathlib import Path

import pytest

from charts import lint
from penstock_common.config.sections import ClientTlsConfig, TlsConfig
from penstock_common.config.settings import settings_of
from penstock_frontend.config import FrontendConfig
from tests.chart.rendering import HUB, SERVICES, load, release

BETWEEN = tuple(f"{component}.tls.secretName=of-{component}" for component in SERVICES)
EDGE = (
    "frontend.edge.tlsSecretName=edge-cert",
    "frontend.edge.apiKeysSecretName=keys",
    "frontend.edge.jwksSecretName=idp",
    "frontend.config.auth.jwt.issuer=https://issuer.test",
    "frontend.config.auth.jwt.audience=penstock",
)
OWN = {"ca": "/etc/penstock-tls/ca.crt", "certificate": "/etc/penstock-tls/tls.crt", "key": "/etc/penstock-tls/tls.key"}


@pytest.mark.parametrize("component", SERVICES)
def test_without_secrets_there_is_no_tls_and_nothing_is_mounted(component: str, tmp_path: Path):
    rendered = release(HUB)
    config = load(rendered, component, tmp_path)
    assert not any(getattr(config, name).tls.enabled for name in ("server", "coordinator") if hasattr(config, name))
    assert not {"tls", "edge", "keys", "jwks"} & rendered.volumes(component).keys()
    assert rendered.container(component)["livenessProbe"]["grpc"]["port"] != 50049


@pytest.mark.parametrize("component", SERVICES)
def test_services_show_each_other_the_certificates_of_their_secrets(component: str, tmp_path: Path):
    rendered = release(HUB, *BETWEEN)
    config = load(rendered, component, tmp_path)
    assert rendered.volumes(component)["tls"]["secret"]["secretName"] == f"of-{component}"
    # With subPath, the pod would never get a new certificate.
    assert "subPath" not in rendered.mounts(component)["/etc/penstock-tls"]
    if component == "frontend":
        assert isinstance(config, FrontendConfig)
        assert config.engine_tls == ClientTlsConfig(**OWN, server_name="penstock-enginecore")
        assert not config.server.tls.enabled
    else:
        assert config.server.tls == TlsConfig(**OWN)
        assert rendered.container(component)["readinessProbe"]["grpc"]["port"] == config.server.health_port == 50049
    if component != "coordinator":
        assert config.coordinator.tls == ClientTlsConfig(**OWN, server_name="penstock-coordinator")


def test_clients_meet_the_edges_certificate_and_are_asked_for_keys_and_tokens(tmp_path: Path):
    rendered = release(HUB, *EDGE)
    config = load(rendered, "frontend", tmp_path)
    assert isinstance(config, FrontendConfig)
    own = TlsConfig(certificate="/etc/penstock-edge/tls.crt", key="/etc/penstock-edge/tls.key")
    assert (config.server.tls, config.http.tls) == (own, own)
    assert (config.auth.api_keys, config.auth.jwt.jwks) == (
        "/etc/penstock-keys/api-keys",
        "/etc/penstock-jwks/jwks.json",
    )
    mounted = {
        name: volume["secret"]["secretName"]
        for name, volume in rendered.volumes("frontend").items()
        if "secret" in volume
    }
    assert mounted == {"edge": "edge-cert", "keys": "keys", "jwks": "idp"}
    assert rendered.container("frontend")["livenessProbe"]["grpc"]["port"] == config.server.health_port == 50049


def test_certificates_for_some_of_the_services_are_refused():
    with pytest.raises(
        lint.ChartError, match=r"tls.secretName must be set for all of frontend, enginecore and coordinator"
    ):
        release(HUB, *BETWEEN[:2])


def test_every_tls_setting_of_a_service_is_one_that_the_chart_knows():
    keys = {setting.key for setting in settings_of(FrontendConfig)}
    hops = {key.rpartition(".")[0] for key in keys if key.endswith(".certificate")}
    of_several_on_one_machine = {"metrics.tls"}
    assert hops - of_several_on_one_machine == {"server.tls", "admin.tls", "http.tls", "engine_tls", "coordinator.tls"}


@pytest.mark.parametrize("component", SERVICES)
@pytest.mark.parametrize("secured", [False, True])
def test_services_say_what_proxies_are_to_speak_to_them(component: str, secured: bool):
    rendered = release(HUB, *(BETWEEN + EDGE if secured else ()))
    services = [s for s in rendered.all("Service") if s["spec"]["selector"]["app.kubernetes.io/component"] == component]
    expected = {"grpc": "https" if secured else "kubernetes.io/h2c", "http": "https" if secured else "http"}
    told = {(port["name"], port["appProtocol"]) for s in services for port in s["spec"]["ports"]}
    assert told == {(name, expected[name]) for name, _ in told}


def test_metrics_behind_a_certificate_are_scraped_by_https():
    def scheme(component: str, *settings: str) -> str | None:
        return release(HUB, *settings).pod(component)["metadata"]["annotations"].get("prometheus.io/scheme")

    assert [scheme(component) for component in SERVICES] == [None] * 3
    assert [scheme(component, *BETWEEN, *EDGE) for component in SERVICES] == ["https", None, None]
