"""_workload.tpl: the number of pods and the replacement of pods."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

from charts import lint
from charts.lint import ChartError
from tests.chart.rendering import AUTOSCALED, BARE, DEMO, GROUPS, HUB, MULTINODE, POOLS, VALUE_SETS, Release, release

RUNNING = {
    "demo-penstock-frontend": (7, "somebody"),
    "demo-penstock-enginecore": (5, "somebody"),
    "demo-penstock-enginecore-old": (4, "autoscaler"),
}
"""Number of pods of each Deployment, and the owner of that field since the Deployment was created."""
ANSWERS: dict[str, dict[str, Any]] = {
    "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [
            {"name": group, "versions": [{"groupVersion": f"{group}/v1", "version": "v1"}]}
            for group in ("apps", "leaderworkerset.x-k8s.io")
        ],
    },
    "/apis/leaderworkerset.x-k8s.io/v1": {
        "kind": "APIResourceList",
        "groupVersion": "leaderworkerset.x-k8s.io/v1",
        "resources": [{"name": "leaderworkersets", "kind": "LeaderWorkerSet", "namespaced": True, "verbs": ["get"]}],
    },
    "/apis/leaderworkerset.x-k8s.io/v1/namespaces/serving/leaderworkersets/demo-penstock-enginecore": {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "demo-penstock-enginecore"},
        "spec": {"replicas": 3},
    },
    "/apis/apps/v1": {
        "kind": "APIResourceList",
        "groupVersion": "apps/v1",
        "resources": [
            {"name": f"{kind.lower()}s", "kind": kind, "namespaced": True, "verbs": ["get"]}
            for kind in ("Deployment", "StatefulSet")
        ],
    },
    "/apis/apps/v1/namespaces/serving/statefulsets/demo-penstock-enginecore": {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "demo-penstock-enginecore"},
        "spec": {"replicas": 6},
    },
} | {
    f"/apis/apps/v1/namespaces/serving/deployments/{name}": {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "annotations": {"penstock.io/replicas": owner}},
        "spec": {"replicas": replicas},
    }
    for name, (replicas, owner) in RUNNING.items()
}


class ApiServer(BaseHTTPRequestHandler):
    """Fake API server with the calls that helm makes before rendering."""

    def do_GET(self) -> None:
        answer = ANSWERS.get(self.path.partition("?")[0])
        body = json.dumps(answer or {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}).encode()
        self.send_response(200 if answer else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ApiServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def in_cluster(address: str, name: str, *settings: str) -> Release:
    text = lint.helm(
        *("template", "demo", str(lint.CHART), "--namespace=serving", f"--values={VALUE_SETS[name]}"),
        *("--dry-run=server", f"--kube-apiserver={address}", *(f"--set={setting}" for setting in settings)),
    )
    return Release([manifest for manifest in yaml.safe_load_all(text) if manifest])


def remembered(rendered: Release, component: str) -> bool:
    annotations = rendered.one("Deployment", component)["metadata"].get("annotations", {})
    return annotations.get("penstock.io/replicas") == "autoscaler"


def replicas(rendered: Release, component: str) -> int | None:
    return rendered.one("Deployment", component)["spec"].get("replicas")


def test_an_autoscaler_keeps_the_number_that_there_is(api_server: str):
    rendered = in_cluster(api_server, AUTOSCALED)
    assert (replicas(rendered, "frontend"), replicas(rendered, "enginecore")) == (7, 5)


def test_an_autoscaled_deployment_that_is_not_there_yet_has_no_number(api_server: str):
    rendered = in_cluster(api_server, HUB, "enginecore.pools.new.autoscaling.mode=hpa")
    assert replicas(rendered, "enginecore-new") is None


def test_a_number_that_was_an_autoscalers_from_the_start_is_left_to_it(api_server: str):
    rendered = in_cluster(api_server, HUB, "enginecore.pools.old.autoscaling.mode=hpa")
    assert replicas(rendered, "enginecore-old") is None
    assert remembered(rendered, "enginecore-old")
    assert not remembered(in_cluster(api_server, AUTOSCALED), "frontend")
    assert remembered(release(AUTOSCALED), "frontend")
    assert not remembered(release(HUB), "frontend")


def test_an_autoscaler_keeps_the_number_of_groups_that_there_is(api_server: str):
    assert in_cluster(api_server, MULTINODE).workload("enginecore")["spec"]["replicas"] == 3


def test_an_upgrade_keeps_the_pods_of_a_group_that_operators_have_asked_for(api_server: str):
    asked = in_cluster(api_server, GROUPS)
    assert asked.workload("enginecore")["spec"]["replicas"] == 6
    assert asked.workload("enginecore-wide")["spec"]["replicas"] == 4  # the pool's Deployment does not exist yet


def test_without_a_cluster_to_look_at_an_autoscaled_deployment_has_no_number():
    assert replicas(release(AUTOSCALED), "frontend") is None
    assert replicas(release(AUTOSCALED), "enginecore") is None


def test_operators_go_on_from_the_charts_number(api_server: str):
    by_hand = ("coordinator.kubernetes.scale=true", "enginecore.replicas=3")
    assert replicas(release(HUB, *by_hand), "enginecore") == 3
    assert replicas(in_cluster(api_server, HUB, *by_hand), "enginecore") == 5
    new = in_cluster(api_server, HUB, *by_hand, "enginecore.pools.new.replicas=4")
    assert replicas(new, "enginecore-new") == 4
    assert not remembered(new, "enginecore-new")
    old = in_cluster(api_server, HUB, *by_hand, "enginecore.pools.old.replicas=4")
    assert replicas(old, "enginecore-old") is None


def test_without_an_autoscaler_the_number_is_the_charts(api_server: str):
    for rendered in (in_cluster(api_server, HUB), release(HUB)):
        assert (replicas(rendered, "frontend"), replicas(rendered, "enginecore")) == (2, 1)
    assert replicas(release(BARE), "enginecore") == 0


def rollout(name: str, component: str, *settings: str) -> tuple[Any, Any]:
    update = release(name, *settings).one("Deployment", component)["spec"]["strategy"]["rollingUpdate"]
    return update["maxSurge"], update["maxUnavailable"]


@pytest.mark.parametrize(
    ("replicas", "expected"), [(1, (1, 0)), (2, (0, 1)), (9, (0, 1))], ids=["one engine", "two", "many"]
)
def test_engines_roll_without_a_spare_gpu_unless_there_is_but_one(replicas: int, expected: tuple[int, int]):
    assert rollout(HUB, "enginecore", f"enginecore.replicas={replicas}") == expected


def test_an_autoscaled_engine_rolls_as_the_fewest_do():
    autoscaled = ("enginecore.autoscaling.mode=hpa", "enginecore.replicas=8")
    assert rollout(HUB, "enginecore", *autoscaled, "enginecore.autoscaling.minReplicas=1") == (1, 0)
    assert rollout(HUB, "enginecore", *autoscaled, "enginecore.autoscaling.minReplicas=2") == (0, 1)


def test_what_needs_no_gpu_is_there_before_another_goes():
    assert rollout(HUB, "frontend", "frontend.replicas=5") == (1, 0)
    assert rollout(DEMO, "enginecore", "enginecore.replicas=5") == (1, 0)
    assert rollout(POOLS, "enginecore-spot") == (1, 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("maxSurge=2",), (2, 0)),
        (("maxSurge=25%", "maxUnavailable=1"), ("25%", 1)),
        (("maxSurge=0",), (0, 1)),
        (("maxSurge=0%",), ("0%", 1)),
        (("maxUnavailable=2",), (0, 2)),
    ],
    ids=str,
)
def test_what_is_given_wins(given: tuple[str, ...], expected: tuple[Any, Any]):
    settings = (f"enginecore.rollingUpdate.{setting}" for setting in given)
    assert rollout(HUB, "enginecore", "enginecore.replicas=4", *settings) == expected


@pytest.mark.parametrize("key", ["frontend", "enginecore", "enginecore.pools.a"])
def test_a_rollout_that_could_replace_nothing_is_refused(key: str):
    settings = (f"{key}.rollingUpdate.maxSurge=0", f"{key}.rollingUpdate.maxUnavailable=0%")
    with pytest.raises(ChartError, match=rf"{key}.rollingUpdate: maxSurge and maxUnavailable are both 0"):
        release(HUB, *settings)


@pytest.mark.parametrize("component", ["frontend", "enginecore", "coordinator"])
def test_why_a_container_ended_is_shown_with_its_pod(component: str):
    container = release(DEMO).one("Deployment", component)["spec"]["template"]["spec"]["containers"][0]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
