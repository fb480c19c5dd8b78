"""enginecore/_groups.tpl: settings of an engine's pods about each other, and refused sizes."""

from pathlib import Path

import pytest

from charts.lint import ChartError
from penstock_enginecore.config import EngineCoreConfig
from tests.chart.rendering import HUB, MULTINODE, POD_IP, WORKER, load, release

TWO = ("enginecore.multiNode.size=2", "enginecore.pipelineParallelSize=2")


def nodes(component: str, folder: Path, *settings: str):
    config = load(release(MULTINODE, *settings), component, folder)
    assert isinstance(config, EngineCoreConfig)
    return config.executor.nodes


def test_the_pods_of_an_engine_read_one_file_and_each_knows_who_it_is(tmp_path: Path):
    leader, worker = (nodes(f"enginecore-wide{end}", tmp_path) for end in ("", WORKER))
    assert (leader.size, leader.port, leader.leader, leader.index) == (4, 50061, "", 0)
    assert (worker.size, worker.port, worker.leader, worker.index) == (4, 50061, "engine-0.engine.serving:50061", 1)
    assert leader.address == worker.address == POD_IP
    for component in ("enginecore-wide", f"enginecore-wide{WORKER}"):
        assert release(MULTINODE).env(component)["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


def test_each_engine_has_as_many_workers_as_its_pods_have_gpus(tmp_path: Path):
    rendered = release(MULTINODE)
    for component, pods in (("enginecore", 2), ("enginecore-one", 1), ("enginecore-wide", 4)):
        config = load(rendered, component, tmp_path)
        assert isinstance(config, EngineCoreConfig)
        gpus = rendered.container(component)["resources"]["limits"]["nvidia.com/gpu"]
        assert config.executor.num_workers == gpus * pods
        assert rendered.volumes(component)["shm"]["emptyDir"]["sizeLimit"] == f"{gpus}Gi"


def test_pods_of_an_engine_speak_tls_with_its_certificate_where_services_do(tmp_path: Path):
    tls = nodes(f"enginecore{WORKER}", tmp_path).tls
    files = [f"/etc/penstock-tls/{name}" for name in ("ca.crt", "tls.crt", "tls.key")]
    assert [tls.ca, tls.certificate, tls.key] == files
    assert tls.server_name == "penstock-enginecore"
    secrets = {
        release(MULTINODE).volumes(c)["tls"]["secret"]["secretName"] for c in ("enginecore", f"enginecore{WORKER}")
    }
    assert secrets == {"demo-penstock-enginecore-tls"}
    assert not nodes(f"enginecore{WORKER}", tmp_path, "tls.certManager.issuerRef.name=").tls.enabled


def test_an_engine_of_one_pod_is_told_nothing_of_others():
    for rendered, component in ((release(HUB), "enginecore"), (release(MULTINODE), "enginecore-one")):
        assert "nodes" not in rendered.config(component).get("executor", {})
        assert not [name for name in rendered.env(component) if "NODES" in name]


def test_how_long_pods_wait_for_each_other_may_be_set(tmp_path: Path):
    assert nodes("enginecore", tmp_path, "enginecore.config.executor.nodes.timeout=1800").timeout == 1800


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            ("enginecore.multiNode.size=4", "enginecore.pipelineParallelSize=6", "enginecore.gpu.count=2"),
            r"enginecore.multiNode.size is 4 and pipelineParallelSize is 6, .* set pipelineParallelSize to a multiple of 4",
        ),
        (("enginecore.multiNode.size=2",), r"multiNode.size is 2 and pipelineParallelSize is 1"),
        (
            (*TWO, "enginecore.gpu.count=2"),
            r"gpu.count is 2, but each of the 2 pods of an engine has 1 worker.* set gpu.count to 1",
        ),
        (
            (*TWO, "enginecore.tensorParallelSize=8"),
            r"gpu.count is 1, but each of the 2 pods of an engine has 8 worker.* set gpu.count to 8",
        ),
        ((*TWO, f"fullnameOverride={'a' * 38}"), r"would have 49 characters, but at most 48 are allowed"),
        (
            ("enginecore.pools.a-headless.multiNode.size=2", "enginecore.pools.a-headless.pipelineParallelSize=2"),
            r"enginecore.pools.a-headless.multiNode.size is 2: the Service of the LeaderWorkerSet",
        ),
        (
            (*TWO, "enginecore.pools.default.replicas=1", "enginecore.pools.workers.replicas=1"),
            r"enginecore.pools.default.multiNode.size is 2: the PodDisruptionBudget of its workers",
        ),
        (("enginecore.multiNode.size=65",), r"enginecore.multiNode.size: Must be less than or equal to 64"),
        (("enginecore.config.executor.nodes.size=2",), r"executor.nodes: Additional property size is not allowed"),
    ],
)
def test_invalid_values_are_refused(settings: tuple[str, ...], text: str):
    with pytest.raises(ChartError, match=text):
        release(HUB, *settings)


@pytest.mark.parametrize(("engines", "fits"), [(3, False), (4, True)])
def test_a_rollout_that_a_leader_worker_set_rounds_down_to_none_is_refused(engines: int, fits: bool):
    settings = (*TWO, "enginecore.rollingUpdate.maxUnavailable=25%", "enginecore.rollingUpdate.maxSurge=0")
    settings = (*settings, f"enginecore.replicas={engines}")
    if fits:
        release(HUB, *settings)
    else:
        with pytest.raises(ChartError, match=r"enginecore.rollingUpdate.maxUnavailable is 25%, .* one of 3 engines"):
            release(HUB, *settings)
