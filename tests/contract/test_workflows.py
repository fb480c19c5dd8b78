"""Workflows of the repository run only existing make targets, contain no secrets, and have only the rights they need."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts.release.publish import KINDS, Target
from charts.release.versions import current_version

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PERMISSIONS = {
    "files": {"contents": "write"},
    "images": {"contents": "read", "packages": "write"},
    "chart": {"contents": "read", "packages": "write"},
    "site": {"contents": "read", "id-token": "write", "pages": "write"},
}
REGISTRY = "registry.example/llm"


def parsed(workflow: Path) -> dict[Any, Any]:
    content: dict[Any, Any] = yaml.safe_load(workflow.read_text())
    return content


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in parsed(workflow)["jobs"].values() for step in job["steps"]]


def runs(workflow: Path) -> list[list[str]]:
    return [shlex.split(line) for step in steps(workflow) if "run" in step for line in step["run"].splitlines()]


def test_there_is_a_workflow() -> None:
    assert [workflow.name for workflow in WORKFLOWS] == ["release.yml"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_line_runs_targets_that_exist(workflow: Path) -> None:
    for program, *targets in runs(workflow):
        assert program == "make"
        done = subprocess.run(
            ["make", "-n", *targets, f"REGISTRY={REGISTRY}"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_have_a_version_and_there_are_no_secrets(workflow: Path) -> None:
    assert [step["uses"] for step in steps(workflow) if not re.search(r"@v\d+$", step.get("uses", "@v1"))] == []
    assert "secrets" not in workflow.read_text()


def test_a_release_runs_for_tags_of_versions_alone() -> None:
    assert parsed(WORKFLOWS[0])[True] == {"push": {"tags": ["v*"]}}  # YAML reads the key "on" as true


def test_jobs_have_the_permissions_that_they_need() -> None:
    workflow = parsed(WORKFLOWS[0])
    assert workflow["permissions"] == {}
    assert {name: job["permissions"] for name, job in workflow["jobs"].items()} == PERMISSIONS


def test_images_and_chart_go_to_the_registry_in_the_version_that_the_chart_installs() -> None:
    target = Target("1.2.3", REGISTRY, "podman", "cpu")
    build, *pushes = KINDS["images"](ROOT, target)
    assert build == ("make", "images", "TAG=1.2.3", f"REGISTRY={REGISTRY}", "IMAGE_BUILDER=podman", "DEVICE=cpu")
    # The image names that the Makefile builds.
    planned = subprocess.run(["make", "-n", *build[1:]], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [push[-1] for push in pushes] == re.findall(r"--tag (\S+)", planned)
    assert all(push[:2] == ("podman", "push") for push in pushes)
    assert KINDS["chart"](ROOT, target)[-1] == (
        "helm",
        "push",
        "build/publish/chart/penstock-1.2.3.tgz",
        f"oci://{REGISTRY}/charts",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["images"], "REGISTRY is empty; set it to the registry and folder of the images"),
        (["chart", "--registry", REGISTRY], "the current commit does not have the tag v"),
    ],
)
def test_publishing_is_refused(arguments: list[str], message: str) -> None:
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    if f"v{current_version(ROOT)}" in tags.stdout.split() and "chart" in arguments:
        pytest.skip("this commit is a release")
    command = [sys.executable, "-m", "charts.release.publish", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"publish refused: {message}")


@pytest.mark.slow
def test_a_dry_run_builds_everything_and_names_every_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REQUIRE_KERNELS", "0")
    monkeypatch.setenv("CXX", "/bin/false")  # skip compiling the kernels, which takes a minute
    command = ["make", "--no-print-directory", "publish-dry-run", f"REGISTRY={REGISTRY.upper()}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    version = current_version(ROOT)
    for upload in (
        r"would publish: build/docs, \d\d\d+ files",
        rf"would run: gh release create v{version} .*build/publish/wheels/penstock-{version}-\S+\.whl",
        rf"would run: docker push {REGISTRY}/penstock/frontend:{version}",
        rf"would run: docker push {REGISTRY}/penstock/enginecore:{version}-cuda",
        rf"would run: helm push build/publish/chart/penstock-{version}\.tgz oci://{REGISTRY}/charts",
    ):
        assert re.search(upload, done.stdout), upload
    assert (ROOT / f"build/publish/chart/penstock-{version}.tgz").exists()
