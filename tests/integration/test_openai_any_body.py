"""Every body gets an answer or a client error, never an internal error."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock_frontend.api.anthropic.protocol import MessagesBody
from penstock_frontend.api.openai.chat_completions import ChatCompletionRequest
from penstock_frontend.api.openai.completions import CompletionRequest
from penstock_frontend.api.openai.pooling.cohere import CohereEmbedBody
from penstock_frontend.api.openai.pooling.embeddings import EmbeddingRequest
from penstock_frontend.api.openai.pooling.pooled import ClassificationBody, PoolingBody
from penstock_frontend.api.openai.pooling.scoring import RerankBody, ScoreBody
from penstock_frontend.api.openai.pooling.tei import EmbedAllBody, EmbedBody, PredictBody, SimilarityBody
from penstock_frontend.api.openai.responses.response import ResponseBody
from penstock_frontend.api.openai.tokenization import DetokenizeRequest, TokenizeRequest
from penstock_frontend.app import app
from penstock_frontend.app.assembly import assemble
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.scripted_speech import ScriptedSpeech
from tests.fuzz.form_calls import make_form

pytestmark = pytest.mark.slow

HI = {"role": "user", "content": "hi"}
WEATHER = {"type": "function", "function": {"name": "weather"}}
CALLS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "hi"}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [HI]}),
    "/v1/messages": (MessagesBody, {"messages": [HI], "max_tokens": 3}),
    "/v1/responses": (ResponseBody, {"input": "hi", "max_tokens": None, "max_output_tokens": 3}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "hi"}),
    "/v1/score": (ScoreBody, {"queries": "hi", "documents": ["a", "b"]}),
    "/rerank": (RerankBody, {"query": "hi", "documents": ["a", {"text": "b"}]}),
    "/classify": (ClassificationBody, {"input": "hi"}),
    "/pooling": (PoolingBody, {"input": "hi"}),
    "/v2/embed": (CohereEmbedBody, {"texts": ["hi"]}),
    "/embed": (EmbedBody, {"inputs": "hi"}),
    "/embed_sparse": (EmbedAllBody, {"inputs": "hi"}),
    "/predict": (PredictBody, {"inputs": [["hi"], ["a"]]}),
    "/similarity": (SimilarityBody, {"inputs": {"source_sentence": "hi", "sentences": ["a"]}}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
NUMBERS = st.sampled_from([-(2**70), -(2**31), -2, -1, 0, 1, 2, 5, 2**31, 2**32, 2**63, 2**70, 0.5, -0.5, 1e38, 1e300])
TEXTS = st.sampled_from(["", "hi", "required", "\x00", "你", "weather", "base64", '{"a": 1}', "\\", "a" * 300])
PLAIN = st.none() | st.booleans() | NUMBERS | TEXTS
KEYS = st.sampled_from(
    ["type", "json", "regex", "choice", "name", "1", "json_schema", "schema", "include_usage", "role"]
)
VALUES = st.recursive(
    PLAIN | st.just(HI) | st.just(WEATHER),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize("path", CALLS)
async def test_no_body_is_a_defect_of_ours(path: str, tmp_path: Path) -> None:
    kind, needed = CALLS[path]
    names = st.sampled_from(kind.__struct_fields__)
    loop = asyncio.get_running_loop()
    engine = FakeEngine(vocab_size=byte_level().get_vocab_size())
    async with engine, openai_server(save_chat_model(tmp_path / "model"), engines=[engine.address]) as api:

        @settings(max_examples=60, suppress_health_check=list(HealthCheck))
        @given(fields=st.dictionaries(names, VALUES, max_size=3))
        def check(fields: dict[str, Any]) -> None:
            asyncio.run_coroutine_threadsafe(call({"max_tokens": 3, **needed, **fields}), loop).result(20)

        async def call(body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            response = await api.http.post(path, content=content)
            if response.status_code != 200:
                assert response.status_code in (400, 404), response.text
                assert response.json()["error"]["message"]

        await asyncio.to_thread(check)
        await engine.until(lambda e: not e.running)
        assert api.num_live == 0


async def test_no_form_is_a_defect_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        app, "assemble", lambda *args, **kwargs: assemble(*args, **kwargs)._replace(speech=ScriptedSpeech())
    )
    engine = FakeEngine(vocab_size=byte_level().get_vocab_size())
    statuses: Counter[int] = Counter()
    async with engine, openai_server(save_chat_model(tmp_path / "model"), engines=[engine.address]) as api:

        async def check(number: int) -> None:
            form = make_form(random.Random(number))
            headers = {"content-type": form.content_type.encode("latin-1")}
            response = await api.http.post(form.path, content=form.body, headers=headers)
            statuses[response.status_code] += 1
            if response.status_code != 200:
                assert response.status_code in (400, 404, 415), (number, response.text)
                assert response.json()["error"]["message"]

        for first in range(0, 400, 50):
            await asyncio.gather(*(check(number) for number in range(first, first + 50)))
    assert min(statuses[200], statuses[400], statuses[415]) > 5, statuses


async def test_no_depth_of_nesting_is_a_defect_of_ours(tmp_path: Path) -> None:
    """Tries many depths of nesting, because parts of the body are decoded a second time on a deeper stack."""
    engine = FakeEngine(vocab_size=byte_level().get_vocab_size())
    async with engine, openai_server(save_chat_model(tmp_path / "model"), engines=[engine.address]) as api:
        for depth in [*range(1, 500, 50), *range(500, 520), *range(800, 1000, 3)]:
            deep = "[" * depth + "]" * depth
            schema = f'{{"type": "json_schema", "json_schema": {{"name": "a", "schema": {{"const": {deep}}}}}}}'
            bodies = {
                "/v1/completions": f'{{"prompt": "a", "max_tokens": 1, "response_format": {schema}}}',
                "/v1/chat/completions": f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 1, "tools": '
                f'[{{"type": "function", "function": {{"name": "a", "parameters": {{"a": {deep}}}}}}}]}}',
                "/tokenize": f'{{"messages": [{{"role": "assistant", "tool_calls": [{{"type": "function", "function": '
                f'{{"name": "a", "arguments": {{"a": {deep}}}}}}}]}}]}}',
            }
            for path, body in bodies.items():
                response = await api.http.post(path, content=body)
                assert response.status_code in (200, 400), (depth, path, response.text)
                assert depth <= 512 or "nested more than 512 levels deep" in response.text
