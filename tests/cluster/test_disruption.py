"""Disruptions of nodes and pods under load: every call has the same tokens as in a run without disruptions."""

import asyncio
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cluster.conftest import NewRelease
from tests.cluster.load import Clients, Load, undisturbed
from tests.cluster.release import Release
from tests.cluster.system.cluster import GPU_NODE, Cluster
from tests.cluster.system.node import Node
from tests.cluster.system.programs import NotUpError, until
from tests.cluster.values import MODEL, merged, oracle

COMPONENTS = ("frontend", "enginecore", "coordinator")
MAX_TOKENS = 40
STREAMS = 4
ROLLED = {
    "frontend": {"config": {"tokenizer_threads": 1}},
    "enginecore": {"config": {"scheduler": {"max_num_seqs": 15}}},
    "coordinator": {"config": {"lease_seconds": 6}},
}
"""Settings that services read only at start. Changing them replaces the pods."""
MOVED_SOON = {"frontend": {"config": {"server": {"max_connection_age": 20}}}}
"""Settings for short connections.

A frontend drains as long as clients may stay on a connection. The default, which the tests of upgrades use, is two
minutes.
"""
SLOW = {"enginecore": {"extraEnv": [{"name": "ORACLE_STEP_SECONDS", "value": "0.05"}]}}


class Scene:
    """A release under load."""

    def __init__(self, release: Release, values: dict[str, object]) -> None:
        self.release = release
        self.values = values


@pytest.fixture
async def scene(new_release: NewRelease) -> Scene:
    """Yield a release with two frontends and three engines. Its streams last two seconds."""
    values = oracle(merged(merged(SLOW, MOVED_SOON), {"enginecore": {"replicas": 3}}))
    release = new_release()
    release.install(values)
    return Scene(release, values)


def empty(cluster: Cluster, node: Node) -> None:
    """Run ``kubectl drain`` with the flags that are usual for node upgrades."""
    cluster.kubectl("drain", node.name, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")


async def in_background(action: object, *arguments: object) -> None:
    """Run a blocking action in a thread, concurrently with the clients."""
    await asyncio.get_running_loop().run_in_executor(None, action, *arguments)  # type: ignore[arg-type]


async def under_load(scene: Scene, action: object, *arguments: object) -> Load:
    """Run the action while every kind of client makes calls.

    Returns the results of the calls, including some calls after the action.
    """
    async with Clients(scene.release.target(MODEL)) as clients:
        known = await undisturbed(clients, MAX_TOKENS)
        async with Load(clients, known, streams=STREAMS, max_tokens=MAX_TOKENS) as load:
            await load.calls(12)
            await in_background(action, *arguments)
            await load.calls(24)
    return load


async def test_a_config_change_and_its_rollback(scene: Scene) -> None:
    release = scene.release

    def change() -> None:
        before = pod_ids(release)
        release.upgrade(merged(scene.values, ROLLED))
        assert not before & pod_ids(release)
        release.helm("rollback", release.name, "1", "--wait", "--timeout", "4m")

    load = await under_load(scene, change)
    assert load.wrong == []


async def test_a_log_level_is_read_anew_by_the_pods_there_are(scene: Scene) -> None:
    release = scene.release
    before = pod_ids(release)

    def change() -> None:
        release.upgrade(merged(scene.values, {"log": {"level": "debug"}}))
        for component in COMPONENTS:
            for pod in release.pods(component):
                name = pod["metadata"]["name"]
                until(f"another log level of {name}", functools.partial(has_reread, release, name, "log.level"))

    load = await under_load(scene, change)
    assert load.wrong == []
    assert pod_ids(release) == before
    pods = [pod for component in COMPONENTS for pod in release.pods(component)]
    assert not [pod for pod in pods if pod["status"]["containerStatuses"][0]["restartCount"]]


def pod_ids(release: Release) -> set[str]:
    """Return the unique ids of the release's pods."""
    return {pod["metadata"]["uid"] for component in COMPONENTS for pod in release.pods(component)}


def has_reread(release: Release, pod: str, setting: str) -> bool:
    """Return whether the pod's service reports a new value of the setting."""
    lines = [json.loads(line) for line in release.kubectl("logs", pod).splitlines() if line.startswith("{")]
    told = [line for line in lines if line["event"] == "applied the settings that changed in the configuration file"]
    return any(setting in line["settings"] for line in told)


async def test_every_node_is_drained_in_turn(scene: Scene, cluster: Cluster) -> None:
    def drain() -> None:
        for node in cluster.nodes:
            empty(cluster, node)
            cluster.kubectl("uncordon", node.name)

    try:
        load = await under_load(scene, drain)
    finally:
        for node in cluster.nodes:
            cluster.kubectl("uncordon", node.name)
    assert load.wrong == []


async def test_two_nodes_are_drained_at_once(scene: Scene, cluster: Cluster) -> None:
    """Drains two nodes, whose pods move to the remaining node.

    The disruption budgets limit the number of moving pods.
    """
    first, second, kept = (node for node in cluster.nodes if node.number != GPU_NODE)
    release = scene.release
    unready: list[int] = []

    def drain() -> None:
        with ThreadPoolExecutor() as threads:
            drains = [threads.submit(empty, cluster, node) for node in (first, second)]
            while not all(drain.done() for drain in drains):
                unready.append(3 - len(release.ready("enginecore")))
                unready.append(2 - len(release.ready("frontend")))
                time.sleep(0.5)
            for drain in drains:
                drain.result()

    try:
        load = await under_load(scene, drain)
        assert {pod["spec"]["nodeName"] for pod in release.pods("enginecore")} == {kept.name}
    finally:
        for node in (first, second):
            cluster.kubectl("uncordon", node.name)
    assert max(unready) <= 1
    assert load.wrong == []


async def test_the_coordinator_is_killed(scene: Scene) -> None:
    def kill() -> None:
        [pod] = scene.release.pods("coordinator")
        scene.release.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
        scene.release.kubectl("rollout", "status", f"deployment/{scene.release.fullname}-coordinator", "--timeout=120s")

    load = await under_load(scene, kill)
    assert load.wrong == []


async def test_an_engine_is_killed(scene: Scene) -> None:
    def kill() -> None:
        pod = scene.release.pods("enginecore")[0]
        scene.release.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
        scene.release.kubectl("rollout", "status", f"deployment/{scene.release.fullname}-enginecore", "--timeout=120s")

    load = await under_load(scene, kill)
    assert load.wrong == []


async def test_kubelets_are_restarted(scene: Scene, cluster: Cluster) -> None:
    def restart() -> None:
        for node in cluster.nodes:
            node.kubelet.stop()
            node.kubelet.start()
        cluster.wait_for_nodes()

    load = await under_load(scene, restart)
    assert load.wrong == []


async def test_a_node_is_lost(new_release: NewRelease, cluster: Cluster) -> None:
    release = new_release()
    kept = {"nodeSelector": {"kubernetes.io/hostname": "node-1"}}
    values = oracle(merged(SLOW, {"enginecore": {"replicas": 4}, "frontend": kept, "coordinator": kept}))
    release.install(values)
    lost = cluster.nodes[1]
    assert any(pod["spec"]["nodeName"] == lost.name for pod in release.pods("enginecore"))

    def lose() -> None:
        lost.lose()
        cluster.kubectl("wait", f"node/{lost.name}", "--for=condition=Ready=Unknown", "--timeout=120s")

    try:
        load = await under_load(Scene(release, values), lose)
    finally:
        lost.find()
        cluster.wait_for_nodes()
    assert load.wrong == []


async def test_pods_are_evicted_one_at_a_time(scene: Scene) -> None:
    """Evicts pods like a node upgrade, but faster. The disruption budgets limit the evictions."""
    release = scene.release

    def evict() -> None:
        for component in ("frontend", "enginecore"):
            for pod in release.pods(component):
                name = pod["metadata"]["name"]
                until(f"eviction of {name}", functools.partial(evicted, release, name))
                release.kubectl("rollout", "status", f"deployment/{release.fullname}-{component}", "--timeout=180s")

    load = await under_load(scene, evict)
    assert load.wrong == []


def evicted(release: Release, name: str) -> bool:
    """Return whether the API server accepted the eviction of a pod. The API server refuses if a budget is used up."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"/api/v1/namespaces/{release.namespace}/pods/{name}/eviction"
    try:
        release.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
    except NotUpError as error:
        if "disruption budget" not in str(error):
            raise
        return False
    return True
