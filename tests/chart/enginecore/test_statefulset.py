"""enginecore/statefulset.yaml: the ranks of a data-parallel group. Other engines have no StatefulSet."""

from typing import Any

import pytest

from tests.chart.rendering import GROUPS, HUB, release

OWNED_BY_THE_CHART = "coordinator.kubernetes.scale=false"


def ranks(component: str, *settings: str) -> dict[str, Any]:
    found = release(GROUPS, *settings).workload(component)
    assert found["kind"] == "StatefulSet"
    return found


def test_a_pool_is_a_deployment_or_a_group_of_ranks():
    assert release(HUB).all("StatefulSet") == []
    assert [m["metadata"]["name"] for m in release(GROUPS).all("StatefulSet")] == [
        "demo-penstock-enginecore",
        "demo-penstock-enginecore-wide",
    ]
    assert [d for d in release(GROUPS).all("Deployment") if "enginecore" in d["metadata"]["name"]] == []


def test_pods_are_as_many_as_the_ranks_fill():
    for owner in ((), (OWNED_BY_THE_CHART,)):  # the chart's number of replicas is only the initial number
        assert [ranks(pool, *owner)["spec"]["replicas"] for pool in ("enginecore", "enginecore-wide")] == [4, 4]
    assert ranks("enginecore-wide", "enginecore.pools.wide.dataParallel.ranksPerPod=4")["spec"]["replicas"] == 2


def test_ranks_start_together_and_are_replaced_one_after_the_other():
    spec = ranks("enginecore")["spec"]
    assert (spec["podManagementPolicy"], spec["updateStrategy"]) == ("Parallel", {"type": "RollingUpdate"})
    assert "progressDeadlineSeconds" not in spec


def test_its_service_is_the_one_without_an_address_of_its_own():
    rendered = release(GROUPS)
    for pool in ("enginecore", "enginecore-wide"):
        service = rendered.one("Service", pool, suffix="-headless")
        assert rendered.workload(pool)["spec"]["serviceName"] == service["metadata"]["name"]
        assert service["spec"]["clusterIP"] == "None"


def test_it_selects_the_pods_of_its_own_pool_alone():
    for name, settings in ((GROUPS, ()), (HUB, ("enginecore.dataParallel.size=2",))):
        rendered = release(name, *settings)
        selector = rendered.workload("enginecore")["spec"]["selector"]["matchLabels"].items()
        engines = [c for c in rendered.components() if c.startswith("enginecore")]
        assert [c for c in engines if selector <= rendered.pod(c)["metadata"]["labels"].items()] == ["enginecore"]


def test_pods_are_spread_among_those_of_their_revision():
    (spread,) = release(GROUPS).pod_spec("enginecore")["topologySpreadConstraints"]
    assert spread["matchLabelKeys"] == ["controller-revision-hash"]


@pytest.mark.parametrize(
    ("setting", "replaces"),
    [
        ("dataParallel.size=6", False),
        ("dataParallel.minSize=3", True),
        ("dataParallel.onRankLoss=wait", True),
        ("config.expert_parallel.slots=9", True),
    ],
)
def test_another_size_replaces_no_pod(setting: str, replaces: bool):
    before, after = (
        release(GROUPS, *given).pod("enginecore")["metadata"]["annotations"]["checksum/config"]
        for given in ((), (f"enginecore.{setting}",))
    )
    assert (before != after) is replaces
