"""A complete cluster: control plane, nodes, the network between them, and the name service."""

import contextlib
import http.client
import json
import shutil
import ssl
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.images.scratch import write_image
from tests.cluster.system import containerd
from tests.cluster.system.addons import COREDNS_IMAGE, DNS
from tests.cluster.system.addresses import CLUSTER_DOMAIN, CONTROL_PLANE, DNS_SERVICE, SERVICES
from tests.cluster.system.control_plane import ControlPlane
from tests.cluster.system.node import Node, kube_proxy
from tests.cluster.system.pki import Pki
from tests.cluster.system.programs import alone, built, run, until
from tests.cluster.tools.build import ROOT
from tests.cluster.tools.components import NEWEST

GPU_TAINT = "nvidia.com/gpu=present:NoSchedule"
GPU_NODE = 3
GPUS = {"nvidia.com/gpu": 2, "nvidia.com/mig-1g.10gb": 2}


class Cluster:
    """A cluster in the network namespace of this process. The namespace should be new.

    Args:
        directory: Directory for the cluster's state and logs.
        images: Image archives that every node gets.
    """

    def __init__(self, directory: Path, *, minor: str = NEWEST, nodes: int = 4, images: Sequence[Path] = ()) -> None:
        self.directory = directory
        shutil.rmtree(directory, ignore_errors=True)
        self.pki = pki = Pki.create(directory / "pki")
        with alone():
            unpacked = containerd.filled([*own_images(), *images])
        self.control_plane = ControlPlane(minor, pki, directory / "control-plane")
        self.nodes = [
            Node(
                number,
                pki,
                directory / f"node-{number}",
                images=unpacked,
                taints=(GPU_TAINT,) if number == GPU_NODE else (),
            )
            for number in range(1, nodes + 1)
        ]
        self._proxy = kube_proxy("control-plane", pki, directory / "control-plane")

    def start(self) -> float:
        """Start the cluster. Returns the seconds until every node was ready and names resolved."""
        begun = time.monotonic()
        self._make_network()
        numbers = [node.number for node in self.nodes]
        for node in self.nodes:
            node.start([number for number in numbers if number != node.number])
        self.control_plane.start()
        self._proxy.start()
        for node in self.nodes:
            node.kubelet.start()
        self.wait_for_nodes()
        for node in self.nodes[GPU_NODE - 1 : GPU_NODE]:
            node.offer_gpus(**GPUS)
        self.control_plane.apply(DNS)
        self._resolve_names()
        self.kubectl("--namespace", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=120s")
        return time.monotonic() - begun

    def wait_for_nodes(self) -> None:
        """Wait until every node is ready."""
        until("nodes ready", self._nodes_ready)

    def import_program(self, component: str, program: str, image: str, *, path: str = "") -> None:
        """Import an image with a built program into every node.

        The program is at ``path`` in the image, or at ``/PROGRAM`` if ``path`` is empty.
        """
        archive = ROOT / "images" / f"{program}.tar"
        inside = path or f"/{program}"
        source = Path(built(component, program))
        with alone():
            if not archive.exists() or archive.stat().st_mtime < source.stat().st_mtime:
                write_image(archive, image, {inside: source}, [inside])
        for node in self.nodes:
            node.import_image(archive)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run ``kubectl`` as the cluster's administrator and return its output."""
        return run(*self.control_plane.kubectl, *arguments, stdin=stdin)

    def patch(self, path: str, body: dict[str, Any], *, user: str) -> tuple[int, dict[str, Any]]:
        """PATCH an object as ``user`` without reading the object first. Returns the status and the answer."""
        pki = self.directory / "pki"
        trust = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        trust.load_cert_chain(str(pki / "admin.crt"), str(pki / "admin.key"))
        headers = {"Content-Type": "application/strategic-merge-patch+json", "Impersonate-User": user}
        connection = http.client.HTTPSConnection(CONTROL_PLANE, 6443, context=trust, timeout=30)
        with contextlib.closing(connection):
            connection.request("PATCH", path, json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def stop(self) -> None:
        """Stop all programs of the cluster."""
        for node in self.nodes:
            node.stop()
        plane = self.control_plane
        for program in (self._proxy, plane.scheduler, plane.controllers, plane.api_server, plane.etcd):
            program.stop()

    def _make_network(self) -> None:
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "nodes0", "type", "bridge")
        run("ip", "address", "add", f"{CONTROL_PLANE}/24", "dev", "nodes0")
        run("ip", "link", "set", "nodes0", "up")
        # Addresses of Services are translated on output, which requires a route for them.
        run("ip", "route", "add", SERVICES, "dev", "nodes0")
        run("sysctl", "-q", "-w", "net.ipv4.ip_forward=1")

    def _resolve_names(self) -> None:
        """Let programs on the control plane's host, such as the tests' clients, resolve the names of Services."""
        own = self.directory / "resolv.conf"
        own.write_text(f"nameserver {DNS_SERVICE}\nsearch svc.{CLUSTER_DOMAIN} {CLUSTER_DOMAIN}\n")
        run("mount", "--bind", str(own), "/etc/resolv.conf")

    def _nodes_ready(self) -> bool:
        path = "{.items[*].status.conditions[?(@.type=='Ready')].status}"
        states = self.kubectl("get", "nodes", "-o", f"jsonpath={path}").split()
        return states == ["True"] * len(self.nodes)


def own_images() -> list[Path]:
    """Return the images of the cluster's own pods; missing ones are written."""
    directory = ROOT / "images"
    pause, coredns = directory / "pause.tar", directory / "coredns.tar"
    if not pause.exists():
        directory.mkdir(parents=True, exist_ok=True)
        program = ROOT / "bin" / "pause"
        source = Path(__file__).parents[1] / "images" / "pause.c"
        subprocess.run(["gcc", "-Os", "-static", "-o", str(program), str(source)], check=True)
        write_image(pause, containerd.PAUSE, {"/pause": program}, ["/pause"])
    if not coredns.exists():
        write_image(coredns, COREDNS_IMAGE, {"/coredns": Path(built("coredns", "coredns"))}, ["/coredns"])
    return [pause, coredns]
