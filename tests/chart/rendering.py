"""The chart, rendered once per set of values, and functions to find parts of its manifests."""

import functools
from pathlib import Path
from typing import Any

import msgspec
import yaml

from charts import lint
from charts.config_schema import STRUCTS
from penstock_common.config import loader

HUB = "hub"
AUTOSCALED = "autoscaled-gpu"
BARE = "volume-bare"
DEMO = "cpu-demo"
POOLS = "pools"
EXPOSED = "exposed"
CLAIMED = "claimed-gpu"
OCI = "oci"
FETCHED = "fetched"
MULTINODE = "multinode"
GROUPS = "groups"
WORKER = "/worker"
"""Suffix of a pool's name: the additional pods of an engine with several pods."""
POD_IP = "10.0.0.7"
IN_CLUSTER = {
    "LWS_LEADER_ADDRESS": "engine-0.engine.serving",
    "LWS_WORKER_INDEX": "1",
    "POD_IP": POD_IP,
    "POD_NAME": "pod-3",
}
"""Environment variables that the cluster sets. The LeaderWorkerSet controller sets the first two, as for a second pod.
"""
VALUE_SETS = {path.name.removesuffix("-values.yaml"): path for path in lint.value_sets()}
SERVICES = ("frontend", "enginecore", "coordinator")


class Release:
    """The manifests of one release."""

    def __init__(self, manifests: list[dict[str, Any]]) -> None:
        self.manifests = manifests

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [m for m in self.manifests if m["kind"] == kind]

    def one(self, kind: str, component: str, *, suffix: str = "") -> dict[str, Any]:
        name = f"-{component.removesuffix(WORKER)}{suffix}"
        found = [m for m in self.all(kind) if m["metadata"]["name"].endswith(name)]
        assert len(found) == 1, (kind, component, found)
        return found[0]

    def components(self) -> list[str]:
        """Return the components by the ends of their workloads' names.

        They are the services, and the pools of engines as ``enginecore-NAME``. If an engine has several pods, the
        additional pods are another component, ``enginecore-NAME/worker``.
        """
        found = []
        for workload in (*self.all("Deployment"), *self.all("LeaderWorkerSet"), *self.all("StatefulSet")):
            labels = workload["metadata"]["labels"]
            component, pool = labels["app.kubernetes.io/component"], labels.get("penstock.io/pool", "default")
            found.append(component if pool == "default" else f"{component}-{pool}")
            if workload["kind"] == "LeaderWorkerSet":
                found.append(found[-1] + WORKER)
        return found

    def workload(self, component: str) -> dict[str, Any]:
        """Return the workload that creates the component's pods."""
        others = [
            m
            for m in (*self.all("LeaderWorkerSet"), *self.all("StatefulSet"))
            if m["metadata"]["name"].endswith(f"-{component.removesuffix(WORKER)}")
        ]
        return others[0] if others else self.one("Deployment", component)

    def pod(self, component: str) -> dict[str, Any]:
        workload = self.workload(component)
        if workload["kind"] != "LeaderWorkerSet":
            return workload["spec"]["template"]
        return workload["spec"]["leaderWorkerTemplate"][
            "workerTemplate" if component.endswith(WORKER) else "leaderTemplate"
        ]

    def pod_spec(self, component: str) -> dict[str, Any]:
        return self.pod(component)["spec"]

    def container(self, component: str, rank: int = 0) -> dict[str, Any]:
        """Return a container of a component. ``rank`` selects one of several engines in a pod."""
        return self.pod_spec(component)["containers"][rank]

    def before(self, component: str) -> dict[str, dict[str, Any]]:
        """Return the containers that start before the service's container."""
        return {container["name"]: container for container in self.pod_spec(component).get("initContainers", [])}

    def env(self, component: str, rank: int = 0) -> dict[str, dict[str, Any]]:
        return {entry["name"]: entry for entry in self.container(component, rank)["env"]}

    def volumes(self, component: str) -> dict[str, dict[str, Any]]:
        return {volume["name"]: volume for volume in self.pod_spec(component)["volumes"]}

    def mounts(self, component: str) -> dict[str, dict[str, Any]]:
        return {mount["mountPath"]: mount for mount in self.container(component)["volumeMounts"]}

    def config_text(self, component: str) -> str:
        return self.one("ConfigMap", component)["data"]["config.yaml"]

    def config(self, component: str) -> dict[str, Any]:
        return yaml.safe_load(self.config_text(component))


@functools.cache
def release(name: str = HUB, *settings: str, kube_version: str = "") -> Release:
    """Return the release of the value set ``name`` with additional ``key=value`` settings.

    The release is rendered for the oldest version of Kubernetes that the value set supports. Raises ChartError.
    """
    version = kube_version or lint.kube_versions(VALUE_SETS[name])[0]
    return Release(lint.render(VALUE_SETS[name], settings=settings, kube_version=version))


def load(rendered: Release, component: str, folder: Path, rank: int = 0) -> msgspec.Struct:
    """Return the configuration that a service or a pool of engines reads from its file and environment.

    ``rank`` selects one of several engines in a pod.
    """
    file = folder / "config.yaml"
    file.write_text(rendered.config_text(component), encoding="utf-8")
    environ = {name: entry.get("value", "from-the-cluster") for name, entry in rendered.env(component, rank).items()}
    for name, value in IN_CLUSTER.items():
        environ = {own: text.replace(f"$({name})", value) for own, text in environ.items()}
    return loader.load(STRUCTS[service_of(component)], file=file, environ=environ)


def service_of(component: str) -> str:
    """Return the service that runs in a component's pods."""
    return component.removesuffix(WORKER).partition("-")[0]


def notes(tmp_path: Path, name: str, *settings: str) -> str:
    """Return NOTES.txt of a release.

    ``helm template`` leaves out the notes, so a copy of the chart renders them as a manifest.
    """
    chart = tmp_path / "chart"
    chart.mkdir()
    for part in ("Chart.yaml", "values.yaml", "values.schema.json", "values_needs.json", "templates"):
        (chart / part).symlink_to(lint.CHART / part)
    (chart / "templates").unlink()
    (chart / "templates").mkdir()
    for path in (lint.CHART / "templates").iterdir():
        (chart / "templates" / path.name).symlink_to(path)
    text = (lint.CHART / "templates" / "NOTES.txt").read_text(encoding="utf-8")
    (chart / "templates" / "notes.yaml").write_text(
        f'{{{{ define "notes" }}}}{text}{{{{ end }}}}kind: Notes\ntext: |\n  {{{{ include "notes" . | nindent 2 | trim }}}}\n'
    )
    manifests = lint.render(VALUE_SETS[name], settings=settings, chart=chart)
    return next(m["text"] for m in manifests if m["kind"] == "Notes")
