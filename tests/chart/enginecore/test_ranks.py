"""enginecore/_ranks.tpl: settings of data-parallel ranks and groups, and refused groups."""

from pathlib import Path

import pytest

from charts.lint import ChartError
from penstock_enginecore.config import EngineCoreConfig
from tests.chart.rendering import GROUPS, HUB, POD_IP, load, release

WIDE = "enginecore-wide"
CPU = ("enginecore.gpu.count=0", "enginecore.dataParallel.size=4")


def config(component: str, folder: Path, rank: int = 0, *settings: str, name: str = GROUPS) -> EngineCoreConfig:
    found = load(release(name, *settings), component, folder, rank)
    assert isinstance(found, EngineCoreConfig)
    return found


def test_ranks_read_of_their_group_what_the_values_say(tmp_path: Path):
    group = config("enginecore", tmp_path).data_parallel
    assert (group.size, group.min_size, group.on_rank_loss, group.move_after) == (4, 2, "shrink", 10)
    assert group.address == POD_IP
    wide = config(WIDE, tmp_path).data_parallel
    assert (wide.size, wide.min_size, wide.on_rank_loss, wide.move_after) == (8, 4, "wait", 30)
    experts = config(WIDE, tmp_path).expert_parallel
    assert (experts.enabled, experts.window) == (True, 200)
    slower = config("enginecore", tmp_path, 0, "enginecore.config.data_parallel.connect_timeout=90")
    assert (slower.data_parallel.connect_timeout, slower.data_parallel.size) == (90, 4)


def test_an_engine_that_is_no_rank_is_told_nothing_of_groups():
    assert "data_parallel" not in release(HUB).config("enginecore")
    assert not [name for name in release(HUB).env("enginecore") if "DATA_PARALLEL" in name]


def test_a_pods_ranks_have_names_and_ports_of_their_own(tmp_path: Path):
    first, second = (config(WIDE, tmp_path, rank) for rank in (0, 1))
    assert (first.engine_id, second.engine_id) == ("pod-3-0", "pod-3-1")
    assert (first.server.port, second.server.port) == (50052, 50053)
    assert (first.metrics.port, second.metrics.port) == (9100, 9101)
    assert (first.server.health_port, second.server.health_port) == (50049, 50048)
    containers = release(GROUPS).pod_spec(WIDE)["containers"]
    assert [c["name"] for c in containers] == ["enginecore", "enginecore-1"]
    for rank, each in enumerate((first, second)):
        ports = {port["name"]: port["containerPort"] for port in containers[rank]["ports"]}
        suffix = f"-{rank}" if rank else ""
        assert ports == {f"grpc{suffix}": each.server.port, f"metrics{suffix}": each.metrics.port}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert containers[rank][kind]["grpc"]["port"] == each.server.health_port
    same = ("args", "image", "securityContext", "volumeMounts", "terminationMessagePolicy")
    assert all(containers[0][part] == containers[1][part] for part in same)


def test_without_certificates_each_rank_is_asked_at_its_own_port(tmp_path: Path):
    plain = "tls.certManager.issuerRef.name="
    for rank in (0, 1):
        probe = release(GROUPS, plain).container(WIDE, rank)["livenessProbe"]["grpc"]["port"]
        assert probe == config(WIDE, tmp_path, rank, plain).server.port == 50052 + rank


def test_a_rank_alone_in_its_pod_is_called_as_the_pod_is(tmp_path: Path):
    env = release(GROUPS).env("enginecore")
    assert env["PENSTOCK_ENGINE_ID"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert config("enginecore", tmp_path).server.port == 50052
    assert release(GROUPS).container("enginecore")["name"] == "enginecore"


def test_each_rank_has_gpus_and_a_pod_room_for_one_download():
    gpus = ("enginecore.pools.wide.gpu.count=1", "enginecore.pools.wide.modelCache.size=30Gi")
    requests = [release(GROUPS, *gpus).container(WIDE, rank)["resources"]["requests"] for rank in (0, 1)]
    assert [each["nvidia.com/gpu"] for each in requests] == [1, 1]
    assert [each.get("ephemeral-storage") for each in requests] == ["30Gi", None]


def test_each_rank_claims_its_own_gpu():
    settings = ("enginecore.pools.wide.gpu.count=1", "enginecore.pools.wide.gpu.dra.deviceClassName=gpu.nvidia.com")
    claimed = release(GROUPS, *settings, kube_version="1.36")
    claims = claimed.pod_spec(WIDE)["resourceClaims"]
    assert [claim["name"] for claim in claims] == ["gpu", "gpu-1"]
    assert claims[0]["resourceClaimTemplateName"] == claims[1]["resourceClaimTemplateName"]
    own = [claimed.container(WIDE, rank)["resources"]["claims"] for rank in (0, 1)]
    assert own == [[{"name": "gpu"}], [{"name": "gpu-1"}]]


def test_a_drain_of_nodes_leaves_as_many_ranks_as_the_group_goes_on_with():
    budget = "enginecore.pools.wide.podDisruptionBudget.maxUnavailable"
    for given, written in (("1", 1), ("2", 2), ("50%", "50%")):
        found = release(GROUPS, f"{budget}={given}").one("PodDisruptionBudget", WIDE)["spec"]
        assert (found["maxUnavailable"], found["unhealthyPodEvictionPolicy"]) == (written, "AlwaysAllow")
    for given in ("3", "51%"):
        with pytest.raises(
            ChartError, match=rf"maxUnavailable is {given}; of 4 pods at most 2 may be unavailable, .* = 4 ranks"
        ):
            release(GROUPS, f"{budget}={given}")
    # If a group has its minimum size, an eviction pauses the group, and the node drain continues.
    assert release(HUB, *CPU, "enginecore.dataParallel.minSize=4").one("PodDisruptionBudget", "enginecore")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("dataParallel.minSize=5",), r"enginecore.dataParallel.minSize is 5; it must not exceed size = 4"),
        (("dataParallel.ranksPerPod=3",), r"dataParallel.size is 4; each pod has 3 ranks .* a multiple of 3"),
        (("dataParallel.ranksPerPod=9",), r"ranksPerPod: Must be less than or equal to 8"),
        (("replicas=2",), r"enginecore.replicas is 2, but dataParallel.size is 4, and a pool has exactly one group"),
        (
            ("tensorParallelSize=2",),
            r"enginecore.tensorParallelSize is 2, but dataParallel.size is 4, and a rank is one",
        ),
        (("pipelineParallelSize=2",), r"enginecore.pipelineParallelSize is 2, but dataParallel.size is 4"),
        (
            ("autoscaling.mode=keda",),
            r"enginecore.autoscaling.mode is keda, but dataParallel.size is 4, .* penstock scale",
        ),
        (
            ("rollingUpdate.maxSurge=1",),
            r"enginecore.rollingUpdate.maxSurge is 1, but dataParallel.size is 4, and a StatefulSet",
        ),
        (("config.data_parallel.size=4",), r"data_parallel: Additional property size is not allowed"),
        (
            ("config.expert_parallel.enabled=true", "dataParallel.size=1"),
            r"enginecore.config.expert_parallel.enabled is true, but dataParallel.size is 1",
        ),
        (
            ("dataParallel.ranksPerPod=2", "extraEnv[0].name=POD_NAME", "extraEnv[0].value=x"),
            r"enginecore.extraEnv has POD_NAME, which the chart sets",
        ),
    ],
)
def test_invalid_values_are_refused(settings: tuple[str, ...], text: str):
    with pytest.raises(ChartError, match=text):
        release(HUB, *CPU, *(f"enginecore.{setting}" for setting in settings))


def test_a_name_that_is_too_long_for_revisions_is_refused():
    release(HUB, *CPU, f"fullnameOverride={'a' * 41}")
    with pytest.raises(ChartError, match=r"would have 53 characters, but at most 52 are allowed"):
        release(HUB, *CPU, f"fullnameOverride={'a' * 42}")
