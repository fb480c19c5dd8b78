"""Prompt embeddings and mixed prompts through the public API."""

from pathlib import Path
from typing import Any

import pytest

from penstock.common.v1 import tensor_pb2
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, failure

HIDDEN = 3


def vectors(count: int, *, hidden: int = HIDDEN, fill: int = 1, dtype: int = tensor_pb2.DATA_TYPE_FLOAT32) -> Any:
    size = 4 if dtype == tensor_pb2.DATA_TYPE_FLOAT32 else 2
    return tensor_pb2.Tensor(dtype=dtype, shape=[count, hidden], inline=bytes([fill]) * (count * hidden * size))


def request(**fields: Any) -> pb.GenerateRequest:
    params = fields.pop("params", {})
    return pb.GenerateRequest(sampling_params=SamplingParams(max_tokens=2, **params), **fields)


def mixed(*parts: dict[str, Any], **fields: Any) -> pb.GenerateRequest:
    return request(mixed={"parts": parts}, **fields)


async def sent(engine: FakeEngine, model: Path, message: pb.GenerateRequest) -> Any:
    """Send a request. Returns the request that the engine got, and the last message of the answer."""
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        responses = [response async for response in frontend.stub.Generate(message)]
    return engine.requests[-1], responses[-1]


async def test_a_prompt_of_vectors_reaches_the_engine_as_it_is(engine: FakeEngine, model: Path) -> None:
    got, last = await sent(engine, model, request(embeds=vectors(5)))
    assert got.prompt_embeds == vectors(5)
    assert list(got.prompt_token_ids) == [0] * 5
    assert list(got.prompt_is_token_ids) == []
    assert last.usage.prompt_tokens == 5


async def test_a_mixed_prompt_is_put_together_in_order(engine: FakeEngine, model: Path) -> None:
    message = mixed({"token_ids": {"ids": [7, 8]}}, {"embeds": vectors(2)}, {"token_ids": {"ids": [9]}})
    got, _ = await sent(engine, model, message)
    assert list(got.prompt_token_ids) == [7, 8, 0, 0, 9]
    assert list(got.prompt_is_token_ids) == [True, True, False, False, True]
    rows = got.prompt_embeds.inline
    assert rows == bytes(2 * HIDDEN * 4) + vectors(2).inline + bytes(HIDDEN * 4)


async def test_only_a_text_that_opens_the_prompt_gets_special_tokens(engine: FakeEngine, model: Path) -> None:
    first, _ = await sent(engine, model, mixed({"text": "hello"}, {"embeds": vectors(1)}, {"text": "hello"}))
    is_token = list(first.prompt_is_token_ids)
    before, after = is_token.index(False), len(is_token) - is_token.index(False) - 1
    assert before == after + 1
    assert list(first.prompt_token_ids[1:before]) == list(first.prompt_token_ids[before + 1 :])


async def test_a_mixed_prompt_without_vectors_is_one_of_tokens(engine: FakeEngine, model: Path) -> None:
    got, _ = await sent(engine, model, mixed({"token_ids": {"ids": [7, 8]}}, {"token_ids": {"ids": [9]}}))
    assert list(got.prompt_token_ids) == [7, 8, 9]
    assert not got.HasField("prompt_embeds")


async def test_truncating_keeps_the_end_of_tokens_and_vectors(engine: FakeEngine, model: Path) -> None:
    message = mixed(
        {"embeds": vectors(3, fill=1)}, {"token_ids": {"ids": [9, 10]}}, params={"truncate_prompt_tokens": 3}
    )
    got, _ = await sent(engine, model, message)
    assert list(got.prompt_token_ids) == [0, 9, 10]
    assert list(got.prompt_is_token_ids) == [False, True, True]
    assert list(got.prompt_embeds.shape) == [3, HIDDEN]
    assert got.prompt_embeds.inline[: HIDDEN * 4] == vectors(1).inline


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (mixed(), "mixed.parts"),
        (mixed({}), "mixed.parts[0]"),
        (mixed({"embeds": vectors(1)}, {"text": ""}), "mixed.parts[1].text"),
        (mixed({"embeds": vectors(1)}, {"token_ids": {}}), "mixed.parts[1].token_ids.ids"),
        (mixed({"embeds": vectors(1)}, {"embeds": vectors(1, hidden=4)}), "mixed.parts[1].embeds"),
        (
            mixed({"embeds": vectors(1)}, {"embeds": vectors(1, dtype=tensor_pb2.DATA_TYPE_FLOAT16)}),
            "mixed.parts[1].embeds",
        ),
        (mixed({"token_ids": {"ids": [10_000]}}), "token_ids.ids"),
        (request(embeds=tensor_pb2.Tensor(dtype=1, shape=[2], inline=b"12345678")), "embeds.shape"),
        (request(embeds=tensor_pb2.Tensor(dtype=1, shape=[1, 2], inline=b"1234567")), "embeds.inline"),
        (request(embeds=tensor_pb2.Tensor(dtype=7, shape=[1, 1], inline=b"1234")), "embeds.dtype"),
        (request(embeds=vectors(500)), "prompt"),
    ],
)
async def test_a_prompt_that_cannot_be_is_named(
    engine: FakeEngine, model: Path, message: pb.GenerateRequest, field: str
) -> None:
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        error = await failure(frontend.stub.Generate(message))
    assert (error.code, error.field) == ("INVALID_ARGUMENT", field)
