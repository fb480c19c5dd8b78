"""Web pages that call a real listener: the headers that browsers send, and the answers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock_frontend.config import AuthConfig
from penstock_frontend.config.models import LoraConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.patience import PATIENCE

SIMPLE = {"content-type": "text/plain;charset=UTF-8", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
EVIL = {**SIMPLE, "origin": "http://evil.example"}
BODY = '{"model": "model", "prompt": "a", "max_tokens": 1}'
CHAT = '{"model": "model", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}'
POSTS = {
    "/v1/completions": BODY,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/embeddings": '{"model": "model", "input": "a"}',
    "/tokenize": '{"prompt": "a"}',
    "/v1/audio/transcriptions": "--x--",
    "/v1/audio/translations": "--x--",
    "/v1/load_lora_adapter": '{"lora_name": "theirs", "lora_path": "theirs"}',
    "/v1/unload_lora_adapter": '{"lora_name": "theirs"}',
}
GETS = ("/", "/cluster", "/metrics", "/openapi.json", "/v1/models", "/version", "/v1/responses/x")


async def raw(api: OpenAIServer, request: str) -> int:
    """Return the status of a raw request that no ordinary client sends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    try:
        writer.write(request.encode())
        async with asyncio.timeout(PATIENCE):
            return int((await reader.readline()).split()[1])
    finally:
        writer.close()


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
async def test_no_route_does_anything_for_a_page_of_another_origin(
    engine: FakeEngine, model: Path, origin: str, tmp_path: Path
) -> None:
    lora = LoraConfig(directory=str(tmp_path), http_loading=True)
    async with openai_server(model, engines=[engine.address], lora=lora) as api:
        headers = {**SIMPLE, "origin": origin}
        for path, body in POSTS.items():
            response = await api.http.post(path, content=body, headers=headers)
            assert (path, response.status_code) == (path, 403)
            assert response.headers["x-request-id"]
            assert "http.allowed_origins" in response.json()["error"]["message"]
            assert "access-control-allow-origin" not in response.headers
        for path in GETS:
            for asked in (headers, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}):
                response = await api.http.get(path, headers=asked)
                assert (path, response.status_code) == (path, 403)
    assert engine.requests == []


async def test_a_name_that_was_rebound_to_this_machine_reads_nothing(engine: FakeEngine, model: Path) -> None:
    async with openai_server(model, engines=[engine.address]) as api:
        host = f"evil.example:{api.port}"
        own = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        for path in GETS:
            assert (path, (await api.http.get(path, headers={"host": host})).status_code) == (path, 421)
        refused = await api.http.post(
            "/v1/completions", content=BODY, headers={**own, "content-type": "application/json"}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (421, "host_not_allowed")
        assert refused.headers["x-request-id"]
        assert refused.json()["error"]["type"] == "invalid_request_error"
        # Anthropic's clients expect errors in Anthropic's format.
        refused = await api.http.post("/v1/messages", content=CHAT, headers=own)
        assert (refused.status_code, refused.json()["error"]["type"]) == (421, "invalid_request_error")
    assert engine.requests == []


async def test_the_page_of_the_server_itself_works_also_behind_a_proxy(engine: FakeEngine, model: Path) -> None:
    listed = {"allowed_hosts": ("llm.example.org",)}
    async with openai_server(model, engines=[engine.address], http=listed) as api:
        json = {"content-type": "application/json"}
        for host, origin, site in (
            (f"127.0.0.1:{api.port}", f"http://127.0.0.1:{api.port}", "same-origin"),
            (f"localhost:{api.port}", f"http://localhost:{api.port}", ""),
            ("llm.example.org", "https://llm.example.org", ""),  # the proxy ends TLS and keeps Host
            (f"127.0.0.1:{api.port}", "https://llm.example.org", "same-origin"),  # the proxy writes its own Host
        ):
            own = {"host": host, **({"sec-fetch-site": site} if site else {})}
            assert (await api.http.get("/", headers=own)).status_code == 200
            assert (await api.http.get("/cluster", headers=own)).status_code == 200
            answer = await api.http.post("/v1/completions", content=BODY, headers={**own, **json, "origin": origin})
            assert answer.status_code == 200, answer.text
            headers = {**own, "origin": origin}
            answer = await api.http.post("/v1/audio/transcriptions", files={"file": b"a"}, headers=headers)
            assert "does not transcribe speech" in answer.text


async def test_pages_that_are_listed_send_json_and_read_why_they_are_refused(engine: FakeEngine, model: Path) -> None:
    listed = {"allowed_origins": ("https://page.example", "app://*")}
    async with openai_server(model, engines=[engine.address], http=listed) as api:
        for origin in ("https://page.example", "app://desktop"):
            headers = {"origin": origin, "sec-fetch-site": "cross-site"}
            ask = {**headers, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
            preflight = await api.http.options("/v1/completions", headers=ask)
            assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, origin)
            answer = await api.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
            refused = await api.http.post(
                "/v1/completions", content=BODY, headers={**headers, "content-type": "text/plain"}
            )
            assert (refused.status_code, refused.json()["error"]["code"]) == (415, "json_required")
            assert refused.headers["access-control-allow-origin"] == origin
        assert (await api.http.get("/v1/models", headers=EVIL)).status_code == 403


async def test_programs_are_served_as_before(engine: FakeEngine, model: Path) -> None:
    async with openai_server(model, engines=[engine.address]) as api:
        for kind in ("text/plain", "application/x-www-form-urlencoded"):  # curl -d sends the latter
            answer = await api.http.post("/v1/completions", content=BODY, headers={"content-type": kind})
            assert answer.status_code == 200, answer.text
        # Clients of HTTP/1.0 may omit Host.
        assert await raw(api, "GET /v1/models HTTP/1.0\r\n\r\n") == 200
        assert await raw(api, "GET /v1/models HTTP/1.0\r\nhost: evil.example\r\n\r\n") == 421
        assert await raw(api, "GET http://localhost/cluster HTTP/1.1\r\nhost: evil.example\r\n\r\n") == 421
        twice = f"host: localhost\r\nhost: localhost:{api.port}\r\nconnection: close"
        assert await raw(api, f"GET /v1/models HTTP/1.1\r\n{twice}\r\n\r\n") == 400


async def test_probes_call_by_any_address(engine: FakeEngine, model: Path) -> None:
    async with openai_server(model, engines=[engine.address], http={"allowed_hosts": ("llm.example.org",)}) as api:
        for path in ("/health", "/ping"):
            assert (await api.http.get(path, headers={"host": "10.42.0.7:8000"})).status_code == 200
        assert (await api.http.get("/metrics", headers={"host": "10.42.0.7:8000"})).status_code == 421


async def test_pages_are_refused_before_keys_are_asked_for_and_bodies_read(
    engine: FakeEngine, model: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789abcdef name=alice\n")
    keys.chmod(0o600)
    auth: dict[str, Any] = {"auth": AuthConfig(api_keys=str(keys))}
    async with openai_server(model, engines=[engine.address], **auth) as api:
        answer = await api.http.post("/v1/completions", content=BODY, headers=EVIL)
        assert answer.status_code == 403
        unsent = f"host: 127.0.0.1:{api.port}\r\norigin: http://evil.example\r\ncontent-length: 1000000"
        assert await raw(api, f"POST /v1/completions HTTP/1.1\r\n{unsent}\r\n\r\n") == 403
