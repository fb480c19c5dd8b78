"""enginecore/hpa.yaml: the engines' autoscaler, which is rendered only if enabled."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import AUTOSCALED, BARE, HUB, MULTINODE, POOLS, release

HPA = "enginecore.autoscaling.mode=hpa"


def test_engines_are_scaled_by_their_load_and_their_kv_cache():
    spec = release(AUTOSCALED).one("HorizontalPodAutoscaler", "enginecore")["spec"]
    deployment = release(AUTOSCALED).one("Deployment", "enginecore")
    assert spec["scaleTargetRef"] == {
        "apiVersion": deployment["apiVersion"],
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 16)
    targets = {m["pods"]["metric"]["name"]: m["pods"]["target"] for m in spec["metrics"]}
    assert targets == {
        "penstock_load": {"type": "AverageValue", "averageValue": "0.7"},
        "vllm_kv_cache_usage_perc": {"type": "AverageValue", "averageValue": "0.8"},
    }
    assert spec["behavior"]["scaleUp"]["stabilizationWindowSeconds"] == 0
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300


def test_external_metrics_are_those_of_the_pool():
    rendered = release(
        POOLS,
        "enginecore.pools.spot.autoscaling.mode=hpa",
        "enginecore.pools.spot.autoscaling.hpa.metrics=External",
        "enginecore.pools.spot.autoscaling.hpa.loadMetric=penstock_coordinator_pool_load",
        "enginecore.pools.spot.autoscaling.hpa.selector.service=demo",
    )
    [hpa] = rendered.all("HorizontalPodAutoscaler")
    load = hpa["spec"]["metrics"][0]["external"]
    assert load["metric"] == {
        "name": "penstock_coordinator_pool_load",
        "selector": {"matchLabels": {"pool": "spot", "service": "demo"}},
    }
    assert load["target"] == {"type": "AverageValue", "averageValue": "0.8"}


def test_the_autoscaler_and_the_chart_do_not_both_set_the_number_of_engines():
    deployment = release(AUTOSCALED).one("Deployment", "enginecore")
    assert "replicas" not in deployment["spec"]
    assert deployment["metadata"]["annotations"] == {"penstock.io/replicas": "autoscaler"}


def test_without_autoscaling_the_chart_sets_the_number_of_engines():
    assert release(HUB).all("HorizontalPodAutoscaler") == []
    deployment = release(HUB).one("Deployment", "enginecore")
    assert deployment["spec"]["replicas"] == 1
    assert "annotations" not in deployment["metadata"]
    assert release(BARE).one("Deployment", "enginecore")["spec"]["replicas"] == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ((HPA, "enginecore.autoscaling.minReplicas=0"), "with hpa.metrics: Pods it must be at least 1"),
        (
            (HPA, "enginecore.autoscaling.minReplicas=0", "enginecore.autoscaling.hpa.metrics=External"),
            "scales to 0 only from Kubernetes 1.37, and this is v?1.3",
        ),
        ((HPA, "enginecore.autoscaling.targetLoad=null"), "autoscaling.targetLoad is required"),
        ((HPA, "enginecore.autoscaling.targetKvUsage=null"), "autoscaling.targetKvUsage is required"),
        (("enginecore.autoscaling.enabled=true",), "autoscaling.enabled was removed: .* use mode: hpa"),
        (("enginecore.autoscaling.metricName=x",), "autoscaling.metricName was removed: .* use hpa.loadMetric"),
    ],
)
def test_invalid_values_are_refused(settings: tuple[str, ...], text: str):
    with pytest.raises(ChartError, match=text):
        release(HUB, *settings, kube_version="1.36.0")


def test_an_autoscaler_goes_to_zero_where_kubernetes_can():
    rendered = release(
        HUB,
        HPA,
        "enginecore.autoscaling.minReplicas=0",
        "enginecore.autoscaling.hpa.metrics=External",
        kube_version="1.37.0",
    )
    assert rendered.one("HorizontalPodAutoscaler", "enginecore")["spec"]["minReplicas"] == 0
    assert rendered.config("frontend")["engine_wait_timeout"] == 1800


def test_a_wait_that_the_user_has_set_stays():
    rendered = release(
        HUB,
        "enginecore.autoscaling.mode=keda",
        "enginecore.autoscaling.minReplicas=0",
        "frontend.config.engine_wait_timeout=60",
    )
    assert rendered.config("frontend")["engine_wait_timeout"] == 60
    assert "engine_wait_timeout" not in release(AUTOSCALED).config("frontend")


def test_engines_of_several_pods_are_counted_by_their_group():
    rendered = release(MULTINODE)
    spec = rendered.one("HorizontalPodAutoscaler", "enginecore")["spec"]
    workload = rendered.workload("enginecore")
    assert spec["scaleTargetRef"] == {
        "apiVersion": workload["apiVersion"],
        "kind": "LeaderWorkerSet",
        "name": workload["metadata"]["name"],
    }
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 4)
