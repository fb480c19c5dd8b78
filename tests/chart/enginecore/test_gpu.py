"""enginecore/_gpu.tpl: GPUs from a device plugin or a claim, and the selection of GPU nodes."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import AUTOSCALED, BARE, CLAIMED, DEMO, HUB, POOLS, Release, release

GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def test_the_taint_of_the_resource_is_tolerated_where_gpus_are_asked_for():
    assert release(HUB).pod_spec("enginecore")["tolerations"] == [GPU_TAINT]
    own = {"key": "example.com/serving", "operator": "Exists"}
    assert release(POOLS).pod_spec("enginecore")["tolerations"] == [own, GPU_TAINT]
    for name in (DEMO, BARE):
        assert "tolerations" not in release(name).pod_spec("enginecore")


def test_a_toleration_of_ones_own_for_the_same_taint_stands_instead():
    assert release(AUTOSCALED).pod_spec("enginecore")["tolerations"] == [GPU_TAINT]
    value = ("operator=Equal", "key=nvidia.com/gpu", "value=h100", "effect=NoSchedule")
    settings = (f"enginecore.tolerations[0].{part}" for part in value)
    (toleration,) = release(HUB, *settings).pod_spec("enginecore")["tolerations"]
    assert (toleration["operator"], toleration["value"]) == ("Equal", "h100")


def test_slices_lie_on_nodes_that_are_tainted_by_the_name_of_whole_gpus():
    tolerated = [toleration["key"] for toleration in release(CLAIMED).pod_spec("enginecore-slices")["tolerations"]]
    assert tolerated == ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu"]
    assert release(CLAIMED).container("enginecore-slices")["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == 1


def test_a_claim_is_made_for_each_pod_from_the_pools_template():
    rendered = release(CLAIMED)
    pod = rendered.pod_spec("enginecore-large")
    (template,) = rendered.all("ResourceClaimTemplate")
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": template["metadata"]["name"]}]
    assert pod["tolerations"] == [GPU_TAINT]
    assert "resourceClaims" not in rendered.pod_spec("enginecore-slices")
    assert rendered.config("enginecore-large")["model"]["device"] == "cuda"


def test_more_gpus_than_an_engine_computes_on_are_refused():
    with pytest.raises(
        ChartError,
        match=r"enginecore.gpu.count is 8, but an engine uses only 1 GPU.*; to use 8 GPUs, set replicas to 8",
    ):
        release(HUB, "enginecore.gpu.count=8")
    with pytest.raises(ChartError, match=r"enginecore.pools.a.gpu.count is 2,"):
        release(HUB, "enginecore.pools.a.gpu.count=2")
    with pytest.raises(ChartError, match=r"one per worker .*; to use 8 GPUs, set replicas to 4"):
        release(HUB, "enginecore.gpu.count=8", "enginecore.tensorParallelSize=2")


def test_fewer_gpus_than_workers_are_refused():
    with pytest.raises(
        ChartError, match=r"enginecore.gpu.count is 1, but an engine has 4 workers .*; set gpu.count to 4"
    ):
        release(HUB, "enginecore.tensorParallelSize=2", "enginecore.pipelineParallelSize=2")


def test_an_engine_of_several_gpus_has_workers_and_shared_memory_for_each():
    rendered = release(HUB, "enginecore.gpu.count=4", "enginecore.tensorParallelSize=4")
    assert rendered.config("enginecore")["executor"] == {"tensor_parallel_size": 4}
    assert rendered.container("enginecore")["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert shared_memory(rendered) == "4Gi"
    sized = release(HUB, "enginecore.gpu.count=4", "enginecore.tensorParallelSize=4", "enginecore.shmSize=9Gi")
    assert shared_memory(sized) == "9Gi"
    staged = release(
        HUB, "enginecore.gpu.count=6", "enginecore.tensorParallelSize=2", "enginecore.pipelineParallelSize=3"
    )
    assert staged.config("enginecore")["executor"] == {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}


@pytest.mark.parametrize("settings", [(), ("enginecore.gpu.count=0", "enginecore.tensorParallelSize=2")])
def test_one_gpu_and_workers_on_cpus_need_no_shared_memory_of_their_own(settings: tuple[str, ...]):
    assert shared_memory(release(HUB, *settings)) is None


def shared_memory(rendered: Release) -> str | None:
    """Return the size of the engine's /dev/shm."""
    volumes = {volume["name"]: volume for volume in rendered.pod_spec("enginecore")["volumes"]}
    return volumes["shm"]["emptyDir"]["sizeLimit"] if "shm" in volumes else None


@pytest.mark.parametrize("part", ["requests", "limits"])
def test_gpus_are_asked_for_in_one_place(part: str):
    with pytest.raises(
        ChartError, match=rf"enginecore.resources.{part} has nvidia.com/gpu, which the chart sets from gpu.count"
    ):
        release(HUB, rf"enginecore.resources.{part}.nvidia\.com/gpu=1")


def test_claims_need_a_kubernetes_that_has_them():
    with pytest.raises(
        ChartError, match=r"enginecore.pools.large.gpu.dra needs Kubernetes 1.34 or later .*; this is v1.33"
    ):
        release(CLAIMED, kube_version="1.33")


@pytest.mark.parametrize("name", ["gpu", "nvidia.com/", "Nvidia.com/gpu", "nvidia.com/gpu/x"])
def test_a_resource_without_a_domain_is_refused(name: str):
    with pytest.raises(ChartError, match=r"enginecore.gpu.resourceName: Does not match pattern"):
        release(HUB, f"enginecore.gpu.resourceName={name}")
