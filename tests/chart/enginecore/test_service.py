"""enginecore/service.yaml: one address for each engine, and no common address."""

from tests.chart.rendering import BARE, HUB, release


def test_every_engine_has_an_address():
    spec = release(HUB).one("Service", "enginecore", suffix="-headless")["spec"]
    assert spec["clusterIP"] == "None"
    assert [(port["name"], port["port"]) for port in spec["ports"]] == [("grpc", 50052)]


def test_nothing_balances_over_engines_behind_the_frontends_back():
    for name in (HUB, BARE):
        services = release(name).all("Service")
        of_engines = [s for s in services if s["spec"]["selector"]["app.kubernetes.io/component"] == "enginecore"]
        assert [s["spec"].get("clusterIP") for s in of_engines] == ["None"]
