"""One cluster for all tests of a run. ``make cluster-test`` creates the namespaces that it needs."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.namespaces import why_not
from tests.cluster.release import Release
from tests.cluster.system.cluster import Cluster
from tests.cluster.tools.build import ROOT
from tests.cluster.tools.components import NEWEST

HELMS = {"3": Path(".venv/bin/helm").absolute(), "4": ROOT / "bin" / "helm-4" / "helm"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests, with the reason, if no cluster can run. pytest also passes the tests of other folders."""
    if reason := why_not():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster(worker_id: str) -> Iterator[Cluster]:
    """Yield a cluster with four nodes. One node has the usual taint of GPU nodes."""
    directory = ROOT / ("run" if worker_id == "master" else f"run-{worker_id}")
    images = sorted([*(ROOT / "images").glob("penstock-*.tar"), *(ROOT / "images").glob("torch-*.tar")])
    cluster = Cluster(directory, minor=os.environ.get("PENSTOCK_CLUSTER_MINOR", NEWEST), images=images)
    try:
        print(f"cluster up in {cluster.start():.0f} s; its logs are in {directory}")
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(params=sorted(HELMS))
def helm(request: pytest.FixtureRequest) -> str:
    """Return the path of helm, for each supported version."""
    return str(HELMS[request.param])


NewRelease = Callable[..., Release]


@pytest.fixture
def new_release(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[NewRelease]:
    """Yield a function that creates releases. The fixture removes the releases and their namespaces after the test."""
    made: list[Release] = []

    def make(name: str = "demo", *, namespace: str = "", helm: str = str(HELMS["3"]), **options: Any) -> Release:
        own = namespace or request.node.name.split("[")[0].removeprefix("test_").replace("_", "-")[:40].strip("-")
        made.append(Release(cluster, helm, name, own, **options))
        return made[-1]

    yield make
    for release in made:
        release.remove()
