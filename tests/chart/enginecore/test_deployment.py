"""enginecore/deployment.yaml: names of engines, their replacement, and their shared memory."""

from tests.chart.rendering import AUTOSCALED, BARE, HUB, release


def test_rollouts_follow_the_values():
    strategy = release(AUTOSCALED).one("Deployment", "enginecore")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"}}


def test_engines_register_under_the_address_of_their_pod():
    env = release(HUB).env("enginecore")
    assert env["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert env["PENSTOCK_COORDINATOR__ADVERTISE"]["value"] == "$(POD_IP)"
    assert env["PENSTOCK_ENGINE_ID"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    names = list(env)
    # a variable must come after the variables that it refers to.
    assert names.index("POD_IP") < names.index("PENSTOCK_COORDINATOR__ADVERTISE")


def test_shared_memory_is_mounted_on_request():
    assert release(AUTOSCALED).volumes("enginecore")["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert release(AUTOSCALED).mounts("enginecore")["/dev/shm"]["name"] == "shm"
    assert "shm" not in release(HUB).volumes("enginecore")


def test_a_runtime_class_is_for_pods_with_gpus():
    assert release(AUTOSCALED).pod_spec("enginecore")["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in release(HUB).pod_spec("enginecore")
    assert "runtimeClassName" not in release(BARE).pod_spec("enginecore")  # BARE sets a runtime class but no GPU


def test_metrics_have_a_port_where_they_are_served():
    ports = [port["name"] for port in release(HUB).container("enginecore")["ports"]]
    assert ports == ["grpc", "metrics"]
    assert [port["name"] for port in release(BARE).container("enginecore")["ports"]] == ["grpc"]
