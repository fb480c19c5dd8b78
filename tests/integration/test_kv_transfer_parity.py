"""Requests of every kind start on one engine and resume on another: clients get the same tokens as from one engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio
from safetensors import safe_open

from penstock.common.v1 import finish_pb2, sampling_pb2, structured_output_pb2, tensor_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.config.sections import ServerConfig
from penstock_enginecore.kv_transfer.core.transfer_stats import ComputeRate
from penstock_frontend.config import DisaggregationConfig, ModelConfig
from tests.fakes.engines.in_process import config_of
from tests.fakes.engines.transferring_server import TransferringServer
from tests.fakes.frontends.frontend_server import FrontendServer, collect

DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
BLOCK = 16
"""Tokens per KV block. The kernels' decoder, which makes logits bitwise equal, supports no smaller blocks."""
STORY = (
    "once upon a time there was a little girl who had a red ball and a big dog and went to the park with her friends "
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ball", "dog"]}, "big": {"type": "boolean"}},
    "required": ["name", "big"],
}
STEP_TOKENS = 16
"""Number of prompt tokens in a step of the prefill engine."""

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


class Pair(NamedTuple):
    """Two frontends and their engines.

    Attributes:
        two: Frontend in front of a prefill engine and a decode engine.
        one: Frontend in front of one engine that does both.
    """

    two: FrontendServer
    one: FrontendServer
    prefill: TransferringServer
    decode: TransferringServer


async def started(stack: AsyncExitStack, name: str, **sections: Any) -> TransferringServer:
    role = sections.pop("role", "both")
    cache = {"block_size": BLOCK, "num_blocks": 400, "min_load_tokens": 1}
    config = config_of(DEMO_MODEL, engine_id=name, cache=cache, kernels={"batch_invariant": True}, **sections)
    config = msgspec.structs.replace(config, role=role, server=ServerConfig(host="127.0.0.1", port=0))
    server = TransferringServer(config)
    await asyncio.to_thread(lambda: server.start().load())
    stack.push_async_callback(asyncio.to_thread, server.stop)
    return server


async def in_front_of(stack: AsyncExitStack, *engines: TransferringServer) -> FrontendServer:
    frontend = FrontendServer(
        DEMO_MODEL,
        engines=[engine.address for engine in engines],
        model=ModelConfig(path=str(DEMO_MODEL)),
        disaggregation=DisaggregationConfig(min_prefill_tokens=2 * BLOCK, overflow=False),
    )
    await stack.enter_async_context(frontend)
    await frontend.until_engines(len(engines))
    return frontend


@pytest.fixture(scope="module", autouse=True)
def loads_pay() -> Iterator[None]:
    """Make engines load blocks even if recomputing them would be faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputeRate, "pays", lambda *_: True)
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def one() -> AsyncIterator[FrontendServer]:
    async with AsyncExitStack() as stack:
        yield await in_front_of(stack, await started(stack, "alone"))


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["grpc", "shared_memory"])
async def pair(request: pytest.FixtureRequest, one: FrontendServer) -> AsyncIterator[Pair]:
    transfer = {"transport": request.param, "port": 0, "advertise": "127.0.0.1", "arena": 8 << 20}
    async with AsyncExitStack() as stack:
        chunks = {"max_num_batched_tokens": STEP_TOKENS}
        prefill = await started(stack, "p", role="prefill", kv_transfer=transfer, scheduler=chunks)
        decode = await started(stack, "d", role="decode", kv_transfer=transfer)
        yield Pair(await in_front_of(stack, prefill, decode), one, prefill, decode)


def params_of(**settings: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(**({"max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | settings))


def vectors(count: int) -> tensor_pb2.Tensor:
    """Return embeddings that the model's embedding layer gives for arbitrary tokens."""
    with safe_open(str(DEMO_MODEL / "model.safetensors"), framework="pt") as weights:
        rows = weights.get_tensor("model.embed_tokens.weight")[100 : 100 + count].float().contiguous()
    return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=list(rows.shape), inline=rows.numpy().tobytes())


def request_of(name: str) -> pb.GenerateRequest:
    """Return the request of a case. Each case has its own prompt."""
    text = f"{name}: {STORY * 4}"
    match name:
        case "n":
            return pb.GenerateRequest(text=text, sampling_params=params_of(n=3, temperature=1.0, seed=11))
        case "penalties":
            penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2}
            return pb.GenerateRequest(text=text, sampling_params=params_of(**penalties))
        case "schema":
            constraint = structured_output_pb2.StructuredOutput(json_schema=json.dumps(SCHEMA))
            params = params_of(structured_output=constraint, ignore_eos=False, max_tokens=60, temperature=1.0, seed=3)
            return pb.GenerateRequest(text=text, sampling_params=params)
        case "salt":
            return pb.GenerateRequest(text=text, sampling_params=params_of(), cache_salt="a tenant")
        case "embeds":
            return pb.GenerateRequest(embeds=vectors(100), sampling_params=params_of())
        case "mixed":
            parts: Any = [{"text": text}, {"embeds": vectors(20)}, {"token_ids": {"ids": range(300, 320)}}]
            return pb.GenerateRequest(mixed=pb.MixedPrompt(parts=parts), sampling_params=params_of())
        case "logprobs":
            return pb.GenerateRequest(text=text, sampling_params=params_of(logprobs=3, temperature=1.0, seed=5))
        case _:
            return pb.GenerateRequest(text=text, sampling_params=params_of())


class Answer(NamedTuple):
    """Answer of one sequence."""

    token_ids: list[int]
    text: str
    finish_reason: int
    stop: str
    logprobs: list[float]


async def answers(frontend: FrontendServer, request: pb.GenerateRequest) -> list[Answer]:
    messages = await collect(frontend.stub.Generate(request, timeout=300))
    found = []
    for index in range(max(1, request.sampling_params.n)):
        own = [message for message in messages if message.index == index]
        found.append(
            Answer(
                [token for message in own for token in message.token_ids],
                "".join(message.text for message in own),
                own[-1].finish_reason,
                str(own[-1].stop_reason),
                [value for message in own for value in message.logprobs.logprobs],
            )
        )
    return found


def moved(pair: Pair) -> tuple[float, float]:
    """Return the number of KV blocks that the prefill engine has sent and that the decode engine has received."""
    name = "penstock:kv_transfer_blocks_total"
    return pair.prefill.value(name, direction="out"), pair.decode.value(name, direction="in")


@pytest.mark.parametrize("kind", ["chunked", "n", "penalties", "schema", "salt", "embeds", "mixed", "logprobs"])
@pytest.mark.parametrize(
    "output", [sampling_pb2.OUTPUT_KIND_DELTA, sampling_pb2.OUTPUT_KIND_FINAL], ids=["delta", "final"]
)
async def test_answers_are_those_of_one_engine(pair: Pair, kind: str, output: int) -> None:
    """Runs each kind with two output kinds. In the second run, the blocks are already cached."""
    request = request_of(kind)
    request.sampling_params.output_kind = output  # type: ignore[assignment]
    before = moved(pair)
    wanted = await answers(pair.one, request)
    assert await answers(pair.two, request) == wanted
    given, taken = (now - then for now, then in zip(moved(pair), before, strict=True))
    assert given == taken
    if output == sampling_pb2.OUTPUT_KIND_DELTA:
        assert given >= 4
        assert len(wanted) == (3 if kind == "n" else 1)
    if kind == "schema":
        assert set(json.loads(wanted[0].text)) == {"name", "big"}


async def test_stop_strings_that_the_legs_share_are_found(pair: Pair) -> None:
    """Uses stop strings that begin in the prefill engine's only token and end in the decode engine's tokens."""
    [plain] = await answers(pair.one, request_of("stop"))
    for place, stop in enumerate((plain.text[:12], plain.text[3:11], plain.text[20:30])):
        request = request_of("stop")
        request.sampling_params.stop.append(stop)
        request.cache_salt = f"{place}"
        wanted = await answers(pair.one, request)
        assert wanted[0].finish_reason == finish_pb2.FINISH_REASON_STOP
        before = moved(pair)
        assert await answers(pair.two, request) == wanted
        assert moved(pair)[1] > before[1]


async def test_salts_have_blocks_of_their_own(pair: Pair) -> None:
    for salt in ("one", "two"):
        request = request_of("salts")
        request.cache_salt = salt
        wanted = await answers(pair.one, request)
        before = moved(pair)
        assert await answers(pair.two, request) == wanted
        given, taken = (now - then for now, then in zip(moved(pair), before, strict=True))
        assert given == taken >= 7, "all of the prompt moves again"
