"""Pooling inputs that are too long: refused, or truncated as the server or the request says.

The tests use the field names of each compatible server.
"""

import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from penstock.common.v1 import finish_pb2, tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.inference.v1 import messages_pb2 as inference_pb
from penstock_frontend.config import LimitsConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import failure
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import byte_level, save_model

TOKENIZER = byte_level()
LONGEST = 8
IDS = list(range(20, 40))
FIRST, LAST = IDS[:LONGEST], IDS[-LONGEST:]
Where = Literal["none", "end", "start"]


@asynccontextmanager
async def serving(
    model: Path, where: Where = "none", capability: str = "embed"
) -> AsyncIterator[tuple[OpenAIServer, FakeEngine]]:
    engine = FakeEngine(vocab_size=TOKENIZER.get_vocab_size(), max_model_len=LONGEST)
    del engine.ready.capabilities[:]
    engine.ready.capabilities.append(capability)

    def answer(output: pb.EngineCoreOutput) -> pb.EngineCoreOutput:
        # If the input fills the maximum length, the output has already ended with its first token.
        if not output.finish_reason:
            engine.take(output.request_id)
        tensor = tensor_pb2.Tensor(
            dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[1], inline=array.array("f", [1.0]).tobytes()
        )
        return pb.EngineCoreOutput(
            request_id=output.request_id, pooling_output=tensor, finish_reason=finish_pb2.FINISH_REASON_STOP
        )

    engine.mangle = answer
    limits = LimitsConfig(pooling_truncation=where)
    async with engine, openai_server(model, engines=[engine.address], limits=limits) as server:
        yield server, engine


async def embedded(api: OpenAIServer, engine: FakeEngine, **fields: Any) -> list[int] | str:
    """Return the tokens that the engine received, or the error message if the call was refused."""
    response = await api.http.post("/v1/embeddings", json={"input": IDS, **fields})
    if response.status_code == 200:
        return list(engine.requests[-1].prompt_token_ids)
    assert response.status_code == 400
    return str(response.json()["error"]["message"])


TOO_LONG = "input is 20 tokens; max_model_len is 8"


@pytest.mark.parametrize(("where", "expected"), [("none", TOO_LONG), ("end", FIRST), ("start", LAST)])
async def test_the_servers_setting_holds_where_a_request_says_nothing(
    model: Path, where: Where, expected: list[int] | str
) -> None:
    async with serving(model, where) as (api, engine):
        assert await embedded(api, engine) == expected
        assert await embedded(api, engine, input=IDS[:3]) == IDS[:3]
        message = inference_pb.EmbedRequest(inputs=[inference_pb.PoolingInput(token_ids={"ids": IDS})])
        if where == "none":
            assert (await failure(api.server.stub.Embed(message))).reason == "PROMPT_TOO_LONG"
        else:
            await api.server.stub.Embed(message)
            assert list(engine.requests[-1].prompt_token_ids) == expected


async def test_coheres_route_truncates_where_a_request_says_nothing(model: Path) -> None:
    async with serving(model) as (api, engine):
        response = await api.http.post("/v2/embed", json={"texts": ["a" * 20]})
        assert response.json()["meta"]["billed_units"] == {"input_tokens": LONGEST}
        assert list(engine.requests[-1].prompt_token_ids) == TOKENIZER.encode("a" * (LONGEST - 1)).ids


async def test_the_tokenizers_side_holds_for_a_number_of_tokens(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    (path / "tokenizer_config.json").write_text('{"truncation_side": "left"}', encoding="utf-8")
    async with serving(path) as (api, engine):
        assert await embedded(api, engine, truncate_prompt_tokens=5) == IDS[-5:]
        assert await embedded(api, engine, truncate_prompt_tokens=5, truncation_side="right") == IDS[:5]
        assert await embedded(api, engine, truncate=True) == FIRST


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate": True}, FIRST),
        ({"truncate": "END"}, FIRST),
        ({"truncate": "START"}, LAST),
        ({"truncate": "start"}, LAST),
        ({"truncate": True, "truncation_direction": "Left"}, LAST),
        ({"truncate": True, "truncation_direction": "Right"}, FIRST),
        ({"truncation": True}, FIRST),
        ({"truncate_prompt_tokens": -1}, FIRST),
        ({"truncate_prompt_tokens": 5}, IDS[:5]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, IDS[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, IDS[:5]),
        ({"truncate": False}, TOO_LONG),
        ({"truncate": "NONE"}, TOO_LONG),
        ({"truncation": False}, TOO_LONG),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["none", "start"])
async def test_the_fields_of_a_request_win(
    model: Path, where: Where, fields: dict[str, Any], expected: list[int] | str
) -> None:
    async with serving(model, where) as (api, engine):
        assert await embedded(api, engine, **fields) == expected


async def test_texts_are_cut_behind_the_tokens_around_them(model: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 100
    async with serving(model) as (api, engine):
        whole = TOKENIZER.encode(text, add_special_tokens=False).ids
        end = await embedded(api, engine, input=text, truncate="END")
        start = await embedded(api, engine, input=text, truncate="START")
        assert len(end) == len(start) == LONGEST
        assert (end[1:], start[1:]) == (whole[: LONGEST - 1], whole[-LONGEST + 1 :])
        assert end[0] == start[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"truncate": "MIDDLE"}, "truncate is 'MIDDLE'; known: none, end, start"),
        ({"truncation_side": "up"}, "truncation_side is 'up'; known: right, left"),
        (
            {"truncate": False, "truncate_prompt_tokens": 5},
            "truncate_prompt_tokens is 5 and truncate is false, which are different truncations; set only one of the fields",
        ),
        (
            {"truncate": "END", "truncation_side": "left"},
            "truncation_side is 'left' and truncate is 'END', which are different truncations; set only one of the fields",
        ),
        ({"prompt_name": "query"}, "prompt_name is 'query', which the model does not have: it has no prompts"),
        ({"input_type": "image"}, "input_type is 'image'; known: query, search_query"),
        ({"prompt": "query: "}, "prompt is not supported; use that text in the input itself"),
        ({"embedding_types": ["int8"]}, 'embedding_types is ["int8"]; it must be ["float"] or ["base64"]'),
        ({"embedding_types": ["float", "base64"]}, "embedding_types is "),
        (
            {"embedding_types": ["float"], "encoding_format": "base64"},
            "encoding_format is 'base64' and embedding_types is [\"float\"]; set only one of them",
        ),
        ({"output_dtype": "int8"}, "output_dtype is not supported; use encoding_format"),
        ({"output_dimension": 2}, "output_dimension is not supported; use dimensions"),
        ({"normalized": False}, "normalized is not supported; use normalize"),
        ({"inputs": ["a"]}, "inputs is not supported; use input"),
    ],
    ids=str,
)
async def test_unsupported_values_are_refused_by_name(model: Path, fields: dict[str, Any], message: str) -> None:
    async with serving(model) as (api, engine):
        said = await embedded(api, engine, **{"input": [5], **fields})
        assert isinstance(said, str)
        assert said.startswith(message)


async def test_an_encoding_may_be_coheres_list(model: Path) -> None:
    async with serving(model) as (api, _):
        for types, of in ((["float"], list), (["base64"], str), ([], list)):
            body = {"input": "a", "embedding_types": types, "output_dtype": "float"}
            [found] = (await api.http.post("/v1/embeddings", json=body)).json()["data"]
            assert isinstance(found["embedding"], of)


async def test_pairs_are_cut_as_the_server_says(model: Path) -> None:
    long, short = "the lazy dog jumps over the fox", "a"
    async with serving(model, "start", "score") as (api, engine):
        response = await api.http.post("/v1/score", json={"queries": short, "documents": [long]})
        assert response.status_code == 200, response.text
        last = TOKENIZER.encode(long, add_special_tokens=False).ids[-3:]
        assert list(engine.requests[-1].prompt_token_ids)[-3:] == last
        refused = await api.http.post("/rerank", json={"query": short, "documents": [long], "truncate": False})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
