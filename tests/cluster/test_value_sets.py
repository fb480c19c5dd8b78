"""A real API server accepts the chart's objects for every tested set of values."""

import re
from pathlib import Path

import pytest

from charts import lint
from tests.cluster.conftest import NewRelease
from tests.cluster.system.cluster import Cluster
from tests.cluster.system.definitions import define


@pytest.fixture(scope="module", autouse=True)
def definitions(cluster: Cluster) -> None:
    """Define the kinds of other API groups, such as Gateways and monitors."""
    define(cluster)


@pytest.mark.parametrize("values", lint.value_sets(), ids=lambda path: path.stem.removesuffix("-values"))
def test_the_api_server_takes_every_object(new_release: NewRelease, values: Path) -> None:
    release = new_release(namespace="value-sets")
    needed = min(tuple(map(int, version.split("."))) for version in lint.kube_versions(values))
    if release.cluster.control_plane.version < needed:
        pytest.skip(f"the values need Kubernetes {'.'.join(map(str, needed))}")
    kubectl = release.cluster.kubectl
    kubectl("create", "namespace", release.namespace)
    server = release.cluster.control_plane.server_version
    manifests = release.helm(
        "template", release.name, str(release.chart), "--values", str(values), "--kube-version", server
    )
    for account in set(re.findall(r"serviceAccountName: (\S+)", manifests)):
        kubectl(
            "--namespace", release.namespace, "create", "serviceaccount", account
        )  # the API server refuses pods without their service account
    taken = kubectl(
        "--namespace", release.namespace, "apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=manifests
    )
    assert len(taken.splitlines()) == manifests.count("\nkind: ")
