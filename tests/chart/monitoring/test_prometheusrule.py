"""monitoring/prometheusrule.yaml: the rules of the release and the values that change them; rendered only if enabled."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import HUB, Release, release

ON = "metrics.prometheusRule.enabled=true"


def rules(*settings: str) -> dict[str, dict]:
    """Return the alerts and the recording rules by name."""
    return rules_of(release(HUB, ON, *settings))


def rules_of(rendered: Release) -> dict[str, dict]:
    (manifest,) = rendered.all("PrometheusRule")
    found = [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]
    named = {rule.get("alert") or rule["record"]: rule for rule in found}
    assert len(named) == len(found)
    return named


def test_nothing_is_there_unless_it_is_asked_for():
    assert release(HUB).all("PrometheusRule") == []


def test_every_rule_reads_the_release_alone():
    for name, rule in rules().items():
        selectors = rule["expr"].count("{")
        assert selectors == rule["expr"].count('{namespace="serving",release="demo"'), name


def test_every_alert_says_where_it_is_and_what_to_do():
    for name, rule in rules().items():
        if "alert" not in rule:
            continue
        labels, annotations = rule["labels"], rule["annotations"]
        assert (labels["namespace"], labels["release"]) == ("serving", "demo"), name
        assert labels["severity"] in ("critical", "warning"), name
        assert "kubectl -n serving" in annotations["description"], name
        assert "demo" in annotations["summary"] or "$labels.pod" in annotations["summary"], name


def test_alerts_can_be_left_out_by_name():
    assert rules().keys() - rules("metrics.prometheusRule.disabled={PenstockTokensSlow}").keys() == {
        "PenstockTokensSlow"
    }
    with pytest.raises(
        ChartError, match=r"metrics\.prometheusRule\.disabled has PenstockSlow, which is no alert; the alerts are"
    ):
        rules("metrics.prometheusRule.disabled={PenstockSlow}")


def test_labels_are_added_for_prometheus_and_for_alertmanager():
    settings = ("metrics.prometheusRule.labels.team=llm", "metrics.prometheusRule.alertLabels.severity=page")
    (manifest,) = release(HUB, ON, *settings).all("PrometheusRule")
    assert manifest["metadata"]["labels"]["team"] == "llm"
    assert {rule["labels"]["severity"] for rule in rules(*settings).values() if "alert" in rule} == {"page"}
    assert "labels" not in rules(*settings)["pool:penstock_load:avg"]
