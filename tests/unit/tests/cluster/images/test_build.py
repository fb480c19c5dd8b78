"""What the images of the test cluster are called, and what the oracle engine's is built from."""

from pathlib import Path

import pytest

from tests.chart.rendering import DEMO, SERVICES, release
from tests.cluster.images import sources
from tests.cluster.images.build import BY_DEFAULT, IMAGES, Release

OURS = Release(sources.chart_version())


@pytest.mark.parametrize("service", SERVICES)
def test_containerd_finds_them_under_the_charts_names(service: str):
    assert OURS.name(service) == f"docker.io/{release(DEMO).container(service)['image']}"


def test_two_releases_share_no_name_and_no_archive():
    before = Release("0.0.9", commit="HEAD~1")
    for image in set(IMAGES) - {"tools"}:
        assert before.name(image) != OURS.name(image)
        assert before.archive(image, Path()) != OURS.archive(image, Path())


def test_nodes_get_every_archive_but_that_of_the_engine_with_torch():
    names = {image: OURS.archive(image, Path()).name for image in IMAGES}
    assert {image for image, name in names.items() if name.startswith("penstock-")} == set(BY_DEFAULT)


def test_the_oracle_engine_is_built_from_the_engines_code_and_its_own():
    with sources.oracle_context(sources.ROOT) as context:
        files = {str(path.relative_to(context)) for path in context.rglob("*") if path.is_file()}
    assert "code/penstock_enginecore/app.py" in files
    assert "code/tests/fakes/engines/oracle_service/__main__.py" in files
    assert "code/tests/fakes/engines/fake_executor.py" in files
    assert {"constraints.txt", "demo-model/config.json"} <= files
    assert not [name for name in files if name.endswith((".pyc", ".so"))]


def test_the_tree_of_a_commit_is_that_commits():
    head = sources.revision()
    with sources.tree(head) as tree:
        assert tree != sources.ROOT
        assert (tree / "Dockerfile").is_file()
    with sources.tree("") as tree:
        assert tree == sources.ROOT
