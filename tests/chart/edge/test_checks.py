"""edge/_checks.tpl: certificates have one source, and either all services have certificates or none."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import EXPOSED, HUB, SERVICES, release

ISSUER, EDGE_ISSUER = "tls.certManager.issuerRef.name=penstock", "frontend.edge.certManager.issuerRef.name=public"


@pytest.mark.parametrize("component", SERVICES)
def test_certificates_from_an_issuer_and_from_a_secret_are_refused(component: str):
    with pytest.raises(
        ChartError, match=rf"{component}.tls.secretName and tls.certManager.issuerRef.name are both set"
    ):
        release(HUB, ISSUER, f"{component}.tls.secretName=own")


def test_an_edge_with_two_certificates_or_one_for_no_name_is_refused():
    with pytest.raises(ChartError, match="frontend.edge.certManager.issuerRef.name are both set"):
        release(HUB, EDGE_ISSUER, "frontend.edge.tlsSecretName=own")
    with pytest.raises(ChartError, match=r"frontend.edge.certManager.dnsNames is required; .* \[llm.example.org\]"):
        release(HUB, EDGE_ISSUER)


def test_everything_together_is_fine():
    assert release(EXPOSED).manifests
