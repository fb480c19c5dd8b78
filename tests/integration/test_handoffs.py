"""Handovers seen by clients: requests with separate prefill and decode engines, and requests on draining engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.common.v1 import kv_pb2, sampling_pb2
from penstock_common.errors import InvalidArgument
from penstock_frontend.config import DisaggregationConfig, RetriesConfig
from tests.fakes.clients.llm_d import PREFILL_PARAMS
from tests.fakes.clients.vllm_client import VllmClient
from tests.fakes.engines.fake_engine import FakeEngine, token_at
from tests.fakes.frontends.frontend_server import FrontendServer, collect, failure
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import byte_level

VOCAB = byte_level().get_vocab_size()
LENGTH = 12
PROMPT = "once upon a time"
NO_MOVES = RetriesConfig(max_moves=0, max_strikes=1)


def frontend_of(model: Path, *engines: FakeEngine, min_prefill_tokens: int = 4) -> FrontendServer:
    return FrontendServer(
        model,
        engines=[engine.address for engine in engines],
        disaggregation=DisaggregationConfig(min_prefill_tokens=min_prefill_tokens, overflow=False),
        retries=NO_MOVES,
    )


def engine_of(name: str, *, manual: bool = False) -> FakeEngine:
    return FakeEngine(name, vocab_size=VOCAB, manual=manual)


async def tokens_of(call: Any) -> dict[int, list[int]]:
    """Return the output tokens of each sequence of a call."""
    tokens: dict[int, list[int]] = {}
    for message in await collect(call):
        tokens.setdefault(message.index, []).extend(message.token_ids)
    return tokens


def expected(seed: int) -> list[int]:
    return [token_at(seed, i, vocab_size=VOCAB) for i in range(LENGTH)]


def metric(frontend: FrontendServer, name: str, **labels: str) -> float:
    value = frontend.frontend._models[0].assembly.metrics.registry.get_sample_value(
        name, {"model_name": "model", **labels}
    )
    return value or 0.0


@pytest.mark.parametrize("kind", [sampling_pb2.OUTPUT_KIND_DELTA, sampling_pb2.OUTPUT_KIND_FINAL])
async def test_long_prompts_are_computed_on_one_engine_and_their_output_on_another(model: Path, kind: int) -> None:
    async with engine_of("a") as prefill, engine_of("b") as decode:
        prefill.give_blocks(kv_pb2.ENGINE_ROLE_PREFILL)
        decode.give_blocks(kv_pb2.ENGINE_ROLE_DECODE)
        async with frontend_of(model, prefill, decode) as frontend:
            await frontend.until_engines(2)
            calls = [
                frontend.generate(PROMPT, max_tokens=LENGTH, seed=seed, output_kind=kind, detokenize=False)
                for seed in range(10)
            ]
            for seed, call in enumerate(calls):
                assert await tokens_of(call) == {0: expected(seed)}
            short = frontend.generate("hi", max_tokens=LENGTH, seed=99, detokenize=False)
            assert await tokens_of(short) == {0: expected(99)}
            assert [request.handoff_after_tokens for request in prefill.requests] == [1] * 10
            assert [len(r.prior_output_token_ids) for r in decode.requests if r.attempt] == [1] * 10
            assert [s.engine_id for s in decode.sources if s is not None] == ["a"] * 10
            assert metric(frontend, "penstock:legs_total", plan="two", why="long") == 10
            assert metric(frontend, "penstock:legs_total", plan="one", why="short") == 1
            assert metric(frontend, "penstock:handover_gap_seconds_count") == 10
            assert metric(frontend, "penstock:requests_moved_total") == 0
            cluster = await frontend.admin.GetCluster(admin_pb.GetClusterRequest())
            assert {e.engine_id: e.role for e in cluster.engines} == {
                "a": kv_pb2.ENGINE_ROLE_PREFILL,
                "b": kv_pb2.ENGINE_ROLE_DECODE,
            }


async def test_all_sequences_of_a_call_go_on_together(model: Path) -> None:
    async with engine_of("a") as prefill, engine_of("b") as b, engine_of("c") as c:
        prefill.give_blocks(kv_pb2.ENGINE_ROLE_PREFILL)
        for engine in (b, c):
            engine.give_blocks(kv_pb2.ENGINE_ROLE_DECODE)
        async with frontend_of(model, prefill, b, c) as frontend:
            await frontend.until_engines(3)
            for _ in range(3):
                outputs = await tokens_of(frontend.generate(PROMPT, max_tokens=LENGTH, seed=5, n=3, detokenize=False))
                assert [len(outputs[index]) for index in range(3)] == [LENGTH] * 3
            for engine in (b, c):
                assert len(engine.requests) % 3 == 0
            assert len(prefill.requests) == 9


async def test_an_engine_that_drains_hands_over_what_it_has_without_a_move(model: Path) -> None:
    async with engine_of("a", manual=True) as a, engine_of("b") as b:
        for engine in (a, b):
            engine.give_blocks()
        async with frontend_of(model, a, b) as frontend:
            await frontend.until_engines(2)
            b.drain(1000.0)
            await frontend.until_engines(1)
            calls = [frontend.generate(max_tokens=LENGTH, seed=seed, detokenize=False) for seed in range(20)]
            await a.until(lambda e: len(e.running) == 20)
            a.step()
            await b.kill()
            await b.start(b.port)
            await frontend.until_engines(2)
            a.drain(1000.0)
            for seed, call in enumerate(calls):
                assert await tokens_of(call) == {0: expected(seed)}
            assert (a.num_handed_over, a.aborted) == (20, [])
            assert max(map(len, a.handoffs)) <= 8
            assert [len(request.prior_output_token_ids) for request in b.requests] == [1] * 20
            assert all(source is not None and source.engine_id == "a" for source in b.sources)
            assert metric(frontend, "penstock:requests_moved_total") == 0


async def test_engines_that_give_no_blocks_are_asked_for_nothing(model: Path) -> None:
    async with engine_of("a", manual=True) as a, engine_of("b") as b:
        b.give_blocks()
        async with FrontendServer(model, engines=[a.address, b.address]) as frontend:
            await frontend.until_engines(2)
            b.drain(1000.0)
            await frontend.until_engines(1)
            call = asyncio.create_task(tokens_of(frontend.generate(max_tokens=LENGTH, seed=3, detokenize=False)))
            await a.until(lambda e: e.running)
            a.step()
            await b.kill()
            await b.start(b.port)
            await frontend.until_engines(2)
            a.drain(0.0)
            assert await call == {0: expected(3)}
            assert (a.handoffs, len(a.aborted)) == ([], 1)


COMPLETION: dict[str, Any] = {"model": "model", "prompt": PROMPT, "max_tokens": LENGTH, "seed": 4}
CHAT: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": LENGTH,
    "seed": 4,
}


RESPONSE: dict[str, Any] = {"model": "model", "input": PROMPT, "max_output_tokens": LENGTH, "seed": 4}
CALLS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSE)]


class Servers:
    """Two servers behind a gateway, each with its own engine: one server for prefill, one for decode."""

    def __init__(self, first: OpenAIServer, second: OpenAIServer) -> None:
        self.first = first
        self.second = second

    async def two_requests(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Send the requests of llm-d's sidecar (pkg/sidecar/proxy/connector_nixlv2.go).

        Returns the second answer, or the events of its stream.
        """
        limits = ("max_output_tokens",) if path == "/v1/responses" else ("max_tokens", "max_completion_tokens")
        first = {name: value for name, value in body.items() if name != "stream_options"}
        first |= {"stream": False, **dict.fromkeys(limits, 1), "kv_transfer_params": PREFILL_PARAMS}
        begun = await self.first.http.post(path, json=first)
        assert begun.status_code == 200, begun.text
        params = begun.json()["kv_transfer_params"]
        assert params["do_remote_prefill"] is True
        done = await self.second.http.post(path, json={**body, "kv_transfer_params": params})
        assert done.status_code == 200, done.text
        answers = events(done) if body.get("stream") else [done.json()]
        assert not any("kv_transfer_params" in each.get("response", each) for each in answers)
        return answers


def events(streamed: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    if lines[-1] == "[DONE]":  # streams of /v1/responses have no [DONE]
        lines.pop()
    return [json.loads(line) for line in lines]


@asynccontextmanager
async def gateway_servers(model: Path, a: FakeEngine, b: FakeEngine) -> AsyncIterator[Servers]:
    config = DisaggregationConfig(gateway=True, allowed_addresses=("127.0.0.1",))
    async with (
        openai_server(model, engines=[a.address], disaggregation=config) as first,
        openai_server(model, engines=[b.address], disaggregation=config) as second,
    ):
        yield Servers(first, second)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_a_gateways_second_request_names_who_keeps_the_blocks_of_the_first(
    tmp_path: Path, path: str, body: dict[str, Any], stream: bool
) -> None:
    model = save_chat_model(tmp_path)
    async with engine_of("a") as a, engine_of("b") as b:
        a.give_blocks()
        b.give_blocks()
        async with gateway_servers(model, a, b) as servers:
            streamed: dict[str, Any] = {"stream": True} if stream else {}
            if stream and path != "/v1/responses":
                streamed["stream_options"] = {"include_usage": True}
            answers = await servers.two_requests(path, body | streamed)
            usage = answers[-1].get("response", answers[-1])["usage"]
            assert usage.get("completion_tokens", usage.get("output_tokens")) == LENGTH
        assert [request.lease_kv for request in a.requests] == [True]
        [source] = b.sources
        assert source is not None
        assert (source.engine_id, source.incarnation, source.address) == ("a", "1", a.ready.kv_address)
        assert (len(source.lease_id), source.fingerprint) == (16, a.ready.kv_fingerprint)
        assert not b.requests[0].lease_kv


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
async def test_a_stream_has_its_parameters_in_the_chunk_that_ends_it(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    model = save_chat_model(tmp_path)
    async with engine_of("a") as a:
        a.give_blocks()
        async with openai_server(
            model, engines=[a.address], disaggregation=DisaggregationConfig(gateway=True)
        ) as server:
            asked = {**body, "max_tokens": 3, "kv_transfer_params": PREFILL_PARAMS}
            whole = (await server.http.post(path, json=asked)).json()["kv_transfer_params"]
            options = {"stream": True, "stream_options": {"include_usage": True}}
            *chunks, ending, usage = events(await server.http.post(path, json={**asked, **options}))
            assert ending["choices"][0]["finish_reason"] == "length"
            assert ending["kv_transfer_params"].keys() == whole.keys()
            assert ending["kv_transfer_params"]["remote_engine_id"] == "a"
            assert usage["choices"] == []
            assert not any("kv_transfer_params" in each for each in [*chunks, usage])


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        (
            {"n": 2},
            "n",
            "kv_transfer_params.do_remote_decode is true and n is 2; only one sequence can be handed over, so n must be 1",
        ),
        ({"best_of": 3}, "best_of", "do_remote_decode is true and best_of is 3"),
        ({"prompt": ["a", "b"]}, "prompt", "do_remote_decode is true, but prompt has 2 prompts"),
    ],
)
async def test_a_first_request_of_a_gateway_has_one_sequence(
    model: Path, change: dict[str, Any], field: str, says: str
) -> None:
    async with engine_of("a") as a:
        async with openai_server(
            model, engines=[a.address], disaggregation=DisaggregationConfig(gateway=True)
        ) as server:
            refused = await server.http.post(
                "/v1/completions", json={**COMPLETION, "kv_transfer_params": PREFILL_PARAMS, **change}
            )
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == field
            assert says in error["message"]
        assert not a.requests


async def test_parameters_of_gateways_go_through_vllms_protocol(model: Path) -> None:
    async with engine_of("a") as a:
        a.give_blocks(kv_pb2.ENGINE_ROLE_PREFILL)
        config = DisaggregationConfig(gateway=True)
        async with FrontendServer(model, engines=[a.address], disaggregation=config) as frontend:
            await frontend.until_engines(1)
            client = VllmClient(frontend)
            asks = '{"do_remote_decode": true}'
            (complete,) = await client.outputs(seed=3, max_tokens=1, kv_transfer_params_json=asks)
            await client.outputs(seed=3, max_tokens=5, kv_transfer_params_json=complete.kv_transfer_params_json)
            assert [source is not None for source in a.sources] == [False, True]
            info = await client.stub.GetServerInfo(vllm_pb.GetServerInfoRequest())
            assert (info.kv_connector, info.kv_role, info.kv_engine_id) == ("NixlConnector", "kv_producer", "a")
            assert info.pairing_protocol == a.ready.kv_fingerprint.hex()
            error = await failure(client.generate(max_tokens=1, kv_transfer_params_json="[1]"))
            assert isinstance(error, InvalidArgument)
            assert error.field == "kv_transfer_params_json"


@pytest.mark.parametrize("stream", [False, True])
async def test_parameters_go_to_the_engines_own_connector_and_its_come_back(model: Path, stream: bool) -> None:
    asks = {"do_remote_decode": True, "do_remote_prefill": True, "lmcache": [1, {"a": "\u00e9"}]}
    config = DisaggregationConfig(gateway=True, connector="OursConnector")
    async with engine_of("a") as a, openai_server(model, engines=[a.address], disaggregation=config) as server:
        body = {**COMPLETION, "kv_transfer_params": asks, "stream": stream}
        done = await server.http.post("/v1/completions", json=body)
        answers = events(done) if stream else [done.json()]
        assert answers[-1]["kv_transfer_params"] == {"kept": asks}
        assert not any("kv_transfer_params" in each for each in answers[:-1])
        client = VllmClient(server.server)
        (complete,) = await client.outputs(seed=3, max_tokens=1, kv_transfer_params_json=json.dumps(asks))
        assert json.loads(complete.kv_transfer_params_json) == {"kept": asks}
        info = await client.stub.GetServerInfo(vllm_pb.GetServerInfoRequest())
        assert (info.kv_connector, info.kv_role, info.pairing_protocol) == ("OursConnector", "kv_both", "")
        long = {"a": "x" * 16_384}
        for wrong in ([1], "x", long):
            refused = await server.http.post("/v1/completions", json={**COMPLETION, "kv_transfer_params": wrong})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "kv_transfer_params"
        assert [json.loads(each.kv_transfer_params) for each in a.requests] == [asks, asks]
        assert not any(each.lease_kv for each in a.requests)
