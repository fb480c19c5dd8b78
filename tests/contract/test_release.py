"""`make release` refuses a tree that is not ready for a release, and changes nothing. tests/e2e/test_release.py makes a
release.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from charts.image_tag import chart_version
from charts.release.versions import PLACES, ReleaseError, current_version, notes, parsed, set_version
from tests.fakes.scratch_repository import ROOT, commit, git, scratch_repository

NEXT = "9.1.0"
"""Version for tests, greater than any version of the repository."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = scratch_repository(tmp_path_factory.mktemp("base"))
    changelog = folder / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("\n## ", f"\n## {NEXT} (2030-01-02)\n\n- An entry.\n\n## ", 1))
    commit(folder)
    return folder


@pytest.fixture
def tree(base: Path, tmp_path: Path) -> Path:
    git(tmp_path, "clone", "-q", str(base), "tree")
    for name in ("user.name", "user.email"):
        git(tmp_path / "tree", "config", name, "a@example.com")
    return tmp_path / "tree"


def state(tree: Path) -> tuple[str, ...]:
    """Return commit, tags, changes and ignored files of a repository, without compiled Python files."""
    ignored = git(tree, "status", "--porcelain", "--ignored", "--untracked-files=all").splitlines()
    return (
        git(tree, "rev-parse", "HEAD"),
        git(tree, "tag", "--list"),
        *(line for line in ignored if "__pycache__" not in line),
    )


def refusal(tree: Path, version: str = NEXT, gates: str = "true") -> str:
    """Return the error of a refused release. Fails if the release changes any file."""
    before = state(tree)
    command = [sys.executable, "-m", "charts.release", version, "--gates", gates]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert state(tree) == before
    (line,) = re.findall(r"^release refused: .*$", done.stderr, re.MULTILINE)
    return line.removeprefix("release refused: ")


def test_a_version_of_another_form_is_refused(tree: Path) -> None:
    assert refusal(tree, "9.1") == "VERSION is '9.1'; it must be MAJOR.MINOR.PATCH, for example 0.2.0"


@pytest.mark.parametrize("version", ["v1.2.3", "1.2.3-rc.1", "01.2.3", "1.2.3\n", ""])
def test_pre_releases_and_other_spellings_are_no_versions(version: str) -> None:
    with pytest.raises(ReleaseError, match=r"MAJOR\.MINOR\.PATCH"):
        parsed(version)


def test_versions_are_ordered_as_numbers() -> None:
    assert parsed("0.10.0") > parsed("0.9.1")


def test_a_version_that_is_not_greater_is_refused(tree: Path) -> None:
    version = current_version(tree)
    assert refusal(tree, version) == f"VERSION is {version}; it must be greater than the last version, {version}"


def test_an_existing_tag_is_refused(tree: Path) -> None:
    git(tree, "tag", f"v{NEXT}")
    assert refusal(tree) == f"tag v{NEXT} already exists; choose a greater version"


def test_contracts_that_are_kept_already_are_refused(tree: Path) -> None:
    (tree / "protos/released" / f"v{NEXT}.binpb").touch()
    commit(tree)
    assert refusal(tree) == f"protos/released/v{NEXT}.binpb already exists; choose a greater version"


@pytest.mark.parametrize("name", ["README.md", "untracked.txt"])
def test_a_tree_with_changes_is_refused(tree: Path, name: str) -> None:
    (tree / name).write_text("changed")
    assert refusal(tree).startswith("the working tree has uncommitted changes; commit or remove them first: ")
    assert (tree / name).read_text() == "changed"


def test_a_changelog_without_the_section_is_refused(tree: Path) -> None:
    assert (
        refusal(tree, "9.2.0")
        == "CHANGELOG.md has no section '## 9.2.0'; rename the section of unreleased changes to it"
    )


def test_an_empty_section_is_refused(tree: Path) -> None:
    changelog = tree / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("\n## ", "\n## 9.2.0\n\n### Added\n\n## ", 1))
    commit(tree)
    assert refusal(tree, "9.2.0") == "section '## 9.2.0' of CHANGELOG.md has no entry; list the changes"
    assert notes(tree, NEXT) == "- An entry."


def test_failing_gates_are_refused(tree: Path) -> None:
    assert refusal(tree, gates="exit 3") == "the gates failed: 'exit 3' ended with exit code 3"


def test_gates_that_leave_changes_are_refused(tree: Path) -> None:
    before = state(tree)
    command = [sys.executable, "-m", "charts.release", NEXT, "--gates", "touch left.txt"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=300)
    assert "the working tree has uncommitted changes; commit or remove them first: ?? left.txt" in done.stderr
    (tree / "left.txt").unlink()
    assert state(tree) == before


def test_a_version_that_differs_in_one_place_is_refused(tree: Path) -> None:
    page = tree / "examples/clients/go/go.mod"
    page.write_text(page.read_text().replace(f"protos v{chart_version(tree)}", "protos v0.0.9"))
    commit(tree)
    message = refusal(tree)
    assert (
        message == f"examples/clients/go/go.mod has version 0.0.9; charts/penstock/Chart.yaml has {chart_version(tree)}"
    )


def test_a_failure_behind_the_change_of_versions_restores_everything(tree: Path) -> None:
    contract = tree / "protos/penstock/common/v1/finish.proto"
    contract.write_text(contract.read_text() + "\nmessage {\n")
    commit(tree)
    assert "grpc_tools.protoc" in refusal(tree)


def test_a_page_of_releases_without_its_table_restores_everything(tree: Path) -> None:
    (tree / "docs/releases.md").write_text("# Releases\n")
    commit(tree)
    assert refusal(tree) == "docs/releases.md must have one table of releases, with four columns"


def test_a_new_version_is_written_to_every_place(tree: Path) -> None:
    old = current_version(tree)
    set_version(tree, NEXT)
    assert current_version(tree) == NEXT
    changed = git(tree, "diff", "--name-only").splitlines()
    assert {path for pattern in PLACES for path in tree.glob(pattern)} == {tree / name for name in changed}
    removed = [line[1:] for line in git(tree, "diff", "-U0").splitlines() if re.match(r"-[^-]", line)]
    added = [line[1:] for line in git(tree, "diff", "-U0").splitlines() if re.match(r"\+[^+]", line)]
    assert [line.replace(old, NEXT) for line in removed] == added


def test_distributions_of_one_release_depend_on_each_other_in_one_version() -> None:
    loose = [
        f"{path.relative_to(ROOT)}: {dependency}"
        for path in [*ROOT.glob("services/*/pyproject.toml"), ROOT / "protos/pyproject.toml"]
        for dependency in tomllib.loads(path.read_text())["project"]["dependencies"]
        if dependency.startswith("penstock") and "==" not in dependency
    ]
    assert loose == [], "pin the version of the release"


def test_no_code_names_the_version() -> None:
    """Checks that no code contains the version, because services report the version of their installed distribution."""
    version = current_version(ROOT)
    named = [
        str(path.relative_to(ROOT))
        for path in [*(ROOT / "services").rglob("*.py"), *(ROOT / "charts").rglob("*.py")]
        if re.search(rf"""["']v?{re.escape(version)}["']""", path.read_text(encoding="utf-8"))
    ]
    assert named == []
