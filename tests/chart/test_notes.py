"""What the user reads after an installation."""

from pathlib import Path

import pytest

from penstock.inference.v1 import messages_pb2, service_pb2
from tests.chart.rendering import AUTOSCALED, BARE, DEMO, HUB, POOLS, notes, release


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


def test_the_first_call_names_a_method_and_fields_of_the_api(tmp_path: Path):
    text = notes(tmp_path, DEMO)
    service = service_pb2.DESCRIPTOR.services_by_name["InferenceService"]
    assert f"{service.full_name}/{service.methods_by_name['Generate'].name}" in text
    assert {"text", "sampling_params"} <= set(messages_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)


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
        (BARE, (), "the KV cache is sized by the node's free memory"),
        (HUB, (), "each new engine pod downloads the model"),
        (AUTOSCALED, ("metrics.enabled=false",), "metrics.enabled is false, so there is nothing to scale by"),
    ],
)
def test_risky_values_are_pointed_out(tmp_path: Path, name: str, settings: tuple[str, ...], warning: str):
    assert warning in notes(tmp_path, name, *settings)


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
