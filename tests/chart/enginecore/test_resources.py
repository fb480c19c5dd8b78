"""enginecore/_resources.tpl: GPU resources of any name, only in pods that request GPUs."""

import pytest

from tests.chart.rendering import AUTOSCALED, BARE, CLAIMED, DEMO, HUB, release


def test_gpus_are_added_to_requests_and_limits_alike():
    resources = release(AUTOSCALED).container("enginecore")["resources"]
    assert resources == {
        "requests": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 1},
        "limits": {"memory": "32Gi", "nvidia.com/gpu": 1},
    }
    pod = release(AUTOSCALED).pod_spec("enginecore")
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["nodeSelector"] == {"example.com/gpu": "h100"}
    assert release(AUTOSCALED).config("enginecore")["model"]["device"] == "cuda"


def test_another_vendors_resource_can_be_named():
    resources = release(HUB, r"enginecore.gpu.resourceName=amd\.com/gpu").container("enginecore")["resources"]
    assert resources["limits"]["amd.com/gpu"] == 1
    assert "nvidia.com/gpu" not in resources["limits"]


def test_a_claimed_gpu_is_not_asked_of_the_device_plugin_too():
    resources = release(CLAIMED).container("enginecore-large")["resources"]
    assert resources["claims"] == [{"name": "gpu"}]
    assert not [key for part in ("requests", "limits") for key in resources[part] if "nvidia" in key]


@pytest.mark.parametrize("name", [DEMO, BARE])
def test_without_gpus_nothing_asks_for_one(name: str):
    rendered = release(name)
    assert "nvidia" not in str(rendered.manifests)
    assert "runtimeClassName" not in rendered.pod_spec("enginecore")
    assert rendered.config("enginecore")["model"]["device"] == "cpu"


@pytest.mark.parametrize("component", ["frontend", "coordinator"])
def test_only_engines_get_gpus(component: str):
    pod = release(AUTOSCALED).pod_spec(component)
    assert "nvidia" not in str(pod)
    assert "tolerations" not in pod


def test_what_an_engine_asks_for_beside_gpus_is_the_values_own():
    assert release(DEMO).container("enginecore")["resources"] == {
        "requests": {"cpu": "1", "memory": "1Gi"},
        "limits": {"memory": "2Gi"},
    }
    assert release(BARE).container("enginecore")["resources"] == {}
