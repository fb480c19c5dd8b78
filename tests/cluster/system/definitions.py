"""Custom resource definitions of other projects that the chart uses, from the projects' published modules."""

from tests.cluster.system.cluster import Cluster
from tests.cluster.tools.build import download
from tests.cluster.tools.components import COMPONENTS, READ

PUBLISHED = [
    (
        "sigs.k8s.io/gateway-api",
        "config/crd/standard",
        "*routes.yaml *gateways.yaml *gatewayclasses.yaml *grants.yaml *policies.yaml",
    ),
    (COMPONENTS["endpoint-picker"].module, "config/crd/bases", "inference.networking.*.yaml"),
    ("github.com/cert-manager/cert-manager", "deploy/crds", "cert-manager.io_*.yaml"),
    (
        "github.com/prometheus-operator/prometheus-operator",
        "example/prometheus-operator-crd",
        "*_podmonitors.yaml *_prometheusrules.yaml",
    ),
    ("sigs.k8s.io/lws", "config/crd/bases", "leaderworkerset.x-k8s.io_*.yaml"),
    (COMPONENTS["keda"].module, "config/crd/bases", "keda.sh_*.yaml"),
]
"""Module, directory in the module, and pattern of file names."""
VERSIONS = READ | {component.module: component.version for component in COMPONENTS.values()}


def define(cluster: Cluster) -> None:
    """Install the definitions, so that the API server accepts such objects. No controller acts on the objects."""
    for module, directory, names in PUBLISHED:
        source = download(module, VERSIONS[module]) / directory
        files = sorted({path for name in names.split() for path in source.glob(name)})
        cluster.control_plane.apply("\n---\n".join(path.read_text() for path in files))
    cluster.kubectl("wait", "--for=condition=Established", "crds", "--all", "--timeout=60s")
