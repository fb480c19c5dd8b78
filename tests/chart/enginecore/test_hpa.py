"""enginecore/hpa.yaml: the autoscaler where it is asked for, and no trace of it where it is not."""

from tests.chart.rendering import AUTOSCALED, BARE, HUB, release


def test_autoscaling_scales_on_waiting_requests_per_engine():
    spec = release(AUTOSCALED).one("HorizontalPodAutoscaler", "enginecore")["spec"]
    deployment = release(AUTOSCALED).one("Deployment", "enginecore")
    assert spec["scaleTargetRef"] == {
        "apiVersion": deployment["apiVersion"],
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 16)
    assert spec["metrics"] == [
        {
            "type": "Pods",
            "pods": {
                "metric": {"name": "vllm_num_requests_waiting"},
                "target": {"type": "AverageValue", "averageValue": "8"},
            },
        }
    ]


def test_the_autoscaler_and_the_chart_do_not_both_set_the_number_of_engines():
    assert "replicas" not in release(AUTOSCALED).one("Deployment", "enginecore")["spec"]


def test_without_autoscaling_the_chart_sets_the_number_of_engines():
    assert release(HUB).all("HorizontalPodAutoscaler") == []
    assert release(HUB).one("Deployment", "enginecore")["spec"]["replicas"] == 1
    assert release(BARE).one("Deployment", "enginecore")["spec"]["replicas"] == 0
