"""Bodies and paths that some clients and proxies send: compressed, with a byte-order mark, or with a final slash."""

import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import brotli
import pytest

from penstock_frontend.api.http.request_body import zstd
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import byte_level

PROMPT = b'{"prompt": "Once upon a time", "max_tokens": 2}'
MESSAGES = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}'
BODIES = {
    "/v1/completions": PROMPT,
    "/v1/chat/completions": MESSAGES,
    "/v1/messages": MESSAGES.replace(b"{", b'{"model": "model", ', 1),
    "/v1/responses": b'{"input": "Hi", "max_output_tokens": 2}',
}
JSON = {"content-type": "application/json"}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(vocab_size=byte_level().get_vocab_size(), max_model_len=4096) as engine:
        yield engine


@pytest.fixture
async def api(engine: FakeEngine, chatml: Path) -> AsyncIterator[OpenAIServer]:
    async with openai_server(chatml, engines=[engine.address], http={"max_body_bytes": 100_000}) as server:
        yield server


async def post(api: OpenAIServer, path: str, body: bytes, **headers: str) -> Any:
    return await api.http.post(path, content=body, headers=JSON | headers)


def encoded(encoding: str, body: bytes) -> bytes:
    return {"gzip": gzip.compress, "br": brotli.compress, "zstd": zstd.compress}[encoding](body)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd"])
async def test_compressed_bodies_are_served_on_every_route(api: OpenAIServer, path: str, encoding: str) -> None:
    answer = await post(api, path, encoded(encoding, BODIES[path]), **{"content-encoding": encoding})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BODIES)
async def test_marks_and_slashes_do_not_matter(api: OpenAIServer, path: str) -> None:
    answer = await post(api, path + "/", b"\xef\xbb\xbf" + BODIES[path])
    assert answer.status_code == 200, answer.text
    assert answer.history == []


async def test_a_slash_does_not_matter_to_other_methods(api: OpenAIServer) -> None:
    assert (await api.http.get("/v1/models/")).json() == (await api.http.get("/v1/models")).json()
    assert (await api.http.get("/v1/chat/completions/")).status_code == 405
    assert (await api.http.get("/nowhere/")).status_code == 404


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd"])
async def test_the_limit_is_of_what_a_body_becomes(api: OpenAIServer, encoding: str) -> None:
    large = PROMPT + b" " * 200_000
    answer = await post(api, "/v1/completions", encoded(encoding, large), **{"content-encoding": encoding})
    assert answer.status_code == 413
    message = "the body has more than 100000 bytes when it is decompressed; http.max_body_bytes is 100000"
    assert answer.json()["error"]["message"] == message
    assert (await post(api, "/v1/completions", PROMPT)).status_code == 200


async def test_bodies_that_cannot_be_decompressed_get_an_error(api: OpenAIServer) -> None:
    answer = await post(api, "/v1/completions", PROMPT, **{"content-encoding": "gzip"})
    assert answer.status_code == 400
    assert "cannot be decompressed as gzip" in answer.json()["error"]["message"]
    answer = await post(api, "/v1/messages", BODIES["/v1/messages"], **{"content-encoding": "lzma"})
    assert answer.status_code == 415
    assert (
        "Content-Encoding is 'lzma'; supported: one of br, deflate, gzip, zstd, or no Content-Encoding"
        in answer.json()["error"]["message"]
    )
