"""The web page and the state of the cluster, on a real frontend's HTTP port."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.common.v1 import control_pb2
from penstock_frontend.config import CoordinatorClientConfig, HttpConfig, ModelConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, until_states
from tests.fakes.models.small_tokenizers import save_model

HTTP = HttpConfig(host="127.0.0.1", port=0)


async def get(server: FrontendServer, path: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(f"http://127.0.0.1:{server.frontend.http_port}{path}")


async def state_of(server: FrontendServer) -> Any:
    return (await get(server, "/cluster")).json()


async def test_the_page_is_one_file_that_loads_nothing_from_elsewhere(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"], http=HTTP) as server:
        response = await get(server, "/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    without_namespaces = response.text.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in without_namespaces
    assert "https://" not in without_namespaces


async def test_the_state_names_the_model_and_its_engines(engine: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[engine.address], http=HTTP) as server:
        await server.until_health(serving=True)
        assert await state_of(server) == {
            "model": "model",
            "models": ["model"],
            "capabilities": ["generate"],
            "chat": False,
            "tools": False,
            "media": [],
            "speech": False,
            "serving": True,
            "max_model_len": 128,
            "coordinator": "none",
            "engines": [
                {
                    "id": "engine-0",
                    "address": engine.address,
                    "state": "serving",
                    "rank": 0,
                    "running": 0,
                    "waiting": 0,
                    "kv_cache_usage": 0.0,
                }
            ],
            "missing_engines": [],
        }


async def test_the_state_follows_an_engine_that_drains(engine: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[engine.address], http=HTTP) as server:
        await server.until_health(serving=True)
        engine.drain()
        await until_states(server, {"engine-0": control_pb2.ENGINE_STATE_DRAINING})
        state = await state_of(server)
    assert (state["serving"], state["engines"][0]["state"]) == (False, "draining")


async def test_the_state_names_a_lost_engine_until_the_engine_returns(engine: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[engine.address], http=HTTP) as server:
        await server.until_health(serving=True)
        port = int(engine.address.rpartition(":")[2])
        await engine.kill()
        await until_states(server, {"engine-0": control_pb2.ENGINE_STATE_DEAD})
        assert (await state_of(server))["missing_engines"] == ["engine-0"]
        await engine.start(port)
        await until_states(server, {"engine-0": control_pb2.ENGINE_STATE_SERVING})
        assert (await state_of(server))["missing_engines"] == []


async def test_a_coordinator_that_does_not_answer_is_disconnected(model: Path) -> None:
    nowhere = CoordinatorClientConfig(address="127.0.0.1:1")
    async with FrontendServer(model, coordinator=nowhere, http=HTTP) as server:
        state = await state_of(server)
    assert (state["coordinator"], state["engines"], state["max_model_len"]) == ("disconnected", [], 0)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ messages }}"})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": "{{ messages }}"}]})),
    ],
)
async def test_a_model_with_a_chat_template_can_chat(tmp_path: Path, file: str, content: str) -> None:
    model = save_model(tmp_path / "model")
    (model / file).write_text(content)
    config = ModelConfig(path=str(model), served_model_name="model")
    async with FrontendServer(model, model=config, engines=["127.0.0.1:1"], http=HTTP) as server:
        assert (await state_of(server))["chat"] is True


@pytest.mark.parametrize("path", ["/", "/cluster"])
async def test_the_page_can_be_switched_off(model: Path, path: str) -> None:
    off = HttpConfig(host="127.0.0.1", port=0, page=False)
    async with FrontendServer(model, engines=["127.0.0.1:1"], http=off) as server:
        assert (await get(server, path)).status_code == 404
        assert (await get(server, "/health")).status_code == 503
