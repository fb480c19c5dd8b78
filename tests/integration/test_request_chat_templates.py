"""Chat templates from operators and from requests, over HTTP."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock_common.errors import ConfigError
from penstock_frontend.config import HttpConfig, ModelConfig
from penstock_frontend.processing.chat.rendering import MAX_TEMPLATE
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.models.small_tokenizers import byte_level, save_model

HTTP = HttpConfig(host="127.0.0.1", port=0)
MODELS = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
OWN = "{% for m in messages %}({{ m.content }}){% endfor %}{{ word }}"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "a"}}]


def served(tmp_path: Path, **settings: Any) -> tuple[Path, ModelConfig]:
    model = save_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(MODELS)
    return model, ModelConfig(path=str(model), served_model_name="model", **settings)


async def post(server: FrontendServer, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        url = f"http://127.0.0.1:{server.frontend.http_port}{path}"
        return await client.post(url, json={"model": "model", "messages": MESSAGES, **body})


async def prompt(server: FrontendServer, **body: Any) -> str:
    """Return the rendered text of the conversation."""
    response = await post(server, "/tokenize", **body)
    assert response.status_code == 200, response.text
    return byte_level().decode(response.json()["tokens"])


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
async def test_a_requests_template_is_refused_by_default_and_the_error_names_the_setting(
    engine: FakeEngine, tmp_path: Path, path: str
) -> None:
    model, config = served(tmp_path)
    async with FrontendServer(model, model=config, engines=[engine.address], http=HTTP) as server:
        await server.until_health(serving=True)
        error = (await post(server, path, chat_template=OWN)).json()["error"]
        assert error["param"] == "chat_template"
        assert "model.request_chat_templates" in error["message"]
        assert await prompt(server, chat_template="") == "[hi]"  # an empty template means no template


async def test_a_requests_template_is_used_where_the_setting_is_on(engine: FakeEngine, tmp_path: Path) -> None:
    model, config = served(tmp_path, request_chat_templates=True)
    async with FrontendServer(model, model=config, engines=[engine.address], http=HTTP) as server:
        await server.until_health(serving=True)
        assert await prompt(server, chat_template=OWN, chat_template_kwargs={"word": "!"}) == "(hi)!"
        assert await prompt(server) == "[hi]"
        answer = await post(server, "/v1/chat/completions", chat_template=OWN, max_tokens=2)
        assert answer.status_code == 200
        assert byte_level().decode(engine.requests[-1].prompt_token_ids) == "(hi)"
        turns = [*MESSAGES, {"role": "assistant", "content": "yes, "}]
        body = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}
        assert await prompt(server, chat_template=OWN, **body) == "(hi)(yes, "


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"chat_template": "\n{% for %}"}, "chat_template", "chat_template, line 2: "),
        ({"chat_template": "a" * (MAX_TEMPLATE + 1)}, "chat_template", f"the limit is {MAX_TEMPLATE}"),
        ({"chat_template": "{% if a %}" * 2000}, "chat_template", "chat_template, "),
        ({"chat_template": OWN, "tools": TOOLS}, "tools", "the request's chat_template does not show tools"),
        ({"chat_template": 3}, "chat_template", "chat_template is an integer; it must be a string or null"),
    ],
)
async def test_a_wrong_template_is_refused_with_line_and_cause(
    engine: FakeEngine, tmp_path: Path, fields: dict[str, Any], param: str, words: str
) -> None:
    model, config = served(tmp_path, request_chat_templates=True)
    async with FrontendServer(model, model=config, engines=[engine.address], http=HTTP) as server:
        await server.until_health(serving=True)
        response = await post(server, "/v1/chat/completions", **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]


async def test_a_template_of_the_setting_is_used_instead_of_the_models(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(OWN)
    model, config = served(tmp_path, chat_template=str(tmp_path / "own.jinja"))
    async with FrontendServer(model, model=config, engines=[engine.address], http=HTTP) as server:
        await server.until_health(serving=True)
        assert await prompt(server) == "(hi)"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a\n{% if %}", r"model.chat_template is '.*': line 2: Expected an expression"),
        ("", r"model.chat_template is '.*': the file is empty"),
        (None, r"model.chat_template is '.*', but the file cannot be read"),
    ],
)
async def test_a_bad_template_of_the_setting_is_refused_at_the_start(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / "own.jinja").write_text(content)
    model, config = served(tmp_path, chat_template=str(tmp_path / "own.jinja"))
    with pytest.raises(ConfigError, match=problem):
        async with FrontendServer(model, model=config, engines=["127.0.0.1:1"], http=HTTP):
            pass
