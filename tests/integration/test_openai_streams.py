"""Streams of the HTTP API: their total output, their failures, and clients that stop reading."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.common.v1 import finish_pb2
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import eventually
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import byte_level, ids_of

TOKENIZER = byte_level()
VOCAB = TOKENIZER.get_vocab_size()


TOO_SMALL = finish_pb2.RequestError(
    code="RESOURCE_EXHAUSTED", message="it needs more than there is", reason="KV_CACHE_TOO_SMALL"
)
"""Error that every engine would return, so the frontend does not retry the request."""


@pytest.fixture
async def stepped(manual: FakeEngine, model: Path) -> AsyncIterator[OpenAIServer]:
    async with openai_server(model, engines=[manual.address]) as server:
        yield server


async def raw_events(api: OpenAIServer, body: dict[str, Any], path: str = "/v1/completions") -> list[str]:
    response = await api.http.post(path, json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def test_events_are_one_line_each_and_done_is_the_last(api: OpenAIServer, engine: FakeEngine) -> None:
    engine.script = lambda _: ids_of("a\nb\r\n\u2028c")
    *events, last = await raw_events(api, {"prompt": "x", "stream": True})
    assert last == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "a\nb\r\n\u2028c"


async def test_an_error_in_the_middle_is_an_event_and_done_follows(stepped: OpenAIServer, manual: FakeEngine) -> None:
    manual.script = lambda _: ids_of("abcdef")
    reading = asyncio.create_task(raw_events(stepped, {"prompt": "x", "stream": True}))
    await manual.until(lambda e: e.running)
    manual.step()
    await eventually(lambda: stepped.num_live == 1 and manual.num_steps == 1)
    manual.finish_all(finish_pb2.FINISH_REASON_ERROR, TOO_SMALL)
    *_, error, last = await reading
    assert json.loads(error)["error"]["type"] == "rate_limit_error"
    assert last == "[DONE]"
    assert stepped.num_live == 0


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
async def test_the_client_raises_an_error_of_the_middle(tmp_path: Path, manual: FakeEngine, chat: bool) -> None:
    manual.script = lambda _: ids_of("abcdef")
    async with openai_server(save_chat_model(tmp_path), engines=[manual.address]) as stepped:
        await _raise_in_the_middle(stepped, manual, chat=chat)


async def _raise_in_the_middle(stepped: OpenAIServer, manual: FakeEngine, *, chat: bool) -> None:
    client = stepped.client
    starting: asyncio.Task[Any] = asyncio.create_task(
        client.chat.completions.create(model="model", messages=[{"role": "user", "content": "x"}], stream=True)
        if chat
        else client.completions.create(model="model", prompt="x", stream=True)
    )
    await manual.until(lambda e: e.running)
    manual.step()
    stream = await starting
    [choice] = (await anext(aiter(stream))).choices
    assert (choice.delta.content if chat else choice.text) == "a"
    manual.finish_all(finish_pb2.FINISH_REASON_ERROR, TOO_SMALL)
    with pytest.raises(openai.APIError, match="needs more than there is"):
        [chunk async for chunk in stream]


async def test_a_client_that_hangs_up_ends_the_work_before_the_next_step(
    stepped: OpenAIServer, manual: FakeEngine
) -> None:
    manual.script = lambda _: ids_of("abcdef")
    starting = asyncio.create_task(stepped.client.completions.create(model="model", prompt="x", stream=True, n=2))
    await manual.until(lambda e: len(e.running) == 2)
    manual.step()
    stream = await starting
    await stream.close()
    await manual.until(lambda e: len(e.aborted) == 2)
    assert (manual.running, manual.num_steps, stepped.num_live) == ({}, 1, 0)


@pytest.mark.parametrize("prompt", ["one", ["one", "two", "three"]], ids=["one", "several"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_before_the_first_output_ends_the_work(
    stepped: OpenAIServer, manual: FakeEngine, prompt: Any, stream: bool
) -> None:
    count = 1 if isinstance(prompt, str) else len(prompt)
    call = asyncio.create_task(stepped.http.post("/v1/completions", json={"prompt": prompt, "stream": stream}))
    await manual.until(lambda e: len(e.running) == count)
    call.cancel()
    await manual.until(lambda e: len(e.aborted) == count)
    assert (manual.running, manual.num_steps, stepped.num_live) == ({}, 0, 0)


async def test_when_one_prompt_fails_the_others_end(stepped: OpenAIServer, manual: FakeEngine) -> None:
    body = {"prompt": ["one", [5] * 500, "three"], "stream": True}
    response = await stepped.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt[1]"
    await eventually(lambda: stepped.num_live == 0 and not manual.running)


async def test_a_client_that_does_not_read_delays_no_other(model: Path) -> None:
    long = "x" * 30_000
    engine = FakeEngine(vocab_size=VOCAB, script=lambda _: ids_of(long), max_model_len=100_000)
    async with engine, openai_server(model, engines=[engine.address]) as api:
        engine.tokens_per_step = 50
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=1024)
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 30_000}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        await engine.until(lambda e: e.running)
        other = await api.client.completions.create(model="model", prompt="x", max_tokens=30_000)
        assert other.choices[0].text == long
        await engine.until(lambda e: not e.running)
        writer.close()
        await eventually(lambda: api.num_live == 0)
        assert reader is not None


async def test_a_stop_of_the_server_ends_streams_with_an_error(stepped: OpenAIServer, manual: FakeEngine) -> None:
    manual.script = lambda _: ids_of("abcdef")
    starting = asyncio.create_task(stepped.client.completions.create(model="model", prompt="x", stream=True))
    await manual.until(lambda e: e.running)
    manual.step()
    stream = await starting
    stepped.server.frontend.stop()
    stepped.server.frontend.stop()
    with pytest.raises(openai.APIError, match="shutting down"):
        [chunk async for chunk in stream]
    await stepped.server.running


SCRIPTS = st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=40)
TEXTS = st.text(st.sampled_from("abc äß你好🙂 \n"), min_size=1, max_size=20).map(ids_of)
STOPS = st.lists(st.text(st.sampled_from("abc ä你🙂\ufffd"), min_size=1, max_size=3), max_size=3)


async def test_streams_add_up_to_the_whole_for_any_tokens_and_stops(api: OpenAIServer, engine: FakeEngine) -> None:
    """Compares text, log-probabilities and finish reason of a stream with the answer without streaming."""
    loop = asyncio.get_running_loop()

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(script=SCRIPTS | TEXTS, stop=STOPS, tokens_per_step=st.integers(1, 5))
    def check(script: list[int], stop: list[str], tokens_per_step: int) -> None:
        asyncio.run_coroutine_threadsafe(compare(script, stop, tokens_per_step), loop).result(20)

    async def compare(script: list[int], stop: list[str], tokens_per_step: int) -> None:
        engine.script = lambda _: script
        engine.tokens_per_step = tokens_per_step
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 60, "stop": stop, "logprobs": 0, "return_token_ids": True}
        whole = (await api.http.post("/v1/completions", json=body)).json()["choices"][0]
        *events, _ = await raw_events(api, body | {"stream": True})
        pieces = [json.loads(event)["choices"][0] for event in events]
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        assert [i for piece in pieces for i in piece["token_ids"]] == whole["token_ids"]
        for key in ("tokens", "token_logprobs", "text_offset"):
            assert [x for piece in pieces for x in piece["logprobs"][key]] == whole["logprobs"][key]
        assert pieces[-1]["finish_reason"] == whole["finish_reason"]
        assert pieces[-1]["stop_reason"] == whole["stop_reason"]
        assert not stop or not any(each in whole["text"] for each in stop)

    await asyncio.to_thread(check)
