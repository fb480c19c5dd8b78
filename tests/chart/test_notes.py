"""NOTES.txt: the text that helm prints after an installation."""

from pathlib import Path

import pytest

from penstock.inference.v1 import messages_pb2, service_pb2
from tests.chart.rendering import AUTOSCALED, BARE, DEMO, GROUPS, HUB, MULTINODE, POOLS, notes, release


def test_the_notes_show_a_first_call(tmp_path: Path):
    text = notes(tmp_path, DEMO)
    assert "with 1 frontend(s) and\n  1 engine(s) on the CPU\n" in text
    assert "port-forward service/demo-penstock-frontend 50051:50051" in text
    assert "rollout status deployment/demo-penstock-enginecore" in text
    assert "WARNING" not in text


def test_every_pool_is_waited_for(tmp_path: Path):
    text = notes(tmp_path, POOLS)
    assert "2 engine(s) of 1 GPU(s) each in the pool default" in text
    assert "3 engine(s) on the CPU in the pool spot" in text
    waited = [line.rpartition("/")[2] for line in text.splitlines() if "rollout status" in line]
    assert waited == [
        d["metadata"]["name"] for d in release(POOLS).all("Deployment") if "enginecore" in str(d["metadata"])
    ]


def test_engines_of_several_pods_are_waited_for_by_their_groups(tmp_path: Path):
    text = notes(tmp_path, MULTINODE)
    assert "2 to 4 engine(s) of 2 pods of 4 GPU(s) each in the pool default" in text
    assert "1 engine(s) of 4 GPU(s) each in the pool one" in text
    waited = [line.split()[3:] for line in text.splitlines() if " wait " in line or "rollout status" in line]
    condition = ["--for=condition=Available", "--timeout=1800s"]
    assert waited == [
        ["wait", "leaderworkerset/demo-penstock-enginecore", *condition],
        ["rollout", "status", "deployment/demo-penstock-enginecore-one"],
        ["wait", "leaderworkerset/demo-penstock-enginecore-wide", *condition],
    ]


def test_groups_are_waited_for_by_their_ranks(tmp_path: Path):
    text = notes(tmp_path, GROUPS)
    assert "  a group of 4 ranks in 4 pod(s) on the CPU in the pool default\n" in text
    assert "  a group of 8 ranks in 4 pod(s) on the CPU in the pool wide\n" in text
    assert "rollout status statefulset/demo-penstock-enginecore-wide\n" in text


def test_the_first_call_names_a_method_and_fields_of_the_api(tmp_path: Path):
    text = notes(tmp_path, DEMO)
    service = service_pb2.DESCRIPTOR.services_by_name["InferenceService"]
    assert f"{service.full_name}/{service.methods_by_name['Generate'].name}" in text
    assert {"text", "sampling_params"} <= set(messages_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)


KV_CACHE = "config.cache.kv_cache_memory, the engine sizes the KV cache by the node's free memory"


def test_the_notes_say_when_frontends_get_ready(tmp_path: Path):
    text = notes(tmp_path, HUB)
    assert "Wait until the model is loaded:" in text
    assert "Frontends become ready once an engine is ready." in text
    assert "There may be no engine yet" not in text


@pytest.mark.parametrize(
    ("settings", "engines"),
    [
        (
            ("enginecore.autoscaling.mode=keda", "enginecore.autoscaling.minReplicas=0"),
            "The first call starts an engine",
        ),
        (("enginecore.replicas=0",), "There is no engine while enginecore.replicas is 0."),
        (
            (
                "enginecore.pools.a.replicas=0",
                "enginecore.pools.b.autoscaling.mode=keda",
                "enginecore.pools.b.autoscaling.minReplicas=0",
            ),
            "The first call starts an engine",
        ),
    ],
)
def test_where_there_may_be_no_engine_frontends_need_none_to_be_ready(
    tmp_path: Path, settings: tuple[str, ...], engines: str
):
    text = notes(tmp_path, HUB, *settings)
    assert engines in text
    assert "Frontends become ready once they are connected to the coordinator, with or without engines." in text
    assert "once an engine is ready" not in text


def test_what_a_pool_leaves_out_is_pointed_out_by_the_pools_own_value(tmp_path: Path):
    text = notes(tmp_path, POOLS, "enginecore.pools.bare.gpu.count=0", "enginecore.pools.bare.modelCache.claimName=c")
    assert f"NOTE: without enginecore.pools.bare.{KV_CACHE}" in text
    assert (
        "NOTE: each new engine pod downloads the model. Set enginecore.pools.default.modelCache.claimName and "
        "enginecore.pools.spot.modelCache.claimName to share a volume." in text
    )


def test_what_every_pool_has_is_not_pointed_out(tmp_path: Path):
    assert KV_CACHE not in notes(tmp_path, POOLS)


def test_a_pool_may_have_what_the_engines_values_leave_out(tmp_path: Path):
    pool = ("enginecore.pools.a.config.cache.kv_cache_memory=1GiB", "enginecore.pools.a.modelCache.claimName=models")
    text = notes(tmp_path, HUB, "enginecore.gpu.count=0", *pool)
    assert KV_CACHE not in text
    assert "downloads the model" not in text


def test_autoscaling_names_the_metrics_that_an_adapter_must_offer(tmp_path: Path):
    text = notes(tmp_path, AUTOSCALED, "enginecore.autoscaling.hpa.loadMetric=busy")
    assert "2 to 16 engine(s) of 1 GPU(s) each" in text
    assert "reads the Pods metrics busy and vllm_kv_cache_usage_perc" in text
    assert "metrics.enabled is false" not in text


def test_without_autoscaling_there_is_nothing_of_metrics(tmp_path: Path):
    assert "metrics" not in notes(tmp_path, HUB)


@pytest.mark.parametrize(
    ("name", "settings", "warning"),
    [
        (BARE, (), "is a LoadBalancer Service, and its traffic is neither encrypted nor authenticated"),
        (BARE, (), "the engine sizes the KV cache by the node's free memory"),
        (HUB, (), "each new engine pod downloads the model"),
        (AUTOSCALED, ("metrics.enabled=false",), "metrics.enabled is false, so the autoscaler has no metrics"),
    ],
)
def test_risky_values_are_pointed_out(tmp_path: Path, name: str, settings: tuple[str, ...], warning: str):
    assert warning in notes(tmp_path, name, *settings)


LORA = ("enginecore.lora.enabled=true", "enginecore.lora.adapters.pirate=/adapters/pirate")
LIMIT = "enginecore.resources.limits.memory"
ADAPTERS = "the container can exceed its memory limit"


@pytest.mark.parametrize(
    ("size", "limit"),
    [
        ("40GiB", "32Gi"),
        ("32GiB", "32Gi"),
        ("4g", "4G"),
        ("4.5GB", "4.4e9"),
        ("1TB", "500Gi"),
        ("34359738368", "32Gi"),
        ("2GiB", "2147483648"),
        ("1.5GiB", "1.5Gi"),
        ("2GiB", "2000000000000m"),
    ],
)
def test_adapters_that_take_all_memory_are_pointed_out(tmp_path: Path, size: str, limit: str):
    text = notes(tmp_path, HUB, *LORA, f"enginecore.lora.cpuMemory={size}", f"{LIMIT}={limit}")
    assert "WARNING: enginecore.lora.cpuMemory is " in text
    assert ADAPTERS in text


@pytest.mark.parametrize(
    ("size", "limit"),
    [("31GiB", "32Gi"), ("4GB", "4.1e9"), ("4GB", "4Gi"), ("1GiB", "1Ti"), ("1000000000", "32Gi"), ("40GiB", "null")],
)
def test_adapters_that_leave_memory_are_not(tmp_path: Path, size: str, limit: str):
    text = notes(tmp_path, HUB, *LORA, f"enginecore.lora.cpuMemory={size}", f"{LIMIT}={limit}")
    assert ADAPTERS not in text


def test_adapters_of_each_worker_of_a_container_count(tmp_path: Path):
    two = ("enginecore.tensorParallelSize=2", "enginecore.gpu.count=2")
    text = notes(tmp_path, HUB, *LORA, *two, "enginecore.lora.cpuMemory=16GiB")
    assert (
        "WARNING: enginecore.lora.cpuMemory is 16GiB of each of 2 workers, and enginecore.resources.limits.memory is 32Gi:"
        in text
    )


def test_adapters_of_a_pool_are_held_against_its_own_memory(tmp_path: Path):
    pools = ("enginecore.pools.a.resources.limits.memory=4Gi", "enginecore.pools.b.lora.cpuMemory=3GiB")
    text = notes(tmp_path, HUB, *LORA, *pools, "enginecore.lora.cpuMemory=5GiB")
    assert (
        "WARNING: enginecore.pools.a.lora.cpuMemory is 5GiB, and enginecore.pools.a.resources.limits.memory is" in text
    )
    assert text.count(ADAPTERS) == 1


def test_memory_for_adapters_that_nobody_serves_is_none(tmp_path: Path):
    assert ADAPTERS not in notes(tmp_path, HUB, "enginecore.resources.limits.memory=512Mi")


EDGE_TLS, EDGE_KEYS = "frontend.edge.tlsSecretName=edge-cert", "frontend.edge.apiKeysSecretName=keys"


def test_the_first_call_uses_the_certificate_and_the_key_that_the_edge_asks_for(tmp_path: Path):
    text = notes(tmp_path, HUB, EDGE_TLS, EDGE_KEYS)
    assert "export PENSTOCK_TLS_CA=" in text
    assert "export PENSTOCK_TLS_SERVER_NAME=" in text
    assert "export PENSTOCK_API_KEY=" in text
    assert '-cacert "$PENSTOCK_TLS_CA"' in text
    assert "authorization: Bearer $PENSTOCK_API_KEY" in text
    assert "-plaintext" not in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((EDGE_TLS, EDGE_KEYS), ""),
        ((EDGE_TLS,), "its traffic is encrypted but not authenticated"),
        ((EDGE_KEYS,), "its traffic is authenticated but not encrypted"),
        ((), "its traffic is neither encrypted nor authenticated"),
    ],
)
def test_what_a_service_outside_the_cluster_lacks_is_pointed_out(tmp_path: Path, settings: tuple[str, ...], said: str):
    text = notes(tmp_path, BARE, *settings)
    assert said in text
    assert ("is a LoadBalancer Service" in text) == bool(said)
