"""A release of the chart: helm's commands, and the state of its pods in the cluster."""

import json
import re
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.load import Target
from tests.cluster.system.cluster import Cluster
from tests.cluster.system.programs import NotUpError, until

SERVED = re.compile(r"^vllm:request_success_total\{.*\} (\S+)$", re.MULTILINE)
CHART = Path(__file__).resolve().parents[2] / "charts" / "penstock"


class HelmError(Exception):
    """Error of a helm command. The message is helm's output."""


class Release:
    """The release ``name`` in its own namespace. ``helm`` is the path of helm."""

    def __init__(self, cluster: Cluster, helm: str, name: str, namespace: str, *, chart: Path = CHART) -> None:
        self.cluster = cluster
        self.name = name
        self.namespace = namespace
        self.chart = chart
        self.helm_program = Path(helm)

    def helm(self, *arguments: str) -> str:
        """Run ``helm ARGUMENTS`` and return its output. Raises HelmError on failure."""
        config = str(self.cluster.control_plane.admin)
        done = subprocess.run(
            [self.helm_program, *arguments, "--kubeconfig", config, "--namespace", self.namespace],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise HelmError(done.stderr.strip())
        return done.stdout

    def install(self, values: Mapping[str, Any], *flags: str) -> str:
        """Run ``helm install`` and return the notes."""
        return self._with_values("install", values, "--create-namespace", *flags)

    def upgrade(self, values: Mapping[str, Any], *flags: str) -> str:
        """Run ``helm upgrade``."""
        return self._with_values("upgrade", values, *flags)

    def uninstall(self) -> None:
        """Run ``helm uninstall``, and wait until every pod has ended."""
        self.helm("uninstall", self.name, "--wait", "--timeout", "5m")

    def remove(self) -> None:
        """Remove the release's objects and its namespace, without waiting for running requests."""
        kubectl = self.cluster.kubectl
        self.helm("uninstall", self.name, "--ignore-not-found", "--no-hooks")
        kubectl("delete", "namespace", self.namespace, "--ignore-not-found", "--wait=false")
        kubectl("--namespace", self.namespace, "delete", "deployments,jobs", "--all", "--ignore-not-found")
        kubectl("--namespace", self.namespace, "delete", "pods", "--all", "--grace-period=0", "--force")
        kubectl("wait", "--for=delete", f"namespace/{self.namespace}", "--timeout=180s")

    def kubectl(self, *arguments: str) -> str:
        """Run ``kubectl`` in the release's namespace."""
        return self.cluster.kubectl("--namespace", self.namespace, *arguments)

    def objects(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """Return the release's objects of a kind."""
        labels = ",".join(filter(None, [f"app.kubernetes.io/instance={self.name}", selector]))
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, "--selector", labels, "-o", "json"))["items"]
        return items

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Return the pods of a component, without pods that are being deleted."""
        found = self.objects("pods", f"app.kubernetes.io/component={component}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def ready(self, component: str) -> list[str]:
        """Return the names of the component's ready pods."""
        return [pod["metadata"]["name"] for pod in self.pods(component) if is_ready(pod)]

    def served(self) -> dict[str, float]:
        """Return the number of answered requests of each frontend."""
        counts = {}
        for pod in self.pods("frontend"):
            url = f"http://{pod['status']['podIP']}:8000/metrics"
            with urllib.request.urlopen(url, timeout=10) as page:
                counts[pod["metadata"]["name"]] = sum(map(float, SERVED.findall(page.read().decode())))
        return counts

    @property
    def fullname(self) -> str:
        """Prefix of the names of the chart's objects."""
        return self.name if "penstock" in self.name else f"{self.name}-penstock"

    def target(self, model: str) -> Target:
        """Return the address for clients. Waits until kube-proxy on this host routes to the frontends."""
        service = self.fullname + "-frontend"
        address = self.kubectl("get", "service", service, "-o", "jsonpath={.spec.clusterIP}")
        until(f"{service} reached", lambda: connects(address, 50051))
        return Target(service=address, headless=f"{service}-headless.{self.namespace}.svc.cluster.local", model=model)

    def describe(self) -> str:
        """Return pods, warnings and logs, for the error message when the release does not become ready."""
        try:
            warnings = self.kubectl("get", "events", "--field-selector=type=Warning")
            return "\n".join([self.kubectl("get", "pods", "-o", "wide"), warnings, *self._ends()])
        except NotUpError as error:
            return str(error)

    def _ends(self) -> Iterator[str]:
        """Return the reasons why containers ended, as in ``kubectl describe``."""
        for pod in self.objects("pods"):
            for container in pod["status"].get("containerStatuses", []):
                for state in (container["state"], container["lastState"]):
                    if "terminated" in state:
                        yield f"{pod['metadata']['name']}: {state['terminated'].get('message', '')}"

    def _with_values(self, command: str, values: Mapping[str, Any], *flags: str) -> str:
        path = self.cluster.directory / f"{self.namespace}-{self.name}-values.yaml"
        path.write_text(yaml.safe_dump(dict(values)))
        try:
            return self.helm(
                command, self.name, str(self.chart), "--values", str(path), "--wait", "--timeout", "4m", *flags
            )
        except HelmError as error:
            raise HelmError(f"{error}\n{self.describe()}") from error


def connects(address: str, port: int) -> bool:
    """Return whether the address accepts connections. Waits until kube-proxy on this host routes to the address."""
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod is ready, by its conditions."""
    conditions = pod["status"].get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
