"""Fixtures: a client in each language, and a server for the clients."""

import os
from collections.abc import AsyncIterator

import pytest

from tests.clients.languages import LANGUAGES, Language
from tests.clients.running import Client
from tests.fakes.frontends.fake_inference import FakeInference

WANTED = [name for name in os.environ.get("CLIENT_LANGUAGES", "").split(",") if name]
"""Languages to test; all by default."""
assert set(WANTED) <= {language.name for language in LANGUAGES}, (
    f"CLIENT_LANGUAGES is {WANTED}: there are not all of these"
)
_commands: dict[str, list[str]] = {}
_broken: set[str] = set()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tested languages."""
    if _commands:
        terminalreporter.write_line(f"clients that were run: {', '.join(_commands)}")


@pytest.fixture(
    params=[language for language in LANGUAGES if not WANTED or language.name in WANTED], ids=lambda x: x.name
)
def client(request: pytest.FixtureRequest) -> Client:
    """Return the client in a language. Each client is built once."""
    language: Language = request.param
    if language.name in _broken:
        pytest.fail(f"it could not be built: see the first test of {language.name}")
    if language.name not in _commands:
        try:
            _commands[language.name] = language.command()
        except AssertionError:
            _broken.add(language.name)
            raise
    return Client(_commands[language.name])


@pytest.fixture
async def server() -> AsyncIterator[FakeInference]:
    """Yield a server of the public API without a model."""
    async with FakeInference() as fake:
        yield fake
