"""edge/grpcroute.yaml: a route of the Gateway API to the frontends' gRPC port."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import BARE, EXPOSED, HUB, release

ON = ("frontend.grpcRoute.enabled=true", "frontend.grpcRoute.parentRefs[0].name=public")


def test_without_the_value_there_is_none():
    assert not release(HUB).all("GRPCRoute")


def test_calls_of_its_hosts_go_to_the_service():
    route = release(EXPOSED).one("GRPCRoute", "frontend")
    assert route["metadata"]["annotations"] == {"example.com/team": "llm"}
    assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "gateways", "sectionName": "grpc"}]
    assert route["spec"]["hostnames"] == ["grpc.example.org"]
    assert route["spec"]["rules"] == [{"backendRefs": [{"name": "demo-penstock-frontend", "port": 50051}]}]


def test_the_port_is_the_services_own():
    (rule,) = release(BARE, *ON).one("GRPCRoute", "frontend")["spec"]["rules"]
    assert rule["backendRefs"][0]["port"] == 443


def test_matches_and_filters_are_the_routes():
    settings = ("frontend.grpcRoute.matches[0].method.service=a.B", "frontend.grpcRoute.filters[0].type=RequestMirror")
    (rule,) = release(HUB, *ON, *settings).one("GRPCRoute", "frontend")["spec"]["rules"]
    assert rule["matches"] == [{"method": {"service": "a.B"}}]
    assert rule["filters"] == [{"type": "RequestMirror"}]


def test_a_route_without_a_gateway_is_refused():
    with pytest.raises(ChartError, match="frontend.grpcRoute.parentRefs is required"):
        release(HUB, ON[0])
    with pytest.raises(ChartError, match="Additional property gateway is not allowed"):
        release(HUB, "frontend.grpcRoute.parentRefs[0].gateway=public")
