"""The chart rendered once per set of values, and ways into its manifests."""

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
VALUE_SETS = {path.name.removesuffix("-values.yaml"): path for path in lint.value_sets()}
SERVICES = ("frontend", "enginecore", "coordinator")


class Release:
    """The manifests of one release."""

    def __init__(self, manifests: list[dict[str, Any]]) -> None:
        self.manifests = manifests

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [m for m in self.manifests if m["kind"] == kind]

    def one(self, kind: str, component: str, *, suffix: str = "") -> dict[str, Any]:
        found = [m for m in self.all(kind) if m["metadata"]["name"].endswith(f"-{component}{suffix}")]
        assert len(found) == 1, (kind, component, found)
        return found[0]

    def components(self) -> list[str]:
        """By the ends of the Deployments' names: the services, and the pools of engines as ``enginecore-NAME``."""
        labels = [deployment["metadata"]["labels"] for deployment in self.all("Deployment")]
        pools = [(label["app.kubernetes.io/component"], label.get("penstock.io/pool", "default")) for label in labels]
        return [component if pool == "default" else f"{component}-{pool}" for component, pool in pools]

    def pod(self, component: str) -> dict[str, Any]:
        return self.one("Deployment", component)["spec"]["template"]

    def pod_spec(self, component: str) -> dict[str, Any]:
        return self.pod(component)["spec"]

    def container(self, component: str) -> dict[str, Any]:
        (container,) = self.pod_spec(component)["containers"]
        return container

    def before(self, component: str) -> dict[str, dict[str, Any]]:
        """The containers that start before the service's own."""
        return {container["name"]: container for container in self.pod_spec(component).get("initContainers", [])}

    def env(self, component: str) -> dict[str, dict[str, Any]]:
        return {entry["name"]: entry for entry in self.container(component)["env"]}

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
    """The value set ``name`` with ``key=value`` settings on top, for the oldest Kubernetes that it needs. Raises ChartError."""
    version = kube_version or lint.kube_versions(VALUE_SETS[name])[0]
    return Release(lint.render(VALUE_SETS[name], settings=settings, kube_version=version))


def load(rendered: Release, component: str, folder: Path) -> msgspec.Struct:
    """What the service, or a pool of engines, makes of its config file and its environment."""
    file = folder / "config.yaml"
    file.write_text(rendered.config_text(component), encoding="utf-8")
    environ = {name: entry.get("value", "from-the-cluster") for name, entry in rendered.env(component).items()}
    return loader.load(STRUCTS[component.partition("-")[0]], file=file, environ=environ)


def notes(tmp_path: Path, name: str, *settings: str) -> str:
    """NOTES.txt of a release; ``helm template`` leaves it out, so that a copy of the chart renders it as a manifest."""
    chart = tmp_path / "chart"
    chart.mkdir()
    for part in ("Chart.yaml", "values.yaml", "values.schema.json", "templates"):
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
