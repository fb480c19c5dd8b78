"""Resources of other projects that the chart has objects of, from the modules in which these publish their definitions."""

from tests.cluster.system.cluster import Cluster
from tests.cluster.tools.build import download
from tests.cluster.tools.components import COMPONENTS

KEDA, PICKER = COMPONENTS["keda"], COMPONENTS["endpoint-picker"]
PUBLISHED = [
    (
        "sigs.k8s.io/gateway-api",
        "v1.6.0",
        "config/crd/standard",
        "*routes.yaml *gateways.yaml *gatewayclasses.yaml *grants.yaml *policies.yaml",
    ),
    (PICKER.module, PICKER.version, "config/crd/bases", "inference.networking.*.yaml"),
    ("github.com/cert-manager/cert-manager", "v1.19.1", "deploy/crds", "cert-manager.io_*.yaml"),
    (
        "github.com/prometheus-operator/prometheus-operator",
        "v0.92.1",
        "example/prometheus-operator-crd",
        "*_podmonitors.yaml *_prometheusrules.yaml",
    ),
    (KEDA.module, KEDA.version, "config/crd/bases", "keda.sh_*.yaml"),
]
"""Module, version, directory and the names of files in it."""


def define(cluster: Cluster) -> None:
    """Let the API server take such objects. Nothing acts on them."""
    for module, version, directory, names in PUBLISHED:
        source = download(module, version) / directory
        files = sorted({path for name in names.split() for path in source.glob(name)})
        cluster.control_plane.apply("\n---\n".join(path.read_text() for path in files))
    cluster.kubectl("wait", "--for=condition=Established", "crds", "--all", "--timeout=60s")
