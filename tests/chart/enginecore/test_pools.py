"""enginecore/_pools.tpl: pools of engines in one release, each with its own values."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from charts import config_schema, lint, values_table
from tests.chart.rendering import BARE, HUB, MULTINODE, POOLS, WORKER, load, release

ENGINES = ("enginecore", "enginecore-spot", "enginecore-h200")
KINDS = {"Deployment": "", "ConfigMap": "", "Service": "-headless"}


def pool_of(manifest: dict[str, Any]) -> str | None:
    return manifest["metadata"]["labels"].get("penstock.io/pool")


def test_without_pools_there_is_one_called_default():
    rendered = release(HUB)
    assert rendered.components() == ["coordinator", "enginecore", "frontend"]
    assert pool_of(rendered.one("Deployment", "enginecore")) == "default"
    assert pool_of(rendered.pod("enginecore")) == "default"
    assert {pool_of(m) for m in rendered.manifests if "enginecore" not in m["metadata"]["name"]} == {None}


@pytest.mark.parametrize("kind", KINDS)
def test_every_pool_has_its_objects(kind: str):
    found = {m["metadata"]["name"]: pool_of(m) for m in release(POOLS).all(kind) if pool_of(m)}
    names = {
        "default": "demo-penstock-enginecore",
        "h200": "demo-penstock-enginecore-h200",
        "spot": "demo-penstock-enginecore-spot",
    }
    assert found == {f"{name}{KINDS[kind]}": pool for pool, name in names.items()}


def test_a_pool_has_the_values_of_all_engines_but_for_its_own(tmp_path: Path):
    rendered = release(POOLS)
    replicas = {c: rendered.one("Deployment", c)["spec"]["replicas"] for c in ENGINES}
    assert replicas == {"enginecore": 2, "enginecore-spot": 3, "enginecore-h200": 2}
    configs = {c: load(rendered, c, tmp_path) for c in ENGINES}
    assert [configs[c].scheduler.max_num_seqs for c in ENGINES] == [128, 128, 512]
    assert [configs[c].model.device for c in ENGINES] == ["cuda", "cpu", "cuda"]
    assert [rendered.container(c)["startupProbe"]["failureThreshold"] for c in ENGINES] == [120, 120, 900]
    assert [rendered.container(c)["startupProbe"]["periodSeconds"] for c in ENGINES] == [5, 5, 5]
    assert [c for c in ENGINES if "persistentVolumeClaim" in rendered.volumes(c)["cache"]] == ["enginecore-h200"]


def test_a_pool_can_take_away_what_all_engines_have():
    rendered = release(POOLS)
    spot, rest = rendered.pod_spec("enginecore-spot"), rendered.pod_spec("enginecore")
    assert "example.com/serving" in [t["key"] for t in rest["tolerations"]]
    assert "tolerations" not in spot
    assert "nvidia.com/gpu" not in str(spot["containers"])
    none = release(POOLS, "enginecore.pools.spot.replicas=0").one("Deployment", "enginecore-spot")
    assert none["spec"]["replicas"] == 0


def test_pools_mount_their_own_config():
    for component in ENGINES:
        name = release(POOLS).volumes(component)["config"]["configMap"]["name"]
        assert name == release(POOLS).one("ConfigMap", component)["metadata"]["name"]


def test_a_config_of_one_pool_replaces_no_engine_of_another():
    changed = release(POOLS, "enginecore.pools.h200.config.scheduler.max_num_seqs=256")
    checksums = [
        [r.pod(c)["metadata"]["annotations"]["checksum/config"] for c in ENGINES] for r in (release(POOLS), changed)
    ]
    assert [before != after for before, after in zip(*checksums, strict=True)] == [False, False, True]


def test_a_release_without_pools_keeps_the_name_and_the_selector_of_older_charts():
    for name in (HUB, POOLS):
        deployment = release(name).one("Deployment", "enginecore")
        assert deployment["metadata"]["name"] == "demo-penstock-enginecore"
        assert deployment["spec"]["selector"]["matchLabels"] == {
            "app.kubernetes.io/name": "penstock",
            "app.kubernetes.io/instance": "demo",
            "app.kubernetes.io/component": "enginecore",
        }
    service = release(HUB).one("Service", "enginecore", suffix="-headless")
    assert (
        "penstock.io/pool" not in service["spec"]["selector"]
    )  # engines without the label stay until they are replaced


def test_pools_of_engines_of_one_pod_and_of_several_stand_beside_each_other():
    rendered = release(MULTINODE)
    kinds = {c: rendered.workload(c)["kind"] for c in ("enginecore", "enginecore-one", "enginecore-wide")}
    assert list(kinds.values()) == ["LeaderWorkerSet", "Deployment", "LeaderWorkerSet"]
    assert {pool_of(rendered.pod(f"{c}{WORKER}")) for c in ("enginecore", "enginecore-wide")} == {"default", "wide"}


def test_frontends_wait_for_the_slowest_pool():
    deadlines = {
        c: release(POOLS).one("Deployment", c)["spec"]["progressDeadlineSeconds"] for c in (*ENGINES, "frontend")
    }
    assert deadlines == {"enginecore": 1080, "enginecore-spot": 1080, "enginecore-h200": 4980, "frontend": 4980}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("replica=2", "enginecore.pools.a: Additional property replica is not allowed"),
        ("replicas=two", "enginecore.pools.a.replicas: Invalid type. Expected: integer, given: string"),
        ("gpu.cuont=2", "enginecore.pools.a.gpu: Additional property cuont is not allowed"),
        ("probes.startup.period=2", "enginecore.pools.a.probes.startup: Additional property period is not allowed"),
        ("config.cache.block_sice=2", "enginecore.pools.a.config.cache: Additional property block_sice is not allowed"),
        ("config.model.dtype=fp8", "enginecore.pools.a.config.model.dtype must be one of"),
        ("rollingUpdate.maxSurge=half", "enginecore.pools.a.rollingUpdate.maxSurge: Does not match pattern"),
        ("pools.b.replicas=1", "enginecore.pools.a: Additional property pools is not allowed"),
        ("extraEnv[0].value=x", "enginecore.pools.a.extraEnv.0: name is required"),
        ("resources=null", "enginecore.pools.a.resources: Invalid type. Expected: object, given: null"),
        ("extraEnv[0].name=HF_HOME", "enginecore.pools.a.extraEnv has HF_HOME, which the chart sets"),
        ("drainTimeoutSeconds=180", "enginecore.pools.a.terminationGracePeriodSeconds is 180; it must exceed"),
    ],
)
def test_wrong_values_of_a_pool_are_refused_by_name(setting: str, message: str):
    with pytest.raises(lint.ChartError) as caught:
        release(HUB, f"enginecore.pools.a.{setting}")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["Spot", "1st", "a_b", "a.b", "a-", "a" * 41])
def test_a_name_that_is_none_of_a_label_and_of_objects_is_refused(name: str):
    escaped = name.replace(".", "\\.")
    with pytest.raises(lint.ChartError, match=r"enginecore.pools"):
        release(HUB, f"enginecore.pools.{escaped}.replicas=1")


def test_a_name_that_is_too_long_beside_the_releases_is_refused():
    with pytest.raises(
        lint.ChartError, match=r"enginecore.pools.a{31}: the name of the Service .* 66 characters, but at most 63"
    ):
        release(HUB, f"enginecore.pools.{'a' * 31}.replicas=1", f"fullnameOverride={'b' * 14}")
    with pytest.raises(
        lint.ChartError,
        match=r"at most 63 are allowed; give the pool or the release \(fullnameOverride\) a shorter name",
    ):
        release(BARE, "enginecore.pools.spot.replicas=1")


def test_a_pool_may_differ_in_every_value_of_the_engine():
    """Checks that a pool accepts every value that ``enginecore`` accepts, except null."""
    schema = json.loads((lint.CHART / "values.schema.json").read_text())
    engine = schema["properties"]["enginecore"]["properties"]
    assert schema["definitions"]["pool"]["properties"].keys() == engine.keys() - {"pools"}
    assert config_schema.with_pools(json.loads(json.dumps(schema))) == schema
    values = {key: value for key, value in values_table.default_values()["enginecore"].items() if key != "pools"}
    jsonschema.validate({**values_table.default_values(), "enginecore": {**values, "pools": {"a": values}}}, schema)
