"""edge/backendtlspolicy.yaml: how gateways verify the frontends' certificate."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import EXPOSED, HUB, release

ON = ("frontend.backendTLSPolicy.enabled=true", "frontend.backendTLSPolicy.hostname=llm.example.org")
EDGE = "frontend.edge.tlsSecretName=edge"


def test_without_the_value_there_is_none():
    assert not release(HUB, EDGE).all("BackendTLSPolicy")


def test_the_service_is_asked_for_the_name_under_an_authority_of_the_system():
    spec = release(EXPOSED).one("BackendTLSPolicy", "frontend")["spec"]
    service = release(EXPOSED).one("Service", "frontend")
    assert spec["targetRefs"] == [{"group": "", "kind": "Service", "name": service["metadata"]["name"]}]
    assert spec["validation"] == {"hostname": "llm.example.org", "wellKnownCACertificates": "System"}


def test_an_authority_of_ones_own_takes_its_place():
    spec = release(HUB, EDGE, *ON, "frontend.backendTLSPolicy.caConfigMaps={ca}").one("BackendTLSPolicy", "frontend")[
        "spec"
    ]
    assert spec["validation"] == {
        "hostname": "llm.example.org",
        "caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "ca"}],
    }


def test_it_needs_a_certificate_and_a_name():
    with pytest.raises(
        ChartError, match="frontend.backendTLSPolicy.enabled is true, but frontends have no certificate"
    ):
        release(HUB, *ON)
    with pytest.raises(ChartError, match="frontend.backendTLSPolicy.hostname is required"):
        release(HUB, EDGE, ON[0])
