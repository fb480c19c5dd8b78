"""frontend/deployment.yaml: the requested number of pods, with the tokenizer and without the engine's resources."""

from tests.chart.rendering import AUTOSCALED, BARE, HUB, release


def test_the_values_say_how_many_frontends_there_are():
    assert release(HUB).one("Deployment", "frontend")["spec"]["replicas"] == 2
    assert (
        "replicas" not in release(AUTOSCALED).one("Deployment", "frontend")["spec"]
    )  # the autoscaler sets the number of replicas, see test_workload.py


def test_rollouts_follow_the_values():
    strategy = release(HUB, "frontend.rollingUpdate.maxSurge=3").one("Deployment", "frontend")["spec"]["strategy"]
    assert strategy["type"] == "RollingUpdate"
    assert strategy["rollingUpdate"]["maxSurge"] == 3


def test_metrics_are_at_the_http_port_whether_or_not_engines_serve_theirs():
    for name in (HUB, BARE):
        ports = {port["name"]: port["containerPort"] for port in release(name).container("frontend")["ports"]}
        assert ports == {"grpc": 50051, "http": 8000}


def test_a_frontend_has_room_for_a_tokenizer_and_nothing_of_an_engine():
    rendered = release(AUTOSCALED)
    assert rendered.volumes("frontend")["cache"]["emptyDir"] == {"sizeLimit": "2Gi"}
    assert "shm" not in rendered.volumes("frontend")
    assert not {"POD_IP", "PENSTOCK_ENGINE_ID", "PENSTOCK_COORDINATOR__ADVERTISE"} & rendered.env("frontend").keys()
