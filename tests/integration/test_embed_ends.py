"""Embed calls that end early, over real gRPC: cancelled, past the deadline, or without an engine."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import DeadlineExceeded, Unavailable
from penstock_common.types.request import PoolingTask
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, eventually, failure
from tests.fakes.models import small_tokenizers
from tests.fakes.patience import deadlines

REQUEST = pb.EmbedRequest(inputs=[pb.PoolingInput(text="hello"), pb.PoolingInput(text="world")])


@pytest.fixture
async def silent() -> AsyncIterator[FakeEngine]:
    """Yield an engine that accepts inputs and never answers."""
    engine = FakeEngine(vocab_size=400, manual=True)
    engine.ready.capabilities[:] = ["embed", "token_embed"]
    async with engine:
        yield engine


@pytest.fixture
async def frontend(silent: FakeEngine, tmp_path: Path) -> AsyncIterator[FrontendServer]:
    async with FrontendServer(small_tokenizers.save_model(tmp_path / "model"), engines=[silent.address]) as server:
        await server.until_health(serving=True)
        yield server


def live(frontend: FrontendServer) -> int:
    llm: Any = frontend.frontend._models[0].assembly.llm
    return len(llm._live) + len(llm.pooling.outputs)


async def test_cancelling_the_call_ends_all_its_inputs_in_the_engine(
    silent: FakeEngine, frontend: FrontendServer
) -> None:
    call = frontend.stub.Embed(REQUEST)
    await silent.until(lambda e: len(e.running) == 2)
    assert all(r.pooling_params.task == PoolingTask.EMBED for r in silent.requests)
    call.cancel()
    await silent.until(lambda e: len(e.aborted) == 2)
    await eventually(lambda: live(frontend) == 0)


async def test_a_passed_deadline_ends_all_inputs_in_the_engine(silent: FakeEngine, frontend: FrontendServer) -> None:
    for seconds in deadlines():
        assert isinstance(await failure(frontend.stub.Embed(REQUEST, timeout=seconds)), DeadlineExceeded)
        if len(silent.requests) >= 2:
            break
    await silent.until(lambda e: len(e.aborted) == len(e.requests))
    assert silent.running == {}
    await eventually(lambda: live(frontend) == 0)


async def test_the_inputs_of_an_engine_that_dies_go_to_the_next(silent: FakeEngine, frontend: FrontendServer) -> None:
    call = frontend.stub.Embed(REQUEST)
    await silent.until(lambda e: len(e.running) == 2)
    port = silent.port
    await silent.kill()
    await silent.start(port)
    await silent.until(lambda e: len(e.running) == 2)
    assert [request.attempt for request in silent.requests] == [0, 0, 1, 1]
    call.cancel()
    await silent.until(lambda e: len(e.aborted) == 2)
    await eventually(lambda: live(frontend) == 0)


async def test_a_call_whose_engine_died_is_unavailable_when_none_comes_in_time(silent: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[silent.address], engine_wait_timeout=0.1) as frontend:
        await frontend.until_health(serving=True)
        call = frontend.stub.Embed(REQUEST)
        await silent.until(lambda e: len(e.running) == 2)
        await silent.kill()
        error = await failure(call)
        assert isinstance(error, Unavailable)
        assert error.message == "no engine accepted the request within 0.1 s"
        assert live(frontend) == 0
