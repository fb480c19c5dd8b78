"""frontend/hpa.yaml: the frontends' autoscaler, which is rendered only if enabled."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import AUTOSCALED, HUB, release


def test_frontends_are_scaled_by_their_own_cpu():
    spec = release(AUTOSCALED).one("HorizontalPodAutoscaler", "frontend")["spec"]
    deployment = release(AUTOSCALED).one("Deployment", "frontend")
    assert spec["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 12)
    (metric,) = spec["metrics"]
    container = release(AUTOSCALED).container("frontend")
    assert metric["containerResource"]["container"] == container["name"]
    assert metric["containerResource"]["target"] == {"type": "Utilization", "averageUtilization": 70}
    assert "cpu" in container["resources"]["requests"]


def test_they_come_at_once_and_go_one_by_one():
    behavior = release(AUTOSCALED).one("HorizontalPodAutoscaler", "frontend")["spec"]["behavior"]
    assert behavior["scaleUp"] == {"stabilizationWindowSeconds": 0}
    assert behavior["scaleDown"] == {
        "stabilizationWindowSeconds": 300,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
    }


def test_without_it_the_chart_sets_the_number():
    assert not release(HUB).all("HorizontalPodAutoscaler")
    assert release(HUB).one("Deployment", "frontend")["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("minReplicas=13", "frontend.autoscaling.minReplicas is 13; it must not exceed maxReplicas = 12"),
        ("minReplicas=0", "frontend.autoscaling.minReplicas: Must be greater than or equal to 1"),
        ("targetCPUUtilization=1", "Additional property targetCPUUtilization is not allowed"),
    ],
)
def test_meaningless_values_are_refused(setting: str, message: str):
    with pytest.raises(ChartError, match=message):
        release(AUTOSCALED, f"frontend.autoscaling.{setting}")


def test_cpu_that_nobody_requests_cannot_be_a_target():
    with pytest.raises(ChartError, match=r"frontend.autoscaling.enabled is true, but frontend.resources.requests.cpu"):
        release(AUTOSCALED, "frontend.resources.requests.cpu=null")
