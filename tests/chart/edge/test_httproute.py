"""edge/httproute.yaml: a route of the Gateway API to the frontends' HTTP port, or to their InferencePool."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import EXPOSED, HUB, release

ON = ("frontend.httpRoute.enabled=true", "frontend.httpRoute.parentRefs[0].name=public")
POOL = ("frontend.inferencePool.enabled=true", "frontend.inferencePool.endpointPicker.name=picker")


def test_without_the_value_there_is_none():
    assert not release(HUB).all("HTTPRoute")


def test_calls_of_its_hosts_go_to_the_service():
    spec = release(EXPOSED).one("HTTPRoute", "frontend")["spec"]
    assert spec["parentRefs"] == [{"name": "public", "namespace": "gateways"}]
    assert spec["hostnames"] == ["llm.example.org"]
    (rule,) = spec["rules"]
    assert rule["backendRefs"] == [{"name": "demo-penstock-frontend", "port": 8000}]
    assert rule["filters"][0]["requestHeaderModifier"] == {"remove": ["x-penstock-tenant"]}


def test_metrics_and_engine_states_stay_internal_unless_matches_expose_them():
    (rule,) = release(HUB, *ON).one("HTTPRoute", "frontend")["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    (rule,) = release(HUB, *ON, "frontend.httpRoute.matches[0].path.value=/").one("HTTPRoute", "frontend")["spec"][
        "rules"
    ]
    assert rule["matches"] == [{"path": {"value": "/"}}]


def test_streams_have_no_timeout_unless_one_is_given():
    (rule,) = release(HUB, *ON).one("HTTPRoute", "frontend")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    (rule,) = release(HUB, *ON, "frontend.httpRoute.timeout=1h").one("HTTPRoute", "frontend")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "1h", "backendRequest": "1h"}
    with pytest.raises(ChartError, match="frontend.httpRoute.timeout: Does not match pattern"):
        release(HUB, *ON, "frontend.httpRoute.timeout=forever")


def test_it_leads_to_the_inference_pool_where_there_is_one():
    rendered = release(HUB, *ON, *POOL)
    (rule,) = rendered.one("HTTPRoute", "frontend")["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    pool = rendered.one("InferencePool", "frontend")
    assert backend == {
        "group": pool["apiVersion"].partition("/")[0],
        "kind": "InferencePool",
        "name": pool["metadata"]["name"],
    }


def test_a_route_without_a_gateway_is_refused():
    with pytest.raises(ChartError, match="frontend.httpRoute.parentRefs is required"):
        release(HUB, ON[0])
