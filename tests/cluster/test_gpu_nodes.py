"""Engines on GPU nodes. A device plugin offers the GPUs, and a taint reserves the nodes for engines."""

import json
import re

import pytest

from tests.cluster.conftest import NewRelease
from tests.cluster.gpus import VARIABLE
from tests.cluster.release import HelmError, Release
from tests.cluster.system.cluster import GPU_NODE, Cluster
from tests.cluster.system.programs import until
from tests.cluster.values import merged, oracle

GPU_NODE_NAME = f"node-{GPU_NODE}"


def with_gpus(**changes: object) -> dict[str, object]:
    """Return values with two engines of one GPU each. Together, they use all GPUs."""
    return oracle({"enginecore": merged({"gpu": {"count": 1}, "replicas": 2}, changes)})


def nodes_of(release: Release, component: str) -> set[str]:
    """Return the nodes of a component's pods."""
    return {pod["spec"]["nodeName"] for pod in release.pods(component) if "nodeName" in pod["spec"]}


def gpus_of(release: Release, resource: str = "nvidia.com/gpu") -> list[str]:
    """Return the devices of each engine."""
    names = [pod["metadata"]["name"] for pod in release.pods("enginecore")]
    devices = [release.kubectl("exec", name, "--", "printenv", VARIABLE).strip() for name in names]
    assert all(device.startswith(resource.replace("/", "-")) for device in devices)
    return devices


def test_engines_land_on_the_node_with_gpus_and_share_none(new_release: NewRelease) -> None:
    release = new_release()
    release.install(with_gpus())
    assert nodes_of(release, "enginecore") == {GPU_NODE_NAME}
    assert GPU_NODE_NAME not in nodes_of(release, "frontend") | nodes_of(release, "coordinator")
    assert len(set(gpus_of(release))) == 2


def test_an_engine_without_a_gpu_waits_with_the_reason(new_release: NewRelease) -> None:
    release = new_release()
    # helm waits for all engines except the number that a rollout may make unavailable, which is one.
    with pytest.raises(HelmError, match="Insufficient nvidia.com/gpu"):
        release.install(with_gpus(replicas=4), "--timeout", "30s")
    assert len(release.ready("enginecore")) == 2


def test_a_rollout_needs_no_spare_gpu(new_release: NewRelease) -> None:
    release = new_release()
    release.install(with_gpus())
    before = {pod["metadata"]["name"] for pod in release.pods("enginecore")}
    release.upgrade(with_gpus(config={"scheduler": {"max_num_seqs": 7}}))
    release.kubectl("rollout", "status", f"deployment/{release.fullname}-enginecore", "--timeout=180s")
    assert len(release.ready("enginecore")) == 2
    assert before.isdisjoint(release.ready("enginecore"))


def test_parts_of_gpus_are_asked_for_by_their_name(new_release: NewRelease) -> None:
    release = new_release()
    release.install(with_gpus(gpu={"count": 1, "resourceName": "nvidia.com/mig-1g.10gb"}))
    assert nodes_of(release, "enginecore") == {GPU_NODE_NAME}
    assert len(set(gpus_of(release, "nvidia.com/mig-1g.10gb"))) == 2


DEVICE_CLASS = """
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: gpu.example.com}
spec: {selectors: [{cel: {expression: device.driver == 'gpu.example.com'}}]}
"""


@pytest.fixture(scope="module")
def claimed(cluster: Cluster) -> dict[str, object]:
    """Return values for engines that claim their GPU from a resource driver. The driver has two GPUs on the node."""
    cluster.control_plane.apply(DEVICE_CLASS)
    cluster.nodes[GPU_NODE - 1].offer_claims(2)
    until("the driver's devices", lambda: GPU_NODE_NAME in cluster.kubectl("get", "resourceslices", "-o", "yaml"))
    selector = "device.attributes['gpu.example.com'].model == 'LATEST-GPU-MODEL'"
    return {"gpu": {"count": 1, "dra": {"deviceClassName": "gpu.example.com", "selectors": [selector]}}}


def claims_of(release: Release) -> list[str]:
    """Return the devices that the driver gave to each engine's container."""
    names = [pod["metadata"]["name"] for pod in release.pods("enginecore")]
    variables = [release.kubectl("exec", name, "--", "printenv") for name in names]
    return [device for each in variables for device in re.findall(r"^GPU_DEVICE_\d+=(.*)$", each, flags=re.MULTILINE)]


def test_claims_are_allocated_and_shared_by_none(new_release: NewRelease, claimed: dict[str, object]) -> None:
    release = new_release()
    release.install(with_gpus(**claimed))
    assert nodes_of(release, "enginecore") == {GPU_NODE_NAME}
    assert sorted(claims_of(release)) == ["gpu-0", "gpu-1"]
    claims = json.loads(release.kubectl("get", "resourceclaims", "-o", "json"))["items"]
    assert [len(claim["status"]["reservedFor"]) for claim in claims] == [1, 1]


def test_an_engine_whose_claim_cannot_be_met_waits_with_the_reason(
    new_release: NewRelease, claimed: dict[str, object]
) -> None:
    release = new_release()
    with pytest.raises(HelmError, match="cannot allocate all claims"):
        release.install(with_gpus(**claimed, replicas=4), "--timeout", "30s")
    assert len(release.ready("enginecore")) == 2


def test_the_node_offers_what_it_has(new_release: NewRelease) -> None:
    node = json.loads(new_release().cluster.kubectl("get", "node", GPU_NODE_NAME, "-o", "json"))
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "2"
