"""Network policies, tested on every listening port: pods can connect to exactly the ports that the policies allow."""

import asyncio
import itertools
import json
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.conftest import NewRelease
from tests.cluster.images.sources import chart_version
from tests.cluster.load import Clients, undisturbed
from tests.cluster.release import Release
from tests.cluster.system.addresses import CONTROL_PLANE
from tests.cluster.system.cluster import Cluster
from tests.cluster.system.policies import firewalls
from tests.cluster.tools.build import PROGRAMS
from tests.cluster.values import MODEL, merged, oracle

CLIENTS, MONITORING, ELSEWHERE = "policies-clients", "policies-monitoring", "policies-elsewhere"
COMPONENTS = ("frontend", "enginecore", "coordinator")
PATIENCE = 120.0

# Prints the listening ports of a pod's network, on all addresses except loopback, over IPv4 and IPv6.
LISTENING = """
import json
ports = set()
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{table}").readlines()[1:]:
        address, _, state = line.split()[1:4]
        host, _, port = address.partition(":")
        if state == "0A" and not host.endswith(("0100007F", "00000000000000000000000001000000")):
            ports.add(int(port, 16))
print(json.dumps(sorted(ports)))
"""

REACH = """
import asyncio, json, sys

async def reaches(host, port):
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 3)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True

async def main():
    targets = json.loads(sys.argv[1])
    print(json.dumps(await asyncio.gather(*(reaches(host, port) for host, port in targets))))

asyncio.run(main())
"""

Reached = set[tuple[str, int]]
"""Ports that a pod can connect to, as pairs of component and port."""


def why_not() -> str:
    """Return the reason why this machine cannot enforce policies; empty if it can."""
    if not (PROGRAMS / "kube-router" / "kube-router").exists():
        return "kube-router is not built: make cluster-tools"
    lacking = [package for package in ("iptables", "ipset") if shutil.which(package) is None]
    return f"kube-router needs these packages: {' '.join(lacking)}" if lacking else ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it has everything")


def namespace_of(name: str) -> dict[str, Any]:
    """Return a policy peer for all pods of a namespace."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def guarded(*clients: dict[str, Any]) -> dict[str, Any]:
    """Return values with one pod of each component, and policies that allow calls from ``clients``."""
    own = {
        "frontend": {"replicas": 1},
        "enginecore": {"replicas": 1},
        "networkPolicy": {"enabled": True, "clients": list(clients), "metrics": [namespace_of(MONITORING)]},
    }
    return oracle(own)


def pod(namespace: str, name: str, node: str) -> dict[str, Any]:
    """Create a pod that does nothing and contains Python."""
    container = {
        "name": "main",
        "image": f"penstock/frontend:{chart_version()}",
        "imagePullPolicy": "Never",
        "command": ["python", "-c", "import signal; signal.pause()"],
    }
    spec = {"nodeName": node, "containers": [container], "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def python(cluster: Cluster, namespace: str, name: str, *program: str) -> Any:
    """Run a program in a pod and return its JSON output."""
    return json.loads(cluster.kubectl("--namespace", namespace, "exec", name, "--", "python", "-c", *program))


def name_of(release: Release, component: str) -> str:
    """Return the name of a component's only pod."""
    (found,) = release.pods(component)
    return str(found["metadata"]["name"])


class Guarded:
    """A release with policies, another release without them in the same namespace, and pods that belong to neither."""

    namespaces = (CLIENTS, MONITORING, ELSEWHERE)

    def __init__(self, release: Release, other: Release) -> None:
        self.release = release
        self.other = other
        self.cluster = release.cluster
        self.targets: list[tuple[str, str, int]] = []
        """Ports to connect to, as component, address and port."""
        for component in COMPONENTS:
            name = name_of(release, component)
            address = release.kubectl("get", "pod", name, "-o", "jsonpath={.status.podIP}")
            ports = python(self.cluster, release.namespace, name, LISTENING)
            self.targets += [(component, address, port) for port in ports]

    def add_others(self) -> None:
        """Add a pod on each of two nodes, in each of four namespaces: the release's, the clients', monitoring, and
        another one.
        """
        objects = [
            *({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": each}} for each in self.namespaces),
            *(
                pod(namespace, f"pod-{node}", node)
                for namespace, node in itertools.product(
                    [self.release.namespace, *self.namespaces], ["node-1", "node-2"]
                )
            ),
        ]
        listed = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.cluster.control_plane.apply(json.dumps(listed))
        for namespace in [self.release.namespace, *self.namespaces]:
            self.cluster.kubectl(
                "--namespace", namespace, "wait", "--for=condition=Ready", "pods", "--all", "--timeout=120s"
            )

    def remove_others(self) -> None:
        """Delete the other namespaces and their pods. Pods in the release's namespace are deleted with the release."""
        self.cluster.kubectl("delete", "namespace", *self.namespaces, "--ignore-not-found", "--timeout=120s")

    def reached(self, namespace: str, name: str) -> Reached:
        """Return the release's ports that a pod can connect to."""
        addresses = json.dumps([(host, port) for _, host, port in self.targets])
        answers = python(self.cluster, namespace, name, REACH, addresses)
        found = zip(self.targets, answers, strict=True)
        return {(component, port) for (component, _, port), answer in found if answer}

    @property
    def everything(self) -> Reached:
        """Return all listening ports."""
        return {(component, port) for component, _, port in self.targets}

    async def differences(self) -> list[str]:
        """Describe every pod whose reachable ports differ from the allowed ports."""

        async def compare(namespace: str, name: str, allowed: Reached) -> str:
            found = await asyncio.to_thread(self.reached, namespace, name)
            return "" if found == allowed else f"{namespace}/{name} reaches {sorted(found)}, not {sorted(allowed)}"

        words = await asyncio.gather(*(compare(*who, allowed) for who, allowed in self.allowed().items()))
        return [word for word in words if word]

    def allowed(self) -> dict[tuple[str, str], Reached]:
        """Return the allowed connections: for the namespace and name of each pod, the ports that the pod may reach."""
        here = self.release.namespace
        # Policies do not apply to connections from a pod to itself.
        own = {each: {(name, port) for name, port in self.everything if name == each} for each in COMPONENTS}
        clients = {("frontend", 50051), ("frontend", 8000)}
        metrics = {("frontend", 8000), ("enginecore", 9100), ("coordinator", 9100)}
        others = {
            (namespace, f"pod-{node}"): reached
            for namespace, reached in ((CLIENTS, clients), (MONITORING, metrics), (ELSEWHERE, set()), (here, set()))
            for node in ("node-1", "node-2")
        }
        return {
            **others,
            **{(here, name_of(self.other, component)): set() for component in COMPONENTS},
            (here, name_of(self.release, "frontend")): own["frontend"]
            | {("enginecore", 50052), ("coordinator", 50050)},
            (here, name_of(self.release, "enginecore")): own["enginecore"] | {("coordinator", 50050)},
            (here, name_of(self.release, "coordinator")): own["coordinator"],
        }


@pytest.fixture
def scene(new_release: NewRelease) -> Iterator[Guarded]:
    """Yield running releases with all pods. Policies are not enforced yet."""
    release = new_release()
    # The tests' clients run on the host of the control plane.
    release.install(guarded(namespace_of(CLIENTS), {"ipBlock": {"cidr": f"{CONTROL_PLANE}/32"}}))
    other = new_release("other", namespace=release.namespace)
    other.install(oracle({"frontend": {"replicas": 1}, "enginecore": {"replicas": 1}}))
    made = Guarded(release, other)
    try:
        made.add_others()
        yield made
    finally:
        made.remove_others()


async def test_a_pod_reaches_what_the_policies_allow(scene: Guarded) -> None:
    listening = {component: {port for name, port in scene.everything if name == component} for component in COMPONENTS}
    assert listening == {"frontend": {50051, 8000}, "enginecore": {50052, 9100}, "coordinator": {50050, 9100}}
    strangers = [(ELSEWHERE, "pod-node-1"), (scene.release.namespace, name_of(scene.other, "frontend"))]
    for namespace, name in strangers:
        assert scene.reached(namespace, name) == scene.everything, "without a firewall all of it"
    async with Clients(scene.release.target(MODEL)) as clients:
        known = await undisturbed(clients, max_tokens=16)
    with firewalls(scene.cluster):
        deadline = time.monotonic() + PATIENCE
        while (different := await scene.differences()) and time.monotonic() < deadline:
            await asyncio.sleep(1)
        assert different == []
        async with Clients(scene.release.target(MODEL)) as clients:
            assert await undisturbed(clients, max_tokens=16) == known
        assert "Phase:          Succeeded" in scene.release.helm("test", scene.release.name)


async def test_a_release_gets_ready_and_grows_behind_firewalls(new_release: NewRelease) -> None:
    release = new_release()
    values = guarded({"ipBlock": {"cidr": f"{CONTROL_PLANE}/32"}})
    with firewalls(release.cluster):
        release.install(values)
        async with Clients(release.target(MODEL)) as clients:
            known = await undisturbed(clients, max_tokens=16)
        release.upgrade(merged(values, {"frontend": {"replicas": 2}, "enginecore": {"replicas": 2}}))
        async with Clients(release.target(MODEL)) as clients:
            assert await undisturbed(clients, max_tokens=16) == known
