"""Calls that expand into many sequences: the limit on sequences, and other calls run during the expansion."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.config import LimitsConfig
from penstock_frontend.loop_yield import SEQUENCES_PER_TURN
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import failure, make_request
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server


class SentPerTurn:
    """Counts the sequences sent to engines in each turn of the event loop."""

    def __init__(self, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[int] = Counter()
        self._turn = 0
        self._loop = asyncio.get_running_loop()
        engines = server.server.frontend._models[0].assembly.engines
        add = engines.add

        def counted(*requests: EngineCoreRequest) -> None:
            self.counts[self._turn] += len(requests)
            add(*requests)

        monkeypatch.setattr(engines, "add", counted)
        self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._turn += 1
        self._loop.call_soon(self._next)


async def test_many_sequences_are_sent_over_many_turns_of_the_event_loop(
    engine: FakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with openai_server(model, engines=[engine.address]) as api:
        sent = SentPerTurn(api, monkeypatch)
        body = {"prompt": [[5, 6]] * 100, "n": 4, "max_tokens": 1}
        response = await api.http.post("/v1/completions", json=body)
    assert len(response.json()["choices"]) == sent.counts.total() == 400
    assert max(sent.counts.values()) <= 2 * SEQUENCES_PER_TURN + 4


async def test_many_inputs_are_sent_over_many_turns_of_the_event_loop(
    manual: FakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manual.ready.capabilities[:] = ["embed"]
    async with openai_server(model, engines=[manual.address]) as api:
        sent = SentPerTurn(api, monkeypatch)
        call = asyncio.create_task(api.http.post("/v1/embeddings", json={"input": [[5, 6]] * 400}))
        await manual.until(lambda engine: len(engine.requests) == 400)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert max(sent.counts.values()) <= 2 * SEQUENCES_PER_TURN


async def test_a_call_of_too_many_sequences_is_refused_before_anything_is_made(engine: FakeEngine, model: Path) -> None:
    limits = LimitsConfig(max_sequences_per_call=10)
    async with openai_server(model, engines=[engine.address], limits=limits) as api:
        response = await api.http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "n": 4})
        assert response.status_code == 400
        error = response.json()["error"]
        message = "n is 4: with 3 prompts the call has 12 sequences; limits.max_sequences_per_call is 10"
        assert (error["param"], error["message"]) == ("n", message)
        assert not engine.requests
        fine = await api.http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 5, "max_tokens": 1})
        assert fine.status_code == 200


async def completion(api: OpenAIServer, **body: Any) -> tuple[int, str]:
    response = await api.http.post("/v1/completions", json={"prompt": "a", **body})
    return response.status_code, response.json()["error"]["message"]


async def test_a_tenants_limit_counts_sequences(manual: FakeEngine, model: Path) -> None:
    limits = LimitsConfig(max_tenant_requests=8)
    async with openai_server(model, engines=[manual.address], limits=limits) as api:
        running = api.server.generate(n=5)
        await manual.until(lambda engine: len(engine.requests) == 5)
        message = "5 sequences without a tenant are running; the limit limits.max_tenant_requests is 8"
        assert await completion(api, n=4) == (429, message)
        assert await completion(api, prompt=["a", "b"], n=2) == (429, message)
        assert (await failure(api.server.stub.Generate(make_request(n=4)))).message == message
        inputs = [pb.PoolingInput(text="x")] * 4
        assert (await failure(api.server.stub.Embed(pb.EmbedRequest(inputs=inputs)))).message == message
        running.cancel()


async def test_a_request_that_a_tenant_will_never_have_room_for_is_told_so(engine: FakeEngine, model: Path) -> None:
    limits = LimitsConfig(max_tenant_requests=8)
    async with openai_server(model, engines=[engine.address], limits=limits) as api:
        message = (
            "the request without a tenant has 9 sequences (n, or number of inputs); "
            "the limit limits.max_tenant_requests is 8"
        )
        assert await completion(api, n=9) == (400, message)
        error = await failure(api.server.stub.Generate(make_request(n=9)))
        assert (error.code, error.field) == ("INVALID_ARGUMENT", "sampling_params.n")
