"""edge/ingress.yaml: one Ingress for HTTP and one for gRPC, with the annotations that controllers need."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import EXPOSED, HUB, release


def test_without_the_values_there_is_none():
    assert not release(HUB).all("Ingress")


@pytest.mark.parametrize(("port", "host"), [("http", "llm.example.org"), ("grpc", "grpc.example.org")])
def test_calls_of_a_host_go_to_the_port_of_their_protocol(port: str, host: str):
    rendered = release(EXPOSED)
    ingress = rendered.one("Ingress", "frontend", suffix=f"-{port}")
    service = rendered.one("Service", "frontend")
    (rule,) = ingress["spec"]["rules"]
    assert rule["host"] == host
    (path,) = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/", "Prefix")
    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": port}}
    assert port in [p["name"] for p in service["spec"]["ports"]]


def test_class_certificates_and_annotations_are_each_ones_own():
    http, grpc = (release(EXPOSED).one("Ingress", "frontend", suffix=f"-{port}") for port in ("http", "grpc"))
    assert http["spec"]["ingressClassName"] == "nginx"
    assert http["spec"]["tls"] == [{"hosts": ["llm.example.org"], "secretName": "llm-example-org"}]
    assert not {"ingressClassName", "tls"} & grpc["spec"].keys()
    assert grpc["metadata"]["annotations"] == {"nginx.ingress.kubernetes.io/backend-protocol": "GRPCS"}


@pytest.mark.parametrize("name", ["ingress", "grpcIngress"])
def test_one_is_there_without_the_other_and_needs_hosts(name: str):
    (ingress,) = release(HUB, f"frontend.{name}.enabled=true", f"frontend.{name}.hosts={{a.example}}").all("Ingress")
    assert "annotations" not in ingress["metadata"]
    with pytest.raises(ChartError, match=rf"frontend.{name}.hosts is required"):
        release(HUB, f"frontend.{name}.enabled=true")
