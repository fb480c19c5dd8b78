"""coordinator/service.yaml: the coordinator's address for engines and frontends."""

from tests.chart.rendering import BARE, HUB, release


def test_the_coordinator_has_one_address_of_the_cluster():
    spec = release(HUB).one("Service", "coordinator")["spec"]
    assert "clusterIP" not in spec
    assert [(port["name"], port["port"], port["targetPort"]) for port in spec["ports"]] == [("grpc", 50050, "grpc")]


def test_its_metrics_are_not_published():
    for name in (HUB, BARE):
        (port,) = release(name).one("Service", "coordinator")["spec"]["ports"]
        assert port["name"] == "grpc"
