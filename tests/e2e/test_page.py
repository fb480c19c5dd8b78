"""The web page at ``/`` in a real browser: the tests click and type like a user and read the result."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock_common.types.cluster import EngineState
from penstock_frontend.config import AuthConfig, HttpConfig, ModelConfig
from tests.fakes.clients.browser import CHROMIUM, Browser, Tab
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.frontends.page_server import CUT, HOLD, THOUGHT, PageServer
from tests.fakes.models.small_tokenizers import byte_level, save_model
from tests.fakes.patience import PATIENCE

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium on PATH (apt-get install chromium): the page in a browser"
    ),
    pytest.mark.asyncio(loop_scope="module"),
]

LIMIT = PATIENCE
SHOWS_ERROR = "!document.querySelector('#error').hidden"
IDLE = "!document.querySelector('#run').hidden"
FOR_PROMPTS = "?mode=completion"
CHAT_IS_OFFERED = "!document.querySelector('[value=chat]').disabled"
IS_WIDER_THAN_THE_WINDOW = "document.documentElement.scrollWidth > innerWidth"


def output_has(text: str) -> str:
    return f"document.querySelector('#output').innerText.includes({text!r})"


def shows(selector: str, text: str) -> str:
    return f"document.querySelector({selector!r}).innerText.includes({text!r})"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    """Yield one browser for all tests, because a browser takes a second to start."""
    async with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _closed_tabs(browser: Browser) -> AsyncIterator[None]:
    """Close all pages after each test, so that they stop calling a stopped server."""
    yield
    await browser.close_tabs()


@pytest_asyncio.fixture(loop_scope="module")
async def server() -> AsyncIterator[PageServer]:
    async with PageServer() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def tab(browser: Browser, server: PageServer) -> Tab:
    """Yield a tab with the page for prompts, which shows the state of the cluster."""
    tab = await browser.open(server.url + FOR_PROMPTS)
    await tab.until(CHAT_IS_OFFERED)
    return tab


@pytest_asyncio.fixture(loop_scope="module")
async def engine() -> AsyncIterator[FakeEngine]:
    """Yield an engine that runs a step only on command."""
    async with FakeEngine(vocab_size=byte_level().get_vocab_size(), manual=True) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def real(browser: Browser, engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Tab]:
    """Yield the page of a real frontend in front of ``engine``. The model has a chat template."""
    model = save_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    options = {
        "engines": [engine.address],
        "model": ModelConfig(path=str(model), served_model_name="model"),
        "http": HttpConfig(host="127.0.0.1", port=0),
    }
    async with FrontendServer(model, **options) as frontend:
        tab = await browser.open(f"http://127.0.0.1:{frontend.frontend.http_port}/{FOR_PROMPTS}")
        await tab.until(shows("#status", "serving, 1 engine"))
        yield tab


async def step_until(engine: FakeEngine, tab: Tab, expression: str) -> None:
    """Run steps until a JavaScript expression is true in the page."""
    async with asyncio.timeout(LIMIT):
        while not await tab.value(f"Boolean({expression})"):
            engine.step()


async def ask(tab: Tab, prompt: str) -> None:
    await tab.write("#prompt", prompt)
    await tab.press("Enter", ctrl=True)


async def error(tab: Tab) -> str:
    await tab.until(SHOWS_ERROR)
    return await tab.text("#error")


async def test_it_opens_on_chat_where_the_model_has_a_template(browser: Browser, server: PageServer) -> None:
    tab = await browser.open(server.url)
    await tab.until("document.querySelector('[value=chat]').checked")
    await ask(tab, "Hi")
    await tab.until(output_has("a b c"))
    assert server.requests[0][0] == "/v1/chat/completions"


async def test_a_prompt_is_continued_behind_itself(tab: Tab, server: PageServer) -> None:
    await tab.write("#prompt", "Once")
    await tab.click("#run")
    await tab.until(output_has("Once a b c"))
    assert server.requests[0][0] == "/v1/completions"


async def test_parameters_are_sent_as_they_were_filled_in_and_empty_ones_are_left_out(
    tab: Tab, server: PageServer
) -> None:
    await tab.write("#temperature", "0.7")
    await tab.write("#seed", "7")
    await tab.write("#max_tokens", "")
    await tab.write("#stopStrings", "end\n\\n\\n")
    await ask(tab, "Once")
    await tab.until(output_has("a b c"))
    assert server.requests[0][1] == {
        "model": "tiny",
        "prompt": "Once",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "seed": 7,
        "stop": ["end", "\n\n"],
    }


async def test_text_is_shown_while_it_is_made(tab: Tab, server: PageServer) -> None:
    server.pieces = [" a", HOLD, " b"]
    await ask(tab, "Once")
    await tab.until(output_has("Once a"))
    assert "b" not in await tab.text("#output")
    server.go_on.set()
    await tab.until(output_has("Once a b"))


async def test_measurements_come_with_the_answer(tab: Tab) -> None:
    await ask(tab, "Once")
    await tab.until(shows("#numbers", "ended at max tokens"))
    numbers = await tab.text("#numbers")
    assert "first token" in numbers
    assert "tokens/s" in numbers
    assert "3 tokens" in numbers
    assert "prompt 5 (4 cached)" in numbers


async def test_model_output_is_never_interpreted_as_markup(tab: Tab, server: PageServer) -> None:
    server.pieces = ["<img src=x onerror=document.title='owned'>", "<b>bold</b>"]
    await ask(tab, "<i>Once</i>")
    await tab.until(output_has("<i>Once</i><img src=x onerror=document.title='owned'><b>bold</b>"))
    assert await tab.value("document.querySelectorAll('#output b, #output i, #output img').length") == 0


async def test_stop_ends_the_request_at_the_server_and_keeps_what_came(tab: Tab, server: PageServer) -> None:
    server.pieces = [" a", HOLD]
    await ask(tab, "Once")
    await tab.until(output_has("Once a"))
    await tab.click("#stop")
    async with asyncio.timeout(LIMIT):
        await server.abandoned.wait()
    await tab.until(shows("#numbers", "stopped"))
    assert await tab.text("#output") == "Once a"
    assert not await tab.value(SHOWS_ERROR)


async def test_escape_stops_too(tab: Tab, server: PageServer) -> None:
    server.pieces = [" a", HOLD]
    await ask(tab, "Once")
    await tab.until(output_has("Once a"))
    await tab.press("Escape")
    async with asyncio.timeout(LIMIT):
        await server.abandoned.wait()
    await tab.until(IDLE)


async def test_the_page_is_usable_with_the_keyboard_alone(tab: Tab, server: PageServer) -> None:
    reached = []
    for _ in range(14):
        reached.append(await tab.value("document.activeElement.id || document.activeElement.tagName"))
        await tab.press("Tab")
    # The two buttons copy the request as curl and as Python.
    assert reached[:6] == ["prompt", "run", "clear", "BUTTON", "BUTTON", "SUMMARY"]
    assert {"temperature", "top_p", "max_tokens", "seed", "stopStrings"} <= set(reached)


async def test_a_chat_carries_its_history_and_the_system_message(tab: Tab, server: PageServer) -> None:
    await tab.click("[value=chat]")
    await tab.write("#system", "Be brief.")
    server.pieces = ["Hello", "!"]
    await tab.write("#prompt", "Hi")
    await tab.press("Enter")
    await tab.until(output_has("Hello!"))
    await tab.until(IDLE)
    await tab.write("#prompt", "Again")
    await tab.press("Enter")
    await tab.until(output_has("Again"))
    await tab.until(IDLE)
    path, body = server.requests[1]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Again"},
    ]


async def test_reasoning_is_shown_apart_and_is_no_part_of_the_history(tab: Tab, server: PageServer) -> None:
    await tab.click("[value=chat]")
    server.pieces = [f"{THOUGHT}A sum", f"{THOUGHT} of two.", "42"]
    for question in ("12 + 30?", "Sure?"):
        await ask(tab, question)
        await tab.until(output_has(question))
        await tab.until(IDLE)
    assert await tab.text(".thought") == "A sum of two."
    assert await tab.text(".thought + .text") == "42"
    assert [message["content"] for message in server.requests[1][1]["messages"]] == ["12 + 30?", "42", "Sure?"]


def call(index: int, **fields: Any) -> dict[str, Any]:
    """Return a streamed piece of a tool call."""
    name, arguments = fields.pop("name", None), fields.pop("arguments", "")
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"tool_calls": [{"index": index, **fields, "function": function}]}


TOOL = {"name": "get_weather", "parameters": {"type": "object"}}
CALLS = [
    call(0, id="a", type="function", name="get_weather", arguments='{"city": '),
    call(0, arguments='"Rome"}'),
    call(1, id="b", type="function", name="get_time"),
]


async def test_tools_are_called_given_results_and_the_conversation_goes_on(tab: Tab, server: PageServer) -> None:
    await tab.click("[value=chat]")
    await tab.write("#tools", json.dumps([TOOL]))
    server.pieces = CALLS
    await ask(tab, "Weather?")
    await tab.until("document.querySelectorAll('.call textarea').length === 2")
    assert await tab.text(".call .name") == "get_weather"
    assert await tab.text(".call pre") == '{\n  "city": "Rome"\n}'
    await tab.write(".call textarea", "21 degrees")
    await tab.press("Enter", ctrl=True)
    assert "A result is missing." in await error(tab)
    assert await tab.text(".call + .call .problem") == "The result is empty."
    await tab.write(".call + .call textarea", "noon")
    server.pieces = ["Warm."]
    await tab.click(".call + .actions button")
    await tab.until(output_has("Warm."))
    await tab.until(IDLE)
    first, second = (body for _, body in server.requests)
    assert first["tools"] == [{"type": "function", "function": TOOL}]
    functions = [{"name": "get_weather", "arguments": '{"city": "Rome"}'}, {"name": "get_time", "arguments": "{}"}]
    assert second["messages"] == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": key, "type": "function", "function": function}
                for key, function in zip("ab", functions, strict=True)
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "21 degrees"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
    ]
    assert await tab.text(".call pre + .label + pre") == "21 degrees"


async def test_results_that_were_refused_can_be_sent_again(tab: Tab, server: PageServer) -> None:
    await tab.click("[value=chat]")
    server.pieces = CALLS[:2]
    await ask(tab, "Weather?")
    await tab.until("document.querySelector('.call textarea')")
    await tab.write(".call textarea", "21 degrees")
    server.refusal = (429, {"type": "rate_limit_error", "message": "the queue is full"}, {})
    await tab.press("Enter", ctrl=True)
    assert "The server is busy." in await error(tab)
    await tab.until(IDLE)
    server.refusal, server.pieces = None, ["Warm."]
    assert not await tab.value("document.querySelector('.call textarea').readOnly")
    await tab.click(".call + .actions button")
    await tab.until(output_has("Warm."))
    assert server.requests[1][1]["messages"] == server.requests[2][1]["messages"]


@pytest.mark.parametrize(
    ("field", "text", "problem"),
    [
        ("tools", '[{"name": "a"', "This is not valid JSON."),
        ("tools", '[{"name": "a"}, {"description": "b"}]', "Tool 2 has no name."),
        ("schema", "[1]", "The schema is not a JSON object."),
    ],
)
async def test_json_that_cannot_be_meant_is_told_at_its_field(
    tab: Tab, server: PageServer, field: str, text: str, problem: str
) -> None:
    await tab.click("[value=chat]")
    await tab.write(f"#{field}", text)
    await ask(tab, "Hi")
    assert problem in await error(tab)
    assert problem in await tab.text(f"#{field}Problem")
    assert await tab.value("document.activeElement.id") == field
    assert server.requests == []
    await tab.write(f"#{field}", "")
    assert await tab.text(f"#{field}Problem") == ""


async def test_a_message_that_was_refused_is_given_back(tab: Tab, server: PageServer) -> None:
    await tab.click("[value=chat]")
    server.refusal = (400, {"message": "too long", "type": "invalid_request_error", "param": None, "code": "word"}, {})
    await ask(tab, "a message")
    assert "too long" in await error(tab)
    await tab.until(IDLE)
    assert await tab.value("document.querySelector('#prompt').value") == "a message"
    assert "a message" not in await tab.text("#output")


async def test_without_a_chat_template_there_is_no_chat(browser: Browser) -> None:
    async with PageServer(chat=False) as server:
        tab = await browser.open(server.url)
        await tab.until(shows("#modeNote", "no chat template"))
        assert not await tab.value(CHAT_IS_OFFERED)


async def test_a_model_that_does_not_generate_says_what_it_does(browser: Browser, server: PageServer) -> None:
    server.capabilities = ["classify", "prefix_caching", "token_classify"]
    tab = await browser.open(server.url)
    await tab.until(
        shows("#modeNote", "This model is served for classes, classes of tokens; it does not generate text.")
    )
    assert await tab.value("document.querySelector('#run').disabled")


EMBEDDING_IS_OFFERED = "document.querySelector('[value=embedding]')?.checked"


@pytest_asyncio.fixture(loop_scope="module")
async def embedding(browser: Browser, server: PageServer) -> Tab:
    """Yield the page in front of an embedding model."""
    server.capabilities = ["embed", "token_embed"]
    server.vectors = [[0.6, 0.8]]
    tab = await browser.open(server.url)
    await tab.until(EMBEDDING_IS_OFFERED)
    return tab


async def test_a_model_that_embeds_is_offered_as_such_alone(embedding: Tab) -> None:
    assert await embedding.text(".modes") == "Embeddings"
    assert await embedding.text("#run") == "Embed"
    assert await embedding.value("document.querySelector('#settings').hidden")
    assert "generate" not in await embedding.text("body")


async def test_a_text_becomes_a_vector(embedding: Tab, server: PageServer) -> None:
    await embedding.write("#prompt", "The cat sleeps.")
    await embedding.click("#run")
    await embedding.until(output_has("[0.6000, 0.8000]"))
    await embedding.until(shows("#numbers", "7 prompt tokens"))
    assert "2 numbers, length 1.000" in await embedding.text("#output")
    assert server.requests == [("/v1/embeddings", {"model": "tiny", "input": ["The cat sleeps."]})]


async def test_two_texts_are_compared(embedding: Tab, server: PageServer) -> None:
    server.vectors = [[3.0, 4.0], [4.0, 3.0]]
    await embedding.write("#prompt", "The cat sleeps.")
    await embedding.write("#other", "A cat is asleep.")
    await embedding.click("#run")
    await embedding.until(output_has("Similarity (cosine): 0.960"))
    assert server.requests[0][1]["input"] == ["The cat sleeps.", "A cat is asleep."]


async def test_a_refused_embedding_is_told_in_words(embedding: Tab, server: PageServer) -> None:
    server.refusal = (429, {"type": "rate_limit_error", "message": "the queue is full"}, {"Retry-After": "3"})
    await embedding.write("#prompt", "x")
    await embedding.click("#run")
    await embedding.until(SHOWS_ERROR)
    assert "The server is busy." in await embedding.text("#error")
    assert await embedding.value(IDLE)


async def test_an_address_can_hold_prompt_and_parameters_and_run(browser: Browser, server: PageServer) -> None:
    tab = await browser.open(server.url + "?prompt=Hi&mode=chat&temperature=0&stop=x&stop=y&system=S&run=1")
    await tab.until(output_has("a b c"))
    path, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert (body["temperature"], body["stop"]) == (0, ["x", "y"])
    assert [message["content"] for message in body["messages"]] == ["S", "Hi"]


@pytest.mark.parametrize(
    ("status", "headers", "message", "words"),
    [
        (400, {}, "temperature is 900; it must be from 0 to 100", "The server refused this request."),
        (404, {}, "no model 'x'; known: tiny", "The server refused this request."),
        (429, {"Retry-After": "3"}, "the queue is full", "Try again in 3 s."),
        (503, {}, "engine engine-0 is gone", "The request could not be served."),
        (500, {}, "a defect", "The server failed."),
    ],
)
async def test_a_refusal_is_told_in_words(
    tab: Tab, server: PageServer, status: int, headers: dict[str, str], message: str, words: str
) -> None:
    server.refusal = (status, {"message": message, "type": "error", "param": None, "code": "word"}, headers)
    await ask(tab, "Once")
    told = await error(tab)
    assert words in told
    assert message in told


async def test_an_error_in_the_middle_is_told_and_what_came_stays(tab: Tab, server: PageServer) -> None:
    server.broken = {
        "message": "engine engine-0 is gone",
        "type": "service_unavailable_error",
        "param": None,
        "code": "engine_gone",
    }
    await ask(tab, "Once")
    told = await error(tab)
    assert "The request could not be served." in told
    assert "engine engine-0 is gone" in told
    assert await tab.text("#output") == "Once a b c"


async def test_an_answer_that_is_cut_off_is_told_as_such(tab: Tab, server: PageServer) -> None:
    server.pieces = [" a", CUT]
    server.broken = None
    await ask(tab, "Once")
    assert "The answer was cut off." in await error(tab)


async def test_without_an_engine_the_page_says_so(tab: Tab, server: PageServer) -> None:
    server.lose_engines()
    server.refusal = (
        503,
        {"message": "no engine accepted requests within 30 s", "type": "error", "param": None, "code": "word"},
        {},
    )
    await tab.until(shows("#status", "no engine accepts requests"))
    await ask(tab, "Once")
    assert "No engine accepts requests at the moment." in await error(tab)


async def test_a_server_that_is_gone_is_told_and_found_again(browser: Browser) -> None:
    async with PageServer() as server:
        tab = await browser.open(server.url)
        await tab.until(CHAT_IS_OFFERED)
        await server.stop()
        await tab.until(shows("#status", "unreachable"))
        await ask(tab, "Once")
        assert "The server cannot be reached." in await error(tab)
        async with PageServer(port=server.port):
            await tab.until(shows("#status", "serving, 1 engine"))


async def test_a_number_that_is_none_is_not_taken_for_an_empty_field(tab: Tab, server: PageServer) -> None:
    await tab.write("#temperature", "-e")
    await ask(tab, "Once")
    assert "Temperature is not a number." in await error(tab)
    assert server.requests == []


async def test_the_clusters_state_is_kept_up_to_date(tab: Tab, server: PageServer) -> None:
    await tab.until(shows("#engines", "serving"))
    server.set_engine(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.42, state=EngineState.DRAINING)
    await tab.until(shows("#engines", "draining"))
    shown = (await tab.text("#engines")).split()
    assert shown == [
        "engine-0",
        "draining",
        "127.0.0.1:50052",
        "3",
        "running",
        "2",
        "waiting",
        "42",
        "%",
        "KV",
        "cache",
    ]
    assert await tab.text("#totals") == "3 requests running, 2 waiting."
    server.missing = ["engine-1"]
    await tab.until("document.querySelector('#totals').textContent.endsWith(' Missing: engine-1.')")


@pytest.mark.parametrize("dark", [False, True])
async def test_the_page_follows_the_persons_colours(browser: Browser, server: PageServer, dark: bool) -> None:
    tab = await browser.open(server.url, dark=dark)
    red = await tab.value("Number(getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0])")
    assert (red < 64) is dark


async def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, server: PageServer) -> None:
    server.pieces = ["w" * 500]
    tab = await browser.open(server.url + "?prompt=Once&run=1", width=360, height=740)
    await tab.until(output_has("www"))
    await tab.value("document.querySelector('#settings').open = true")
    assert not await tab.value(IS_WIDER_THAN_THE_WINDOW)


async def test_the_browser_has_nothing_to_complain_about(tab: Tab, tmp_path: Path) -> None:
    await ask(tab, "Once")
    await tab.until(shows("#numbers", "ended at max tokens"))
    assert tab.complaints() == []


async def test_a_real_frontend_streams_to_the_page(real: Tab, engine: FakeEngine) -> None:
    await real.write("#max_tokens", "12")
    await real.write("#seed", "7")
    await ask(real, "hello")
    await engine.until(lambda e: e.running)
    await step_until(engine, real, "document.querySelector('#output').innerText.length > 5")
    await step_until(engine, real, shows("#numbers", "ended at max tokens"))
    # The exact number arrives with the usage, in the message after the end.
    await real.until(shows("#numbers", "\n12 tokens"))
    assert "prompt " in await real.text("#numbers")
    assert real.complaints() == []


async def test_a_real_chat_goes_through_the_models_template(real: Tab, engine: FakeEngine) -> None:
    await real.click("[value=chat]")
    await real.write("#max_tokens", "12")
    await ask(real, "hello")
    await engine.until(lambda e: e.running)
    await step_until(engine, real, shows("#numbers", "ended at max tokens"))
    prompt = byte_level().decode(engine.requests[0].prompt_token_ids)
    assert prompt == "[hello]"


async def test_stop_ends_the_work_in_the_engine(real: Tab, engine: FakeEngine) -> None:
    await ask(real, "hello")
    await engine.until(lambda e: e.running)
    await step_until(engine, real, "document.querySelector('#output').innerText.length > 5")
    steps = engine.num_steps
    await real.press("Escape")
    await engine.until(lambda e: e.aborted and not e.running)
    assert engine.num_steps == steps


async def test_a_real_refusal_names_the_field_and_the_limit(real: Tab) -> None:
    await real.write("#temperature", "900")
    await ask(real, "hello")
    told = await error(real)
    assert "The server refused this request." in told
    assert "temperature is 900" in told


async def test_an_answer_waits_for_the_engine_that_died_and_goes_on_when_it_is_back(
    real: Tab, engine: FakeEngine
) -> None:
    await ask(real, "hello")
    await engine.until(lambda e: e.running)
    await step_until(engine, real, "document.querySelector('#output').innerText.length > 5")
    port, before = engine.port, await real.text("#output")
    await engine.kill()
    await real.until(shows("#status", "no engine accepts requests"))
    await engine.start(port)
    await engine.until(lambda e: e.running)
    assert engine.requests[-1].attempt == 1
    await step_until(engine, real, f"document.querySelector('#output').innerText.length > {len(before)} + 5")
    assert (await real.text("#output")).startswith(before)


KEY = "sk-of-the-page-0123456789"


@pytest_asyncio.fixture(loop_scope="module")
async def guarded(browser: Browser, tmp_path: Path) -> AsyncIterator[tuple[Tab, str]]:
    """Yield the page of a real frontend that requires a key, and the frontend's address."""
    model = save_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    (tmp_path / "keys").write_text(f"{KEY}\n")
    async with (
        FakeEngine(vocab_size=byte_level().get_vocab_size()) as engine,
        FrontendServer(
            model,
            engines=[engine.address],
            http=HttpConfig(host="127.0.0.1", port=0),
            auth=AuthConfig(api_keys=str(tmp_path / "keys")),
        ) as frontend,
    ):
        await frontend.until_health(serving=True)
        url = f"http://127.0.0.1:{frontend.frontend.http_port}/"
        yield await browser.open(url), url
        await browser.close_tabs()


async def give_key(tab: Tab, key: str) -> None:
    await tab.write("#key", key)
    await tab.press("Enter")


async def test_a_server_that_wants_a_key_asks_for_it_and_lets_the_page_in(guarded: tuple[Tab, str]) -> None:
    tab, url = guarded
    await tab.until(shows("#status", "key needed"))
    assert await tab.text("#keyProblem") == "This server requires an API key."
    assert await tab.value("document.activeElement.id") == "key"
    await give_key(tab, KEY)
    await tab.until(shows("#status", "serving, 1 engine"))
    assert await tab.value("document.querySelector('#access').hidden")
    # The page opens in the same state as without a key.
    assert await tab.value("document.querySelector('[value=chat]').checked")
    await ask(tab, "hello")
    await tab.until(f"{IDLE} && document.querySelector('#output').innerText.length > 0")
    assert await tab.value(f"!({SHOWS_ERROR})")
    assert await tab.value("location.href") == url
    assert KEY not in await tab.value(
        "document.documentElement.outerHTML + document.cookie + JSON.stringify(localStorage)"
    )


async def test_a_wrong_key_is_told_as_such_and_can_be_replaced(guarded: tuple[Tab, str]) -> None:
    tab, _ = guarded
    await tab.until(shows("#status", "key needed"))
    await give_key(tab, "sk-of-somebody-else-9876543210")
    await tab.until(shows("#status", "key refused"))
    assert "The server does not know this key." in await tab.text("#keyProblem")
    await give_key(tab, KEY)
    await tab.until(shows("#status", "serving, 1 engine"))
    await tab.click("#changeKey")
    await tab.click("#forgetKey")
    await tab.until(shows("#status", "key needed"))
    assert await tab.value("sessionStorage.length") == 0


@pytest.mark.parametrize("status", [401, 403])
async def test_a_request_that_needs_a_key_asks_for_it(tab: Tab, server: PageServer, status: int) -> None:
    server.refusal = (status, {"message": "no credentials", "type": "error", "param": None, "code": "word"}, {})
    await ask(tab, "Once")
    assert "The server denied access. This server requires an API key." in " ".join((await error(tab)).split())
    assert await tab.text("#keyProblem") == "This server requires an API key."


async def test_a_key_that_no_header_can_hold_is_told(tab: Tab, server: PageServer) -> None:
    server.refusal = (401, {"message": "no credentials", "type": "error", "param": None, "code": "word"}, {})
    await ask(tab, "Once")
    await error(tab)
    await give_key(tab, "sk-ключ")
    assert "ASCII" in await tab.text("#keyProblem")
    assert await tab.value("sessionStorage.length") == 0


@pytest.mark.parametrize("mode", ["completion", "chat"])
async def test_enter_sends_and_shift_enter_begins_a_line(browser: Browser, server: PageServer, mode: str) -> None:
    tab = await browser.open(f"{server.url}?mode={mode}")
    await tab.until(CHAT_IS_OFFERED)
    await tab.write("#prompt", "one")
    await tab.press("Enter", shift=True)
    await tab.call("Input.insertText", text="two")
    assert server.requests == []
    await tab.press("Enter")
    await tab.until(output_has("a b c"))
    body = server.requests[0][1]
    assert (body["prompt"] if mode == "completion" else body["messages"][0]["content"]) == "one\ntwo"


async def test_enter_sends_texts_to_embed(embedding: Tab, server: PageServer) -> None:
    await embedding.write("#prompt", "The cat sleeps.")
    await embedding.press("Enter")
    await embedding.until(output_has("[0.6000, 0.8000]"))
    assert server.requests[0][1]["input"] == ["The cat sleeps."]


async def shown_program(tab: Tab) -> str:
    await tab.click("[data-form=Python]")
    shown = await tab.text("#codeTitle") + "\n" + await tab.text("#codeText")
    await tab.value("document.querySelector('#code').close()")
    return shown


async def test_the_program_is_that_of_the_answered_request_until_something_is_written(
    tab: Tab, server: PageServer
) -> None:
    await tab.click("[value=chat]")
    await ask(tab, "Hi")
    await tab.until(f"{IDLE} && {output_has('a b c')}")
    shown = await shown_program(tab)
    assert "The last request as Python" in shown
    assert 'messages=[{"role": "user", "content": "Hi"}]' in shown
    await tab.write("#prompt", "And?")
    shown = await shown_program(tab)
    assert "This request as Python" in shown
    assert '{"role": "assistant", "content": " a b c"}, {"role": "user", "content": "And?"}]' in shown


async def test_tools_are_offered_only_where_the_model_takes_them(browser: Browser) -> None:
    async with PageServer(tools=False) as server:
        tab = await browser.open(f"{server.url}?mode=chat&tools=%5B%7B%22name%22%3A%22a%22%7D%5D")
        await tab.until("document.querySelector('[value=chat]').checked")
        assert await tab.value("[...document.querySelectorAll('[data-of=tools]')].every((field) => field.hidden)")
        await ask(tab, "Hi")
        await tab.until(output_has("a b c"))
        assert "tools" not in server.requests[0][1]


async def test_the_example_of_tools_brings_a_question_for_them(tab: Tab, server: PageServer) -> None:
    await tab.click("[value=chat]")
    await tab.click("#example")
    await tab.click("#run")
    await tab.until(output_has("a b c"))
    body = server.requests[0][1]
    assert body["tools"][0]["function"]["name"] == "get_weather"
    assert body["messages"] == [{"role": "user", "content": "What is the weather in Oslo?"}]


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG file of one pixel."""
GIVE_FILES = """(() => {
  const data = new DataTransfer();
  for (const [name, type] of %s) data.items.add(new File([Uint8Array.from(atob(%r), (c) => c.charCodeAt(0))], name, { type }));
  %s;
})()"""
EVENT = "document.querySelector(%r).dispatchEvent(new %s(%r, { %s: data, bubbles: true, cancelable: true }))"
DROPPED = EVENT % ("#playground", "DragEvent", "drop", "dataTransfer")
PASTED = EVENT % ("#prompt", "ClipboardEvent", "paste", "clipboardData")
PREVIEWS = "document.querySelectorAll('#images img').length"
IMAGE_URL = f"data:image/png;base64,{PIXEL}"


async def give(tab: Tab, how: str, *files: tuple[str, str], data: str = PIXEL) -> None:
    await tab.value(GIVE_FILES % (json.dumps(files), data, how))


async def chat_with_images(browser: Browser, server: PageServer) -> Tab:
    tab = await browser.open(f"{server.url}?mode=chat")
    await tab.until("!document.querySelector('#attach').hidden")
    return tab


@pytest.mark.parametrize("how", [DROPPED, PASTED], ids=["dropped", "pasted"])
async def test_an_image_is_shown_and_sent_before_the_message(browser: Browser, how: str) -> None:
    async with PageServer(media=["image"]) as server:
        tab = await chat_with_images(browser, server)
        await give(tab, how, ("a.png", "image/png"), ("b.png", "image/png"))
        await tab.until(f"{PREVIEWS} === 2")
        await tab.until("document.querySelector('#images img').naturalWidth === 1")
        await tab.click("#images figure:last-child button")
        await tab.until(f"{PREVIEWS} === 1")
        await tab.write("#prompt", "what is it?")
        await tab.press("Enter")
        await tab.until(output_has(" a b c"))
        image = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
        question = {"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]}
        assert server.requests[-1][1]["messages"] == [question]
        assert await tab.value("document.querySelectorAll('.turn.user img').length") == 1
        assert await tab.value(PREVIEWS) == 0
        await tab.until(IDLE)
        await tab.write("#prompt", "sure?")
        await tab.press("Enter")
        await tab.until("document.querySelectorAll('.turn.assistant').length === 2")
        await tab.until(IDLE)
        assert server.requests[-1][1]["messages"] == [
            question,
            {"role": "assistant", "content": " a b c"},
            {"role": "user", "content": "sure?"},
        ]
        assert tab.complaints() == []


async def test_an_image_alone_is_a_message_and_one_that_failed_is_given_back(browser: Browser) -> None:
    async with PageServer(media=["image"]) as server:
        server.refusal = (400, {"message": "it is broken", "param": "messages[0].content[0].image_url.url"}, {})
        tab = await chat_with_images(browser, server)
        await give(tab, PASTED, ("a.png", "image/png"))
        await tab.until(f"{PREVIEWS} === 1")
        await tab.click("#run")
        await tab.until(SHOWS_ERROR)
        assert await tab.value(PREVIEWS) == 1
        server.refusal = None
        await tab.click("#run")
        await tab.until(output_has(" a b c"))
        content = server.requests[-1][1]["messages"][0]["content"]
        assert content == [{"type": "image_url", "image_url": {"url": IMAGE_URL}}]


@pytest.mark.parametrize(
    ("name", "kind", "data", "words"),
    [
        ("a.pdf", "application/pdf", PIXEL, "“a.pdf” is not an image that the model can read."),
        ("b.png", "image/png", "bm8gaW1hZ2U=", "“b.png” cannot be read: the file is damaged, or is not an image."),
        ("c.png", "image/png", PIXEL[:48], "“c.png” cannot be read"),
        ("d.png", "image/png", "", "“d.png” cannot be read"),
    ],
)
async def test_a_file_that_is_no_image_is_told_by_its_name(
    browser: Browser, name: str, kind: str, data: str, words: str
) -> None:
    async with PageServer(media=["image"]) as server:
        tab = await chat_with_images(browser, server)
        await give(tab, DROPPED, (name, kind), data=data)
        await tab.until(SHOWS_ERROR)
        assert words in await tab.text("#error")
        assert await tab.value(PREVIEWS) == 0


@pytest.mark.parametrize(
    ("code", "message", "words"),
    [
        ("media_unreadable", "is a broken PNG file", "“a.png” cannot be read as an image."),
        ("media_too_large", "has 70000000 pixels", "The server says: the image has 70000000 pixels."),
        ("media_not_allowed", "is not allowed", "“a.png” was refused by the server."),
    ],
)
async def test_an_image_that_the_server_refuses_is_told_by_its_name(
    browser: Browser, code: str, message: str, words: str
) -> None:
    async with PageServer(media=["image"]) as server:
        tab = await chat_with_images(browser, server)
        await ask(tab, "Hi")
        await tab.until(f"{IDLE} && {output_has('a b c')}")
        param = "messages[2].content[0].image_url.url"
        details = {"message": f"{param} {message}", "param": param, "code": code, "type": "invalid_request_error"}
        server.refusal = (400, details, {})
        await give(tab, PASTED, ("a.png", "image/png"))
        await tab.until(f"{PREVIEWS} === 1")
        await ask(tab, "what is it?")
        told = await error(tab)
        assert words in told
        assert "messages[2]" not in told


async def test_a_program_is_shown_without_the_image_itself(browser: Browser) -> None:
    async with PageServer(media=["image"]) as server:
        tab = await chat_with_images(browser, server)
        await give(tab, PASTED, ("a.png", "image/png"))
        await tab.until(f"{PREVIEWS} === 1")
        await tab.write("#prompt", "what?")
        await tab.click("[data-form=curl]")
        shown = await tab.text("#codeText")
        assert '"url": "data:image/png;base64,..."' in shown
        assert PIXEL not in shown


async def test_a_model_that_reads_text_is_offered_no_images(browser: Browser, server: PageServer) -> None:
    tab = await browser.open(f"{server.url}?mode=chat")
    await tab.until("document.querySelector('[value=chat]').checked")
    assert await tab.value("document.querySelector('#attach').hidden") is True
    await give(tab, PASTED, ("a.png", "image/png"))
    assert await tab.value(PREVIEWS) == 0


async def test_a_page_of_another_origin_makes_no_engine_work_and_reads_nothing(
    browser: Browser, server: PageServer, real: Tab, engine: FakeEngine
) -> None:
    frontend = await real.value("location.origin")
    # a document without a content security policy.
    foreign = await browser.open(f"{server.url.rstrip('/')}/openapi.json")
    body = json.dumps({"model": "model", "prompt": "a", "max_tokens": 1})
    blind = f"fetch('{frontend}/v1/completions', {{method: 'POST', mode: 'no-cors', body: {body!r}}})"
    # The browser sent the request and got an answer.
    assert await foreign.value(f"{blind}.then(answer => answer.type)") == "opaque"
    assert await foreign.value(f"fetch('{frontend}/cluster').then(() => 'read', () => 'kept')") == "kept"
    assert engine.requests == []
    assert await real.value("fetch('/cluster').then(answer => answer.status)") == 200
