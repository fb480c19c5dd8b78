"""frontend/service.yaml: the public Service and the headless Service."""

from tests.chart.rendering import AUTOSCALED, BARE, HUB, release


def test_frontends_have_one_address_and_one_per_pod():
    service = release(HUB).one("Service", "frontend")["spec"]
    headless = release(HUB).one("Service", "frontend", suffix="-headless")["spec"]
    assert service["type"] == "ClusterIP"
    assert "clusterIP" not in service
    assert headless["clusterIP"] == "None"
    for spec in (service, headless):
        assert {port["name"]: port["port"] for port in spec["ports"]} == {"grpc": 50051, "http": 8000}


def test_the_public_service_can_be_published_on_other_ports():
    service = release(BARE).one("Service", "frontend")["spec"]
    assert service["type"] == "LoadBalancer"
    assert service["ports"][0]["port"] == 443
    assert release(AUTOSCALED).one("Service", "frontend")["metadata"]["annotations"] == {"example.com/team": "llm"}


def test_annotations_are_the_public_services_alone():
    assert "annotations" not in release(HUB).one("Service", "frontend")["metadata"]
    assert "annotations" not in release(AUTOSCALED).one("Service", "frontend", suffix="-headless")["metadata"]


def test_the_headless_service_keeps_its_ports_whatever_the_public_one_has():
    headless = release(BARE).one("Service", "frontend", suffix="-headless")["spec"]
    assert {port["name"]: port["port"] for port in headless["ports"]} == {"grpc": 50051, "http": 8000}
