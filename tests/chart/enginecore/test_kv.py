"""enginecore/_kv.tpl: engines with roles, KV transfer between engines, and memory and volumes for offloaded blocks."""

from pathlib import Path

import pytest

from charts.lint import ChartError
from penstock_enginecore.config import EngineCoreConfig
from tests.chart.network.test_networkpolicies import pods, rules
from tests.chart.rendering import GROUPS, HUB, MULTINODE, WORKER, Release, load, release

DISAGGREGATED = "disaggregated"
KV = "enginecore.kvCache"
GRPC = "enginecore.kvTransfer.transport=grpc"
HOST = f"{KV}.hostMemory=4GiB"
DISK = f"{KV}.disk.size=10GiB"
POLICY = "networkPolicy.enabled=true"
ROOT = "/var/lib/penstock/kv"


def engine_of(rendered: Release, folder: Path, component: str = "enginecore", rank: int = 0) -> EngineCoreConfig:
    config = load(rendered, component, folder, rank)
    assert isinstance(config, EngineCoreConfig)
    return config


def ports_of(rendered: Release, component: str, rank: int = 0) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in rendered.container(component, rank)["ports"]}


def test_without_the_values_nothing_is_said_of_it():
    rendered = release(HUB, POLICY)
    assert not {"role", "kv_transfer", "cache"} & rendered.config("enginecore").keys()
    assert "kv" not in ports_of(rendered, "enginecore")
    assert not {"kv", "shm"} & rendered.volumes("enginecore").keys()
    assert set(rules(rendered, "enginecore", "ingress")) == {(50052,), (9100,)}


def test_pools_have_a_role_and_scale_by_themselves(tmp_path: Path):
    rendered = release(DISAGGREGATED)
    for role, most in (("prefill", 8), ("decode", 16)):
        component = f"enginecore-{role}"
        config = engine_of(rendered, tmp_path, component)
        assert (config.role, config.pool, config.kv_transfer.transport) == (role, role, "grpc")
        assert rendered.one("HorizontalPodAutoscaler", component)["spec"]["maxReplicas"] == most
    assert engine_of(rendered, tmp_path, "enginecore-prefill").scheduler.max_num_seqs == 32
    assert rendered.container("enginecore-decode")["resources"]["limits"]["memory"] == "64Gi"


def test_engines_meet_at_their_pods_address_with_their_certificates(tmp_path: Path):
    rendered = release(DISAGGREGATED)
    config = engine_of(rendered, tmp_path, "enginecore-decode")
    assert config.kv_transfer.port == ports_of(rendered, "enginecore-decode")["kv"] == 50054
    assert config.kv_transfer.advertise == "", "the host is the one that frontends get"
    assert config.coordinator.advertise == "10.0.0.7"
    tls = config.kv_transfer.tls
    assert (tls.ca, tls.certificate, tls.server_name) == (
        config.server.tls.ca,
        config.server.tls.certificate,
        "penstock-enginecore",
    )
    assert not engine_of(release(HUB, GRPC), tmp_path).kv_transfer.tls.enabled


def test_only_engines_reach_the_port():
    rendered = release(HUB, GRPC, POLICY)
    for way in ("ingress", "egress"):
        assert rules(rendered, "enginecore", way)[(50054,)] == [pods("enginecore")]
    for component in ("frontend", "coordinator"):
        assert not [
            ports for way in ("ingress", "egress") for ports in rules(rendered, component, way) if 50054 in ports
        ]


def test_nixl_chooses_its_ports():
    spec = release(HUB, "enginecore.kvTransfer.transport=nixl", POLICY).one("NetworkPolicy", "enginecore")["spec"]
    assert {"from": [pods("enginecore")]} in spec["ingress"]
    assert {"to": [pods("enginecore")]} in spec["egress"]


def test_ranks_of_a_pod_have_ports_and_files_of_their_own(tmp_path: Path):
    rendered = release(GROUPS, GRPC, HOST, DISK)
    wide = [engine_of(rendered, tmp_path, "enginecore-wide", rank) for rank in (0, 1)]
    assert [config.cache.disk for config in wide] == [f"{ROOT}/0", f"{ROOT}/1"]
    kv_ports = [config.kv_transfer.port for config in wide]
    assert kv_ports == [50070, 50071]
    assert [ports_of(rendered, "enginecore-wide", rank)[name] for rank, name in enumerate(("kv", "kv-1"))] == kv_ports
    assert rendered.volumes("enginecore-wide")["kv"]["emptyDir"] == {"sizeLimit": "22528Mi"}
    assert rendered.volumes("enginecore")["kv"]["emptyDir"] == {"sizeLimit": "11264Mi"}
    assert rules(rendered, "enginecore", "ingress")[(50054, 50070, 50071)] == [pods("enginecore")]


def test_no_two_ports_of_a_pod_are_the_same():
    rendered = release(GROUPS, GRPC, "enginecore.pools.wide.dataParallel.ranksPerPod=8")
    ports = [port for rank in range(8) for port in ports_of(rendered, "enginecore-wide", rank).values()]
    assert len(set(ports)) == len(ports) == 8 * 3


def test_blocks_lie_in_host_memory_and_on_a_volume(tmp_path: Path):
    rendered = release(HUB, HOST, DISK)
    cache = engine_of(rendered, tmp_path).cache
    assert (cache.host_memory, cache.disk, cache.disk_size) == (4 * 2**30, f"{ROOT}/0", 10 * 2**30)
    assert rendered.mounts("enginecore")[ROOT] == {"name": "kv", "mountPath": ROOT}
    assert rendered.volumes("enginecore")["kv"]["emptyDir"] == {"sizeLimit": "11264Mi"}
    requests = rendered.container("enginecore")["resources"]["requests"]
    assert requests["ephemeral-storage"] == f"{20 * 1024 + 11264}Mi", "the model's and the blocks'"


def test_a_claim_of_each_pod_takes_nothing_of_the_node():
    rendered = release(DISAGGREGATED)
    spec = rendered.volumes("enginecore-decode")["kv"]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert spec == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local-nvme",
        "resources": {"requests": {"storage": "112640Mi"}},
    }
    assert rendered.container("enginecore-decode")["resources"]["requests"]["ephemeral-storage"] == "20Gi"


def test_of_an_engine_of_several_pods_the_first_has_the_volume():
    rendered = release(MULTINODE, HOST, DISK, GRPC)
    assert "kv" in rendered.volumes("enginecore")
    assert "kv" not in rendered.volumes(f"enginecore{WORKER}")
    assert ports_of(rendered, "enginecore")["kv"] == 50054


@pytest.mark.parametrize(
    ("name", "settings", "size"),
    [
        (HUB, ("enginecore.kvTransfer.transport=auto",), "128Mi"),
        (HUB, ("enginecore.kvTransfer.transport=auto", "enginecore.config.kv_transfer.arena=1GiB"), "1088Mi"),
        (HUB, ("enginecore.kvTransfer.transport=auto", "enginecore.shmSize=1Gi"), "1Gi"),
        (
            HUB,
            ("enginecore.kvTransfer.transport=auto", "enginecore.tensorParallelSize=2", "enginecore.gpu.count=2"),
            "2112Mi",
        ),
        (HUB, (GRPC,), None),
    ],
)
def test_shared_memory_has_room_for_what_engines_give_through_it(
    name: str, settings: tuple[str, ...], size: str | None
):
    shm = release(name, *settings).volumes("enginecore").get("shm")
    assert (shm and shm["emptyDir"]["sizeLimit"]) == size


def test_ranks_of_a_pod_share_their_memory():
    rendered = release(GROUPS, "enginecore.pools.wide.kvTransfer.transport=shared_memory")
    assert rendered.volumes("enginecore-wide")["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "192Mi"}
    for rank in (0, 1):
        mounts = rendered.container("enginecore-wide", rank)["volumeMounts"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in mounts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("enginecore.role=prefill",), r"enginecore.role is prefill, but kvTransfer.transport is empty"),
        (("enginecore.role=prefill", GRPC), r"enginecore.role is prefill, but no pool .* has the role decode or both"),
        (
            ("enginecore.pools.a.role=decode", GRPC),
            r"enginecore.pools.a.role is decode, but no pool .* has the role prefill",
        ),
        (
            (GRPC, "enginecore.pools.a.role=decode", "enginecore.pools.b.config.cache.block_size=32"),
            r"enginecore.pools.a.role is decode, but no pool with the role prefill or both has the same KV block layout "
            r".*block_size 16",
        ),
        (("enginecore.role=judge",), "enginecore.role must be one of"),
        (("enginecore.kvTransfer.transport=rdma",), "enginecore.kvTransfer.transport must be one of"),
        (("enginecore.kvTransfer.transport=shared_memory",), "is shared_memory, but each pod has one engine"),
        (
            ("enginecore.kvTransfer.transport=auto", "enginecore.shmSize=32Mi"),
            r"enginecore.shmSize is 32Mi, .*kv_transfer.arena for each engine of a pod, in total 67108864 bytes",
        ),
        ((f"{KV}.hostMemory=much",), "enginecore.kvCache.hostMemory"),
        (
            (f"{KV}.hostMemory=32GiB",),
            r"enginecore.kvCache.hostMemory is 32GiB; it must be less than resources.limits.memory = 32Gi",
        ),
        (
            (f"{KV}.hostMemory=20GiB", "enginecore.gpu.count=0", "enginecore.config.cache.kv_cache_memory=12GiB"),
            r"hostMemory is 20GiB; together with config.cache.kv_cache_memory 12GiB, it must be less than resources",
        ),
        (
            ("enginecore.pools.a.kvCache.hostMemory=40GiB",),
            r"enginecore.pools.a.kvCache.hostMemory is 40GiB; it must be less",
        ),
        ((DISK,), r"enginecore.kvCache.disk.size is 10GiB, but kvCache.hostMemory is 0"),
        (
            (HOST, f"{KV}.disk.volumeSize=1Gi"),
            r"enginecore.kvCache.disk.size is 0, but volumeSize or claimTemplate is set",
        ),
        (
            (HOST, DISK, f"{KV}.disk.volumeSize=9Gi"),
            r"enginecore.kvCache.disk.volumeSize is 9Gi; it must be at least kvCache.disk.size = 10GiB",
        ),
        (
            (HOST, DISK, "enginecore.resources.limits.ephemeral-storage=8Gi"),
            r"volume of 11264Mi, which exceeds resources.limits.ephemeral-storage = 8Gi",
        ),
        (("enginecore.config.role=prefill",), "Additional property role is not allowed"),
        (("enginecore.config.cache.disk=/kv",), "Additional property disk is not allowed"),
    ],
)
def test_invalid_values_are_refused_by_name(settings: tuple[str, ...], message: str):
    with pytest.raises(ChartError, match=message):
        release(HUB, *settings)


def test_what_the_pods_of_an_engine_take_together_is_looked_at_by_pod():
    limit = ("enginecore.resources.limits.memory=32Gi", "enginecore.pools.one.kvCache.hostMemory=0")
    release(MULTINODE, f"{KV}.hostMemory=40GiB", *limit)
    with pytest.raises(ChartError, match=r"hostMemory is 64GiB of 2 pods; it must be less than"):
        release(MULTINODE, f"{KV}.hostMemory=64GiB", *limit)
