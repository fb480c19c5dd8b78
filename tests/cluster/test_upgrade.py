"""Upgrade from the previous release to the current one, and rollback, while clients make calls."""

import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import NewRelease
from tests.cluster.images.sources import chart_version
from tests.cluster.load import Clients, Load, undisturbed
from tests.cluster.release import Release
from tests.cluster.test_disruption import MAX_TOKENS, SLOW, in_background
from tests.cluster.tools.build import ROOT
from tests.cluster.values import MODEL, ORACLE_ENGINE, merged, oracle

BEFORE = "6426839c7670e2b1d44d03e59f4db680a21256dd"
"""Commit that represents the previous release.

``python -m tests.cluster.images.build --commit BEFORE --version 0.0.9`` builds its images.
"""
VERSION = "0.0.9"
NEW = chart_version()
ORDERS = [
    ("enginecore", "frontend", "coordinator"),
    ("coordinator", "enginecore", "frontend"),
    ("frontend", "coordinator", "enginecore"),
]
"""Orders in which services are upgraded. Each mixture of the two releases occurs once."""
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def chart_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the chart of the previous release."""
    if not (ROOT / "images" / f"penstock-frontend-{VERSION}.tar").exists():
        pytest.skip(f"the images of {VERSION} are not built")
    directory = tmp_path_factory.mktemp("before")
    archived = subprocess.run(
        ["git", "archive", BEFORE, "charts/penstock"], cwd=REPOSITORY, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archived)) as tar:
        tar.extractall(directory, filter="data")
    return directory / "charts" / "penstock"


def values_before(chart: Path) -> dict[str, Any]:
    """Return the values of the previous chart's CPU profile, with oracle engines."""
    profile = yaml.safe_load((chart / "profiles" / "cpu-demo-values.yaml").read_text())
    small = {"requests": {"cpu": "50m", "memory": "128Mi"}}
    own = {
        "frontend": {"replicas": 2, "image": {"tag": VERSION}, "resources": small},
        "coordinator": {"image": {"tag": VERSION}, "resources": small},
        "enginecore": {"replicas": 2, "image": {"repository": ORACLE_ENGINE, "tag": VERSION}, "resources": small},
    }
    return merged(merged(profile, own), SLOW)


async def test_upgrade_and_rollback_fail_no_call(new_release: NewRelease, chart_before: Path) -> None:
    release = new_release(chart=chart_before)
    release.install(values_before(chart_before))
    after = new_release()

    def there_and_back() -> None:
        after.upgrade(oracle(SLOW))
        release.helm("rollback", release.name, "1", "--wait", "--timeout", "4m")

    # Draining frontends of the previous release refuse new calls on open connections, so clients need a retry policy.
    async with Clients(release.target(MODEL)) as clients:
        known = await undisturbed(clients, MAX_TOKENS)
        async with Load(clients, known, streams=6, max_tokens=MAX_TOKENS, kinds=["published"]) as load:
            await load.calls(12)
            await in_background(there_and_back)
            await load.calls(12)
    assert load.wrong == []


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
async def test_each_mixture_of_versions_serves(
    new_release: NewRelease, chart_before: Path, order: tuple[str, ...]
) -> None:
    """Upgrades the services one after the other, with load before, between and after the upgrades."""
    release = new_release(chart=chart_before)
    release.install(values_before(chart_before))
    deployments = {name: f"deployment/{release.fullname}-{name}" for name in order}
    versions = []
    async with Clients(release.target(MODEL)) as clients:
        known = await undisturbed(clients, MAX_TOKENS)
        async with Load(clients, known, streams=6, max_tokens=MAX_TOKENS, kinds=["published"]) as load:
            for deployment in deployments.values():
                release.kubectl("rollout", "pause", deployment)
            new_release().upgrade(oracle(SLOW), "--wait=false")
            for name in order:
                versions.append({component: version_of(release, component) for component in sorted(order)})
                await load.calls(12)
                await in_background(roll, release, deployments[name])
            await load.calls(12)
    assert load.wrong == []
    assert versions == [{name: NEW if name in order[:done] else VERSION for name in sorted(order)} for done in range(3)]


def roll(release: Release, deployment: str) -> None:
    """Resume a paused Deployment and wait until its rollout is complete."""
    release.kubectl("rollout", "resume", deployment)
    release.kubectl("rollout", "status", deployment, "--timeout=180s")


def version_of(release: Release, component: str) -> str:
    """Return the version that all pods of the component run."""
    images = {str(pod["spec"]["containers"][0]["image"]) for pod in release.pods(component)}
    [version] = {image.rpartition(":")[2] for image in images}
    return version
