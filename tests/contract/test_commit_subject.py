"""The check of commit subjects accepts valid subjects, and names each fault of invalid subjects."""

import subprocess
from pathlib import Path

import pytest

from tests.commit_subject import faults, faults_of_commits


@pytest.mark.parametrize(
    "subject",
    [
        "scheduler: hold requests until their adapter loads",
        "kv-transfer: count returned leases in one place",
        "seed: seed each test",
        "client, coordinator: write docstrings in plain English",
        "Merge branch 'main'",
        'Revert "docs: add a page"',
    ],
)
def test_plain_subjects_pass(subject: str) -> None:
    assert faults(subject) == []


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("scheduler: hold " + "x" * 60, "the limit is 72"),
        ("Scheduler: hold requests", "not of the form"),
        ("hold requests", "not of the form"),
        ("scheduler: hold requests.", "not of the form"),
        ("scheduler: holding requests", "'holding' is no verb"),
        ("engine: the lease ends", "'the' is no verb"),
        ("engine: tell what leases gave back", "'what' stands for a noun"),
    ],
)
def test_each_fault_is_named(subject: str, fault: str) -> None:
    assert fault in " ".join(faults(subject))


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_commits_after_the_main_branch_are_checked(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Bad subject of the main branch")
    assert len(faults_of_commits(tmp_path)) == 1
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "docs: add a page")
    assert faults_of_commits(tmp_path) == []
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "docs: whose pages")
    assert len(faults_of_commits(tmp_path)) == 1


def test_a_folder_without_git_passes(tmp_path: Path) -> None:
    assert faults_of_commits(tmp_path) == []
