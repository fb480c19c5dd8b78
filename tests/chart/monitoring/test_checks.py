"""monitoring/_checks.tpl: contradictory values are refused, and the error names them."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import HUB, release


@pytest.mark.parametrize("what", ["podMonitor", "prometheusRule", "dashboard"])
def test_monitoring_without_metrics_is_refused(what: str):
    with pytest.raises(ChartError, match=rf"metrics\.{what}\.enabled is true, but metrics\.enabled is false"):
        release(HUB, "metrics.enabled=false", f"metrics.{what}.enabled=true")


def test_scraping_over_tls_needs_to_know_what_to_check():
    with pytest.raises(
        ChartError, match=r"metrics\.podMonitor\.tlsConfig is empty, but frontends serve /metrics over TLS"
    ):
        release(HUB, "metrics.podMonitor.enabled=true", "frontend.edge.tlsSecretName=edge")


def test_scraping_with_credentials_needs_them():
    with pytest.raises(
        ChartError, match=r"metrics\.podMonitor\.authorization is empty, but frontend\.config\.auth\.metrics"
    ):
        release(HUB, "metrics.podMonitor.enabled=true", "frontend.config.auth.metrics=true")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("metrics.podMonitor.interval=often", "metrics.podMonitor.interval: Does not match pattern"),
        ("metrics.podMonitor.enable=true", "metrics.podMonitor: Additional property enable is not allowed"),
        ("metrics.prometheusRule.errorRatio=5", "metrics.prometheusRule.errorRatio: Must be less than or equal to 1"),
        ("metrics.prometheusRule.alertLabels.release=x", "metrics.prometheusRule.alertLabels"),
    ],
)
def test_wrong_values_are_refused(setting: str, message: str):
    with pytest.raises(ChartError) as caught:
        release(HUB, setting)
    assert message in str(caught.value)
