"""enginecore/leaderworkerset.yaml: groups of pods for engines with several pods. Other engines have no groups."""

import copy
from typing import Any

import pytest

from charts import leader_worker_set, lint
from charts.lint import ChartError
from tests.chart.rendering import HUB, MULTINODE, release


def groups(component: str, *settings: str) -> dict[str, Any]:
    found = release(MULTINODE, *settings).workload(component)
    assert found["kind"] == "LeaderWorkerSet"
    return found


def test_an_engine_is_a_deployments_pod_or_a_group():
    assert release(HUB).all("LeaderWorkerSet") == []
    deployments = [m["metadata"]["name"] for m in release(MULTINODE).all("Deployment")]
    assert [name for name in deployments if "enginecore" in name] == ["demo-penstock-enginecore-one"]
    names = [m["metadata"]["name"] for m in release(MULTINODE).all("LeaderWorkerSet")]
    assert names == ["demo-penstock-enginecore", "demo-penstock-enginecore-wide"]


def test_replicas_are_engines_and_the_size_is_that_of_each():
    spec = groups("enginecore-wide", "enginecore.pools.wide.replicas=3")["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 4)


def test_where_an_autoscaler_owns_the_number_there_is_none():
    autoscaled = groups("enginecore")
    assert "replicas" not in autoscaled["spec"]
    assert autoscaled["metadata"]["annotations"] == {"penstock.io/replicas": "autoscaler"}


def test_a_group_starts_and_ends_as_one():
    spec = groups("enginecore")["spec"]
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["networkConfig"] == {"subdomainPolicy": "Shared"}


def test_a_group_lies_in_one_domain_of_its_own_where_that_is_asked_for():
    asked = groups("enginecore", "enginecore.multiNode.topologyKey=example.com/rack")
    key = "leaderworkerset.sigs.k8s.io/exclusive-topology"
    assert asked["metadata"]["annotations"] == {"penstock.io/replicas": "autoscaler", key: "example.com/rack"}
    assert key not in groups("enginecore")["metadata"]["annotations"]
    pods = asked["spec"]["leaderWorkerTemplate"]
    assert key not in str([pods["leaderTemplate"], pods["workerTemplate"]])  # the controller sets this variable


@pytest.mark.parametrize(
    ("replicas", "given", "expected"),
    [
        (1, (), {"maxSurge": 1, "maxUnavailable": 0}),
        (2, (), {"maxSurge": 0, "maxUnavailable": 1}),
        (2, ("gpu.count=0",), {"maxSurge": 1, "maxUnavailable": 0}),
        (4, ("rollingUpdate.maxSurge=1",), {"maxSurge": 1, "maxUnavailable": 0}),
    ],
)
def test_engines_are_replaced_as_those_of_one_pod_are(replicas: int, given: tuple[str, ...], expected: dict[str, int]):
    settings = [
        f"enginecore.pools.wide.{setting}" for setting in (f"replicas={replicas}", "rollingUpdate.maxSurge=", *given)
    ]
    strategy = groups("enginecore-wide", *settings)["spec"]["rolloutStrategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdateConfiguration": expected}


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("spec",), {"relicas": 1}, "spec: .*'relicas' was unexpected"),
        (("spec",), {"startupPolicy": "LeaderFirst"}, "spec.startupPolicy: 'LeaderFirst' is not one of"),
        (("spec", "leaderWorkerTemplate"), {"size": "2"}, "size: '2' is not of type 'integer'"),
        (
            ("spec", "leaderWorkerTemplate", "workerTemplate", "spec"),
            {"container": []},
            "Pod .* workerTemplate: spec: ",
        ),
        (
            ("spec", "leaderWorkerTemplate", "leaderTemplate", "spec"),
            {"volumes": {}},
            "Pod .* leaderTemplate: spec.volumes: ",
        ),
    ],
)
def test_the_lint_finds_what_is_wrong_in_a_group(path: tuple[str, ...], value: dict[str, Any], text: str):
    manifest = copy.deepcopy(groups("enginecore"))
    lint.validate(manifest, lint.KUBE_VERSIONS[0])
    here = manifest
    for key in path:
        here = here[key]
    here.update(value)
    with pytest.raises(ChartError, match=text):
        lint.validate(manifest, lint.KUBE_VERSIONS[0])


def test_the_schema_is_made_from_the_definition():
    pods = {"type": "object", "properties": {"spec": {"type": "object"}}, "description": "Pods."}
    parts = {"leaderTemplate": pods, "workerTemplate": pods, "volumeClaimTemplates": {"type": "array", "items": {}}}
    template = {"type": "object", "required": ["workerTemplate"], "properties": parts}
    spec = {"type": "object", "properties": {"leaderWorkerTemplate": template}}
    version = {"name": "v1", "schema": {"openAPIV3Schema": {"properties": {"spec": spec, "status": {}}}}}
    made = leader_worker_set.made_from({"spec": {"versions": [version]}})
    assert made["properties"].keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert made["properties"]["spec"]["properties"]["leaderWorkerTemplate"] == {
        "type": "object",
        "required": ["workerTemplate"],
        "properties": {
            "leaderTemplate": {"type": "object"},
            "workerTemplate": {"type": "object"},
            "volumeClaimTemplates": {"type": "array"},
        },
        "additionalProperties": False,
    }
