"""enginecore/resourceclaimtemplate.yaml: the devices that a pool's pods claim, if claims are enabled."""

from tests.chart.rendering import AUTOSCALED, CLAIMED, HUB, release


def test_a_pool_claims_devices_of_its_class_that_its_expressions_select():
    (template,) = release(CLAIMED).all("ResourceClaimTemplate")
    assert template["apiVersion"] == "resource.k8s.io/v1"
    assert template["metadata"]["labels"]["penstock.io/pool"] == "large"
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request == {
        "name": "gpu",
        "exactly": {
            "deviceClassName": "gpu.nvidia.com",
            "allocationMode": "ExactCount",
            "count": 1,
            "selectors": [
                {"cel": {"expression": 'device.attributes["gpu.nvidia.com"].productName == "NVIDIA H200"'}},
                {"cel": {"expression": 'device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("100Gi")) >= 0'}},
            ],
        },
    }


def test_another_request_is_another_template_since_none_can_be_changed():
    def name(*settings: str) -> str:
        return release(CLAIMED, *settings).all("ResourceClaimTemplate")[0]["metadata"]["name"]

    assert name("enginecore.replicas=3") == name()
    assert name("enginecore.pools.large.gpu.dra.selectors[0]=device.allowMultipleAllocations") != name()


def test_every_device_of_the_class_will_do_where_nothing_is_selected():
    (template,) = release(HUB, "enginecore.gpu.dra.deviceClassName=gpu.example.com", kube_version="1.34").all(
        "ResourceClaimTemplate"
    )
    assert "selectors" not in template["spec"]["spec"]["devices"]["requests"][0]["exactly"]


def test_nothing_is_claimed_without_a_class_or_without_gpus():
    for name in (HUB, AUTOSCALED):
        assert not release(name).all("ResourceClaimTemplate")
    cpu = release(CLAIMED, "enginecore.pools.cpu.gpu.count=0")
    assert not [t for t in cpu.all("ResourceClaimTemplate") if "-cpu-" in t["metadata"]["name"]]
    assert "resourceClaims" not in cpu.pod_spec("enginecore-cpu")
