"""``/v1/embeddings``, and the routes of models and tokens, with the published OpenAI client.

The engine is a fake without a model.
"""

import array
import asyncio
import base64
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.common.v1 import finish_pb2, tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.inference.v1 import messages_pb2 as inference_pb
from penstock_common.rpc import outputs
from penstock_common.types.request import Vectors
from penstock_frontend.api.openai.pooling import embeddings
from penstock_frontend.config import LimitsConfig
from penstock_frontend.loop_yield import NUMBERS_PER_TURN
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import byte_level, ids_of

TOKENIZER = byte_level()
VECTOR = [0.5, -0.25, 3.0]


@pytest.fixture
async def embedder() -> AsyncIterator[FakeEngine]:
    """Yield an engine that answers every input with the input's number of tokens and VECTOR."""
    engine = FakeEngine(vocab_size=TOKENIZER.get_vocab_size())
    del engine.ready.capabilities[:]
    engine.ready.capabilities.append("embed")

    def answer(output: pb.EngineCoreOutput) -> pb.EngineCoreOutput:
        request = engine.take(output.request_id).message
        vector = [float(len(request.prompt_token_ids)), *VECTOR][: request.pooling_params.dimensions or None]
        tensor = tensor_pb2.Tensor(
            dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[len(vector)], inline=array.array("f", vector).tobytes()
        )
        return pb.EngineCoreOutput(
            request_id=output.request_id, pooling_output=tensor, finish_reason=finish_pb2.FINISH_REASON_STOP
        )

    engine.mangle = answer
    async with engine:
        yield engine


@pytest.fixture
async def api(embedder: FakeEngine, model: Path) -> AsyncIterator[OpenAIServer]:
    async with openai_server(model, engines=[embedder.address], limits=LimitsConfig(max_pooling_inputs=3)) as server:
        yield server


@pytest.mark.parametrize("form", ["float", "base64", None])
async def test_vectors_come_in_the_order_of_the_inputs(api: OpenAIServer, form: Any) -> None:
    """Includes the client's default format, base64, which the client decodes."""
    texts = ["hello", "the fox", "a"]
    given: dict[str, Any] = {} if form is None else {"encoding_format": form}
    answer = await api.client.embeddings.create(model="model", input=texts, **given)
    sizes = [len(ids_of(text)) + 1 for text in texts]
    vectors = [list(array.array("f", _decoded(e.embedding))) for e in answer.data]
    assert vectors == [[float(size), *VECTOR] for size in sizes]
    assert [e.index for e in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(sizes)


def _decoded(embedding: Any) -> bytes:
    return base64.b64decode(embedding) if isinstance(embedding, str) else array.array("f", embedding).tobytes()


async def test_numbers_are_sent_when_they_are_asked_for(api: OpenAIServer) -> None:
    response = await api.http.post("/v1/embeddings", json={"input": "a", "encoding_format": "float"})
    assert response.json()["data"][0]["embedding"] == [2.0, *VECTOR]


async def test_token_ids_are_embedded_as_they_are(api: OpenAIServer, embedder: FakeEngine) -> None:
    await api.client.embeddings.create(model="model", input=[5, 6, 7])
    await api.client.embeddings.create(model="model", input=[[8], [9, 10]])
    assert [list(r.prompt_token_ids) for r in embedder.requests] == [[5, 6, 7], [8], [9, 10]]


async def test_dimensions_are_the_clients_choice(api: OpenAIServer, embedder: FakeEngine) -> None:
    answer = await api.client.embeddings.create(model="model", input="a", dimensions=2)
    assert len(answer.data[0].embedding) == 2
    assert embedder.requests[0].pooling_params.dimensions == 2


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": ""}, "input", "input is empty: there is nothing to compute"),
        ({"input": []}, "input", "input is empty: there is nothing to compute"),
        ({"input": ["a", ""]}, "input[1]", "input[1] is empty: there is nothing to compute"),
        ({"input": ["a"] * 4}, "input", "input has 4 entries; limits.max_pooling_inputs is 3"),
        ({"input": [1, 99999]}, "input", None),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0; it must be at least 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", None),
        ({}, "input", "input is not set"),
    ],
    ids=str,
)
async def test_a_wrong_input_is_named(api: OpenAIServer, body: Any, param: str, message: str | None) -> None:
    response = await api.http.post("/v1/embeddings", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in (None, error["message"])


async def test_a_model_that_embeds_does_not_complete(api: OpenAIServer) -> None:
    with pytest.raises(openai.BadRequestError, match="the model does not generate; it supports embed"):
        await api.client.completions.create(model="model", prompt="x")


async def test_models_are_listed_and_described(api: OpenAIServer) -> None:
    [listed] = (await api.client.models.list()).data
    assert (listed.id, listed.object, listed.owned_by) == ("model", "model", "penstock")
    described: Any = await api.client.models.retrieve("model")
    assert described == listed
    assert (described.max_model_len, described.capabilities) == (128, ["embed"])


async def test_tokenize_and_detokenize_are_inverse(api: OpenAIServer) -> None:
    text = "hello wörld 🦊"
    tokens = (await api.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert tokens["tokens"] == [0, *ids_of(text)]
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 128)
    assert len(tokens["token_strs"]) == tokens["count"]
    bare = (await api.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
    assert (bare["tokens"], bare["token_strs"]) == (ids_of(text), None)
    back = await api.http.post("/detokenize", json={"tokens": bare["tokens"]})
    assert back.json() == {"prompt": text}
    wrong = await api.http.post("/detokenize", json={"tokens": [99999]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")


async def test_metrics_stand_beside_the_api(api: OpenAIServer) -> None:
    await api.client.embeddings.create(model="model", input="a")
    assert "vllm:prompt_tokens_total" in (await api.http.get("/metrics")).text
    assert (await api.http.get("/health")).status_code == 200


class Turns:
    """Counts events in each turn of the event loop."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self._turn = 0
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._next)

    def _next(self) -> None:
        self._turn += 1
        self._loop.call_soon(self._next)

    def counting(self, function: Callable[[Vectors], list[float]]) -> Callable[[Vectors], list[float]]:
        def counted(vectors: Vectors) -> list[float]:
            numbers = function(vectors)
            self.counts[self._turn] += len(numbers)
            return numbers

        return counted


@pytest.fixture
def many_numbers(embedder: FakeEngine) -> int:
    """Make the engine answer with large vectors, and return the size of each vector."""

    def answer(output: pb.EngineCoreOutput) -> pb.EngineCoreOutput:
        embedder.take(output.request_id)
        vector = array.array("f", [0.5]) * 4096
        tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[len(vector)], inline=vector.tobytes())
        return pb.EngineCoreOutput(
            request_id=output.request_id, pooling_output=tensor, finish_reason=finish_pb2.FINISH_REASON_STOP
        )

    embedder.mangle = answer
    return 4096


async def test_a_large_answer_is_written_over_many_turns_of_the_event_loop(
    embedder: FakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch, many_numbers: int
) -> None:
    turns = Turns()
    monkeypatch.setattr(embeddings, "floats", turns.counting(embeddings.floats))
    async with openai_server(model, engines=[embedder.address]) as api:
        body = {"input": [[5, 6]] * 100, "encoding_format": "float"}
        response = await api.http.post("/v1/embeddings", json=body)
    data = response.json()["data"]
    assert [each["index"] for each in data] == list(range(100))
    assert all(
        each == {"object": "embedding", "index": each["index"], "embedding": [0.5] * many_numbers} for each in data
    )
    assert turns.counts.total() == 100 * many_numbers
    assert max(turns.counts.values()) <= NUMBERS_PER_TURN + many_numbers


async def test_many_documents_are_compared_over_many_turns_of_the_event_loop(
    embedder: FakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch, many_numbers: int
) -> None:
    turns = Turns()
    monkeypatch.setattr(outputs, "floats", turns.counting(outputs.floats))
    async with openai_server(model, engines=[embedder.address]) as api:
        inputs = [inference_pb.PoolingInput(text="x")] * 101
        response = await api.server.stub.Score(inference_pb.ScoreRequest(query=inputs[0], documents=inputs[1:]))
    assert list(response.scores) == [many_numbers / 4] * 100
    assert max(turns.counts.values()) <= NUMBERS_PER_TURN + 2 * many_numbers
