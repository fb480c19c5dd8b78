"""The endpoint picker of the Gateway API inference extension, and an Envoy that calls it, from the project's chart."""

import shutil
import tempfile
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.release import Release, connects
from tests.cluster.system.programs import until
from tests.cluster.tools.build import download
from tests.cluster.tools.components import COMPONENTS

COMPONENT = COMPONENTS["endpoint-picker"]
IMAGE = "penstock.test/epp:1"
ENVOY_IMAGE = "penstock.test/tools:1"
ENVOY = "/opt/tools/envoy/_bin/envoy"
PORT, METRICS_PORT = 8081, 9090
SMALL = {"requests": {"cpu": "50m", "memory": "64Mi"}}


def service(pool: str) -> str:
    """Return the picker's name for ``endpointPickerRef`` of an InferencePool."""
    return f"{pool}-epp"


def install_picker(release: Release, pool: str) -> str:
    """Install the picker of the InferencePool ``pool`` in the release's namespace, and return its address.

    Envoy listens for HTTP at ``PORT`` and forwards each request to the endpoint that the picker chooses. The picker
    serves metrics at ``METRICS_PORT``.
    """
    release.cluster.import_program("endpoint-picker", "epp", IMAGE)
    release.cluster.control_plane.apply(yaml.safe_dump_all(_manifests(release, pool)))
    name = service(pool)
    release.kubectl("rollout", "status", f"deployment/{name}", "--timeout=180s")
    address = release.kubectl("get", "service", name, "-o", "jsonpath={.spec.clusterIP}")
    until(f"{name} reached", lambda: connects(address, METRICS_PORT))
    until(f"{name} passes requests on", lambda: _passes_on(address))
    return address


def _passes_on(address: str) -> bool:
    """Return whether requests are forwarded.

    Envoy returns errors until the picker is healthy, and the picker returns errors until it knows endpoints.
    """
    try:
        with urllib.request.urlopen(f"http://{address}:{PORT}/v1/models", timeout=10) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False


def _manifests(release: Release, pool: str) -> list[dict[str, Any]]:
    """Return the chart's objects except the InferencePool, which exists already."""
    published = download(COMPONENT.module, COMPONENT.version) / "config" / "charts"
    with tempfile.TemporaryDirectory() as folder:
        chart = Path(folder) / "standalone"
        shutil.copytree(published / "standalone", chart, copy_function=shutil.copyfile)
        chart.chmod(0o755)  # folders copied from the module cache are read-only
        shutil.copytree(published / "epplib", chart / "charts" / "epplib", copy_function=shutil.copyfile)
        values = Path(folder) / "values.yaml"
        values.write_text(yaml.safe_dump(_values()), encoding="utf-8")
        rendered = release.helm("template", pool, str(chart), "--values", str(values))
    found = [each for each in yaml.safe_load_all(rendered) if each and each["kind"] != "InferencePool"]
    (deployment,) = [each for each in found if each["kind"] == "Deployment"]
    (picker,) = [each for each in deployment["spec"]["template"]["spec"]["containers"] if each["name"] == "epp"]
    picker.update(image=IMAGE, imagePullPolicy="Never")
    for each in found:
        each["metadata"]["namespace"] = release.namespace
    return found


def _values() -> dict[str, Any]:
    """Return chart values for this cluster: local images, less memory, and metrics without authentication."""
    envoy = {"image": ENVOY_IMAGE, "imagePullPolicy": "Never", "command": ENVOY, "resources": SMALL}
    arguments = ["--service-node", "envoy", "--log-level", "warning", "-c", "/etc/envoy/envoy.yaml"]
    return {
        "inferencePool": {"modelServers": {"matchLabels": {"unused": "unused"}}},
        "inferenceExtension": {
            "resources": SMALL,
            "monitoring": {"prometheus": {"auth": {"enabled": False}}},
            "sidecar": {**envoy, "args": arguments},
        },
    }
