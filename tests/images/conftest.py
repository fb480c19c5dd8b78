"""Fixtures for the images that ``make cluster-images`` has built. One image is open at a time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.images import buildah
from tests.cluster.images.build import Release
from tests.cluster.images.sources import chart_version
from tests.images.container import Image, why_not

RELEASE = Release(chart_version(), commit="")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests, with the reason, if no image can run. pytest also passes the tests of other folders."""
    if reason := why_not():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason=reason))


def opened(service: str) -> Iterator[Image]:
    """Yield the image of a service. Skips the test if the image is not built."""
    name = RELEASE.name(service)
    if buildah.inspect(name) is None:
        pytest.skip(f"{name} is not built: make cluster-images IMAGES={service}")
    with Image(name) as image:
        yield image


@pytest.fixture(scope="session")
def coordinator() -> Iterator[Image]:
    yield from opened("coordinator")


@pytest.fixture(scope="session")
def frontend() -> Iterator[Image]:
    yield from opened("frontend")


@pytest.fixture(scope="session")
def oracle_engine() -> Iterator[Image]:
    yield from opened("oracle-engine")


@pytest.fixture(scope="session")
def enginecore() -> Iterator[Image]:
    """Yield the image of the engine with torch. The default build does not include this image."""
    yield from opened("enginecore")


@pytest.fixture(params=["coordinator", "frontend", "enginecore"])
def image(request: pytest.FixtureRequest) -> Image:
    """Return an image of the project."""
    found: Image = request.getfixturevalue(request.param)
    return found
