"""A release from a copy of the repository: the commit, the files, and wheels that serve a model elsewhere."""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path

import pytest

from charts.release.versions import current_version
from penstock_local.serving.machine_resources import free_ports
from tests.fakes.clients.command import Command
from tests.fakes.patience import PATIENCE
from tests.fakes.scratch_repository import commit, git, scratch_repository

pytestmark = pytest.mark.slow

VERSION = "9.1.0"
MODEL = "examples/demo_model/penstock-tiny"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository after a release."""
    tree = scratch_repository(tmp_path_factory.mktemp("tree"))
    changelog = tree / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("\n## ", f"\n## {VERSION}\n\n- An entry.\n\n## ", 1))
    commit(tree)
    # Compiling the kernels takes a minute, and the tests of engines already cover the kernels.
    environment = {**os.environ, "PENSTOCK_REQUIRE_KERNELS": "0", "CXX": "/bin/false"}
    command = [sys.executable, "-m", "charts.release", VERSION, "--gates", "true"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"released {VERSION}: tag v{VERSION}, files in build/release/{VERSION}" in done.stdout
    return tree


def test_a_release_is_one_commit_with_a_tag(tree: Path) -> None:
    assert git(tree, "log", "-1", "--format=%s") == f"release: publish {VERSION}"
    assert git(tree, "rev-parse", f"v{VERSION}^{{commit}}") == git(tree, "rev-parse", "HEAD")
    assert git(tree, "cat-file", "-t", f"v{VERSION}") == "tag"
    assert git(tree, "status", "--porcelain") == ""
    assert current_version(tree) == VERSION
    assert {"protos/released/v9.1.0.binpb", "protos/released/v9.1.0.words.json"} <= set(
        git(tree, "show", "--format=", "--name-only").splitlines()
    )


def test_the_page_of_releases_has_date_commit_and_digest(tree: Path) -> None:
    digest = hashlib.sha256((tree / f"protos/released/v{VERSION}.binpb").read_bytes()).hexdigest()
    (row,) = [line for line in (tree / "docs/releases.md").read_text().splitlines() if line.startswith(f"| {VERSION} ")]
    date = git(tree, "log", "-1", "--format=%cd", "--date=format-local:%Y-%m-%d")
    assert row == f"| {VERSION} | {date} | `{git(tree, 'rev-parse', 'HEAD~1')[:12]}` | `{digest}` |"


def test_the_folder_has_all_files_and_their_checksums(tree: Path) -> None:
    folder = tree / "build/release" / VERSION
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    wheels = {name.partition("-")[0] for name in names if name.startswith("wheels/")}
    ours = ("", "_client", "_common", "_coordinator", "_enginecore", "_frontend", "_local", "_protos")
    assert wheels == {f"wheels/penstock{part}" for part in ours if part != "_local"}
    assert {f"chart/penstock-{VERSION}.tgz", f"contracts/v{VERSION}.binpb", "SHA256SUMS"} <= names
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    assert len((folder / "SHA256SUMS").read_text().splitlines()) == len(names) - 1


def test_the_wheels_serve_a_model(tree: Path, tmp_path: Path) -> None:
    """Uses an environment with the third-party packages of this environment. Penstock comes only from the wheels."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    wheels = sorted((tree / "build/release" / VERSION / "wheels").glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "-q"]
    subprocess.run([*pip, "--no-index", "--no-deps", *map(str, wheels)], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    # Python finds Penstock in the wheels first. It does not read the .pth files of editable installs in this path.
    (Path(own) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    home = subprocess.run(
        [python, "-c", "import penstock_frontend, penstock; print(penstock_frontend.__file__, *penstock.__path__)"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    ).stdout.split()
    assert all(path.startswith(own) for path in home)

    grpc, http, admin = map(str, free_ports(3))
    ports = ("--grpc-port", grpc, "--http-port", http, "--admin-port", admin)
    program = (str(venv / "bin" / "penstock"),)
    with Command(
        "serve",
        str(tree / MODEL),
        *ports,
        "--kv-cache-memory",
        "64MiB",
        "--device",
        "cpu",
        program=program,
        cwd=tmp_path,
    ) as running:
        running.wait_for("Ctrl-C stops everything")
        body = json.dumps({"model": "penstock-tiny", "prompt": "Once upon a time", "max_tokens": 4}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://localhost:{http}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        with urllib.request.urlopen(f"http://localhost:{http}/openapi.json", timeout=PATIENCE) as answer:
            assert json.load(answer)["info"]["version"] == VERSION
        running.interrupt()
        assert running.wait_for_exit() == 0
