"""Every route that generates text, called by the published clients, with their helpers and their exceptions.

Answers and failing streams are tested in ``test_openai_*.py``, ``test_responses.py`` and ``test_messages.py``.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import anthropic
import openai
import pydantic
import pytest
import pytest_asyncio
from anthropic import beta_async_tool

from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import EOS, byte_level
from tests.fakes.patience import PATIENCE

TOKENIZER = byte_level()
HI: Any = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


class City(pydantic.BaseModel):
    """Type into which the clients parse answers."""

    name: str
    size: int


BONN = City(name="Bonn", size=335)


class Clients(NamedTuple):
    """The two published clients of one frontend, the frontend's engine, and the frontend's ``url``."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    engine: FakeEngine
    url: str

    def says(self, text: str, *, then: str = "") -> None:
        """Set the next answers. ``then`` is the answer to a conversation with a tool's result."""
        self.engine.script = lambda request: _ids(
            (then if then and "<tool_response>" in TOKENIZER.decode(request.prompt_token_ids) else text) + EOS
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clients]:
    model = save_chat_model(tmp_path_factory.mktemp("models") / "chatml")
    engine = FakeEngine(vocab_size=TOKENIZER.get_vocab_size(), max_model_len=4096)
    [engine.eos_token_id] = _ids(EOS)
    async with engine, openai_server(model, engines=[engine.address]) as server:
        url = f"http://127.0.0.1:{server.port}"
        plain = anthropic.DefaultAsyncHttpxClient(verify=False)  # reading certificates takes longer than a test
        async with anthropic.AsyncAnthropic(
            base_url=url, api_key="none", max_retries=0, timeout=PATIENCE, http_client=plain
        ) as client:
            yield Clients(server.client, client, engine, url)


pytestmark = pytest.mark.asyncio(loop_scope="module")

Call = Callable[..., Awaitable[Any]]
OPENAI: dict[str, tuple[Callable[[Clients], Call], dict[str, Any]]] = {
    "completions": (lambda each: each.openai.completions.create, {"prompt": "hi"}),
    "chat": (lambda each: each.openai.chat.completions.create, {"messages": HI}),
    "responses": (lambda each: each.openai.responses.create, {"input": "hi"}),
}
ANTHROPIC: dict[str, tuple[Callable[[Clients], Call], dict[str, Any]]] = {
    "messages": (lambda each: each.anthropic.messages.create, {"messages": HI, "max_tokens": 5}),
    "count_tokens": (lambda each: each.anthropic.messages.count_tokens, {"messages": HI}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", OPENAI)
async def test_errors_of_openais_routes_are_the_clients(clients: Clients, route: str, stream: bool) -> None:
    call, body = OPENAI[route]
    with pytest.raises(openai.NotFoundError) as missing:
        await call(clients)(model="other", stream=stream, **body)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        await call(clients)(model="model", stream=stream, temperature=-1, **body)
    assert (wrong.value.type, wrong.value.param) == ("invalid_request_error", "temperature")
    name = next(iter(body))
    long: Any = [{"role": "user", "content": "a " * 5000}] if name == "messages" else "a " * 5000
    with pytest.raises(openai.BadRequestError) as too_long:
        await call(clients)(model="model", stream=stream, **{name: long})
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", name)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ANTHROPIC)
async def test_errors_of_anthropics_routes_are_the_clients(clients: Clients, route: str, stream: bool) -> None:
    call, body = ANTHROPIC[route]
    given = {"model": "model", **body, **({"stream": stream} if route == "messages" else {})}
    with pytest.raises(anthropic.NotFoundError) as missing:
        await call(clients)(**{**given, "model": "other"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="messages is empty"):
        await call(clients)(**{**given, "messages": []})


async def test_chats_are_parsed_whole_and_streamed(clients: Clients) -> None:
    clients.says(BONN.model_dump_json())
    chats = clients.openai.chat.completions
    whole = await chats.parse(model="model", messages=HI, response_format=City, max_tokens=1000)
    async with chats.stream(model="model", messages=HI, response_format=City, max_tokens=1000) as stream:
        streamed = await stream.get_final_completion()
    assert [each.choices[0].message.parsed for each in (whole, streamed)] == [BONN, BONN]
    tool = openai.pydantic_function_tool(City)
    clients.says('<tool_call>\n{"name": "City", "arguments": {"name": "Bonn", "size": 335}}\n</tool_call>')
    [made] = (await chats.parse(model="model", messages=HI, tools=[tool], max_tokens=1000)).choices[
        0
    ].message.tool_calls or ()
    assert made.function.parsed_arguments == BONN


async def test_responses_are_parsed_whole_and_streamed(clients: Clients) -> None:
    clients.says(BONN.model_dump_json())
    responses = clients.openai.responses
    whole = await responses.parse(model="model", input="hi", text_format=City, max_output_tokens=1000)
    async with responses.stream(model="model", input="hi", text_format=City, max_output_tokens=1000) as stream:
        streamed = await stream.get_final_response()
    assert [each.output_parsed for each in (whole, streamed)] == [BONN, BONN]


async def test_messages_are_parsed_whole_and_streamed(clients: Clients) -> None:
    clients.says(BONN.model_dump_json())
    messages = clients.anthropic.messages
    whole = await messages.parse(model="model", messages=HI, max_tokens=1000, output_format=City)
    async with messages.stream(model="model", messages=HI, max_tokens=1000, output_format=City) as stream:
        streamed = await stream.get_final_message()
    assert [each.parsed_output for each in (whole, streamed)] == [BONN, BONN]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_client_runs_tools_until_the_answer(clients: Clients, stream: bool) -> None:
    asked: list[str] = []

    @beta_async_tool
    async def weather(city: str) -> str:
        """Return the weather."""
        asked.append(city)
        return "rain"

    clients.says(CALL, then="It rains.")
    runner: Any = clients.anthropic.beta.messages.tool_runner(
        model="model", messages=HI, max_tokens=1000, tools=[weather], stream=stream
    )
    last = await runner.until_done()
    assert (asked, [block.text for block in last.content]) == (["Bonn"], ["It rains."])


async def test_clients_that_block_work_as_well(clients: Clients) -> None:
    clients.says("Hello.")

    def ask() -> list[Any]:
        with openai.OpenAI(base_url=f"{clients.url}/v1", api_key="none", timeout=PATIENCE) as client:
            whole = client.chat.completions.create(model="model", messages=HI)
            pieces = [*client.chat.completions.create(model="model", messages=HI, stream=True)]
            response = client.responses.create(model="model", input="hi").output_text
        with (
            anthropic.Anthropic(base_url=clients.url, api_key="none", timeout=PATIENCE) as other,
            other.messages.stream(model="model", messages=HI, max_tokens=100) as stream,
        ):
            text = stream.get_final_text()
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        return [whole.choices[0].message.content, streamed, response, text]

    assert await asyncio.to_thread(ask) == ["Hello."] * 4


async def test_both_list_the_models(clients: Clients) -> None:
    assert [model.id async for model in clients.openai.models.list()] == ["model"]
    assert [model.id async for model in clients.anthropic.models.list()] == ["model"]
    assert (await clients.anthropic.models.retrieve("model")).id == "model"


async def test_a_kept_response_is_not_streamed_again(clients: Clients) -> None:
    made = await clients.openai.responses.create(model="model", input="hi")
    with pytest.raises(openai.BadRequestError) as caught:
        await clients.openai.responses.retrieve(made.id, stream=True)
    assert caught.value.param == "stream"


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids
