"""Fixtures for frontend tests: a model directory, fake engines without a model, and frontends in front of them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import structlog

from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import byte_level, save_model

VOCAB = byte_level().get_vocab_size()


@pytest.fixture(autouse=True)
def log_settings_of_earlier_tests_are_gone() -> None:
    """Restore log settings: an ``LLM`` in the test process lowers the log level unless the program configured logging."""
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the model files that a frontend reads."""
    return save_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model directory with a chat template."""
    return save_chat_model(tmp_path_factory.mktemp("models") / "chatml")


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    """Yield an exit stack that is closed at the end of the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    """Yield a fake engine that runs its steps without commands of the test."""
    async with FakeEngine(vocab_size=VOCAB) as engine:
        yield engine


@pytest.fixture
async def manual() -> AsyncIterator[FakeEngine]:
    """Yield a fake engine that runs a step only when the test commands it."""
    async with FakeEngine(vocab_size=VOCAB, manual=True) as engine:
        yield engine


@pytest.fixture
async def frontend(engine: FakeEngine, model: Path) -> AsyncIterator[FrontendServer]:
    """Yield a ready frontend in front of ``engine``."""
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        await frontend.until_health(serving=True)
        yield frontend


@pytest.fixture
async def api(engine: FakeEngine, model: Path) -> AsyncIterator[OpenAIServer]:
    """Yield a ready frontend with an HTTP port, and OpenAI's client for the port."""
    async with openai_server(model, engines=[engine.address]) as server:
        yield server
