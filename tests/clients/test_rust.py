"""The Rust client's own tests: its channel behaves like the gRPC libraries of other languages."""

import shutil

import pytest

from tests.clients.conftest import WANTED
from tests.clients.languages import BUILD, LANGUAGES, OF_RELEASE, run
from tests.clients.running import Client

RUST = [language for language in LANGUAGES if language.name == "rust"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(WANTED) and "rust" not in WANTED, reason="CLIENT_LANGUAGES leaves Rust out (make clients-test)"
    ),
]
SOURCE = BUILD / f"rust{OF_RELEASE}" / "source"
TARGET = ("--target-dir", str(BUILD / "rust-target"))


@pytest.mark.parametrize("client", RUST, ids=lambda language: language.name, indirect=True)
def test_its_own_tests_pass(client: Client) -> None:
    run(["cargo", "test", *TARGET], SOURCE, CARGO_INCREMENTAL="0")


@pytest.mark.parametrize("client", RUST, ids=lambda language: language.name, indirect=True)
@pytest.mark.skipif(
    shutil.which("cargo-clippy") is None, reason="no cargo-clippy on PATH (rustup component add clippy)"
)
def test_clippy_has_nothing_to_say(client: Client) -> None:
    run(["cargo", "clippy", "--all-targets", *TARGET], SOURCE, CARGO_INCREMENTAL="0")
