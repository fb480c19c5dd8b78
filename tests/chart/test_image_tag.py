"""charts/image_tag.py: different states of the files have different tags."""

import re
import subprocess
from pathlib import Path

import pytest

from charts.image_tag import image_tag


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    chart = tmp_path / "charts" / "penstock"
    chart.mkdir(parents=True)
    (chart / "Chart.yaml").write_text("appVersion: 1.2.3\n")
    (tmp_path / "code.py").write_text("one")
    (tmp_path / ".gitignore").write_text("build\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_clean_tree_is_tagged_by_its_commit(tree: Path):
    assert image_tag(tree) == f"1.2.3-{git(tree, 'rev-parse', '--short=12', 'HEAD')}"
    (tree / "build").write_text("ignored")
    assert "dirty" not in image_tag(tree)


def test_every_change_is_another_tag_and_the_same_files_are_the_same(tree: Path):
    clean = image_tag(tree)
    tags = [clean]
    (tree / "code.py").write_text("two")
    tags.append(image_tag(tree))
    assert image_tag(tree) == tags[-1]
    (tree / "code.py").write_text("three")
    tags.append(image_tag(tree))
    (tree / "new.py").write_text("")
    tags.append(image_tag(tree))
    (tree / "new.py").chmod(0o755)
    tags.append(image_tag(tree))
    (tree / "code.py").unlink()
    tags.append(image_tag(tree))
    (tree / "link").symlink_to("new.py")
    tags.append(image_tag(tree))
    assert len(set(tags)) == len(tags)
    assert all(re.fullmatch(rf"{clean}-dirty-[0-9a-f]{{12}}", tag) for tag in tags[1:])


def test_sources_without_git_are_tagged_by_their_version(tree: Path):
    (tree / ".git").rename(tree / "moved")
    assert image_tag(tree) == "1.2.3"
