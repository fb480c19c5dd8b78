"""enginecore/scaledobject.yaml: KEDA's metadata uses the field names that the coordinator's scaler reads."""

import pytest

from charts.lint import ChartError
from penstock_coordinator.autoscaling import Targets
from penstock_coordinator.config import ScalingConfig
from penstock_coordinator.rpc.external_scaler import scaler_metadata
from tests.chart.rendering import AUTOSCALED, HUB, MULTINODE, POOLS, release

KEDA = "enginecore.autoscaling.mode=keda"
TLS = tuple(f"{component}.tls.secretName=of-{component}" for component in ("frontend", "enginecore", "coordinator"))


def test_keda_asks_the_coordinator_for_the_pool():
    rendered = release(
        HUB,
        KEDA,
        "enginecore.autoscaling.minReplicas=0",
        "enginecore.autoscaling.idleSeconds=120",
        "enginecore.config.scheduler.max_num_seqs=64",
    )
    spec = rendered.one("ScaledObject", "enginecore")["spec"]
    assert spec["scaleTargetRef"]["name"] == rendered.one("Deployment", "enginecore")["metadata"]["name"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (0, 4)
    assert (spec["cooldownPeriod"], spec["initialCooldownPeriod"]) == (0, 1800)
    [trigger] = spec["triggers"]
    assert trigger["type"] == "external-push"
    assert "authenticationRef" not in trigger
    assert trigger["metadata"]["scalerAddress"] == rendered.config("frontend")["coordinator"]["address"]
    metadata = scaler_metadata(trigger["metadata"], ScalingConfig())
    assert (metadata.pool, metadata.idle_seconds) == ("default", 120)
    assert metadata.targets == Targets(load=0.8, kv_cache_usage=0.8, slots=64)
    assert rendered.all("TriggerAuthentication") == rendered.all("HorizontalPodAutoscaler") == []
    assert "replicas" not in rendered.one("Deployment", "enginecore")["spec"]


def test_a_pool_is_known_to_its_engines_the_coordinator_and_keda_by_one_name():
    rendered = release(POOLS, "enginecore.pools.spot.autoscaling.mode=keda")
    [scaled] = rendered.all("ScaledObject")
    assert scaled["spec"]["triggers"][0]["metadata"]["pool"] == "spot"
    assert rendered.config("enginecore-spot")["pool"] == "spot"
    assert "spot" in rendered.config("coordinator")["scaling"]["pools"]


def test_under_tls_keda_shows_a_certificate():
    rendered = release(HUB, KEDA, *TLS, "enginecore.autoscaling.keda.tlsSecretName=of-keda")
    authentication = rendered.one("TriggerAuthentication", "enginecore")
    [trigger] = rendered.one("ScaledObject", "enginecore")["spec"]["triggers"]
    assert trigger["metadata"]["enableTLS"] == "true"
    assert trigger["authenticationRef"] == {"name": authentication["metadata"]["name"]}
    assert {(ref["parameter"], ref["key"]) for ref in authentication["spec"]["secretTargetRef"]} == {
        ("caCert", "ca.crt"),
        ("tlsClientCert", "tls.crt"),
        ("tlsClientKey", "tls.key"),
    }
    assert {ref["name"] for ref in authentication["spec"]["secretTargetRef"]} == {"of-keda"}
    with pytest.raises(ChartError, match=r"enginecore.autoscaling.keda.tlsSecretName is required"):
        release(HUB, KEDA, *TLS)


def test_without_keda_there_is_none_of_it():
    assert release(AUTOSCALED).all("ScaledObject") == release(HUB).all("ScaledObject") == []


def test_keda_counts_engines_of_several_pods_by_their_group():
    rendered = release(MULTINODE, "enginecore.pools.wide.autoscaling.mode=keda")
    target = rendered.one("ScaledObject", "enginecore-wide")["spec"]["scaleTargetRef"]
    workload = rendered.workload("enginecore-wide")
    assert target == {key: workload[key] for key in ("apiVersion", "kind")} | {"name": workload["metadata"]["name"]}
    assert target["kind"] == "LeaderWorkerSet"
