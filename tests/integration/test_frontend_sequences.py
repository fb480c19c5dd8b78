"""Several sequences of one prompt (n) through a real frontend, in front of engines without a model."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.common.v1 import finish_pb2, sampling_pb2
from penstock.enginecore.v1 import messages_pb2 as engine_pb
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from penstock_frontend.config import LimitsConfig
from tests.fakes.engines.fake_engine import FakeEngine, token_at
from tests.fakes.frontends.frontend_server import FrontendServer, collect, failure
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.patience import deadlines

VOCAB = byte_level().get_vocab_size()


def of(outputs: Sequence[pb.GenerateResponse], index: int) -> list[pb.GenerateResponse]:
    """Return the messages of one sequence."""
    return [output for output in outputs if output.index == index]


def tokens_of(outputs: Sequence[pb.GenerateResponse]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def test_sequence_i_is_what_the_request_with_seed_plus_i_gives(frontend: FrontendServer) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "skip_special_tokens": False}
    outputs = await frontend.outputs(n=4, seed=10, **fields)
    for index in range(4):
        alone = await frontend.outputs(seed=10 + index, **fields)
        assert tokens_of(of(outputs, index)) == [token_at(10 + index, i, vocab_size=VOCAB) for i in range(12)]
        assert "".join(o.text for o in of(outputs, index)) == "".join(o.text for o in alone)


async def test_every_sequence_ends_once_with_the_usage_of_its_own(frontend: FrontendServer) -> None:
    outputs = await frontend.outputs("hello", n=3, max_tokens=5)
    ends = [output for output in outputs if output.finish_reason]
    assert sorted(output.index for output in ends) == [0, 1, 2]
    assert {output.usage.completion_tokens for output in ends} == {5}
    assert len({output.usage.prompt_tokens for output in ends}) == 1
    assert all(not output.HasField("usage") for output in outputs if output not in ends)


async def test_the_sequences_of_a_request_run_on_one_engine(model: Path) -> None:
    async with FakeEngine("a", vocab_size=VOCAB) as a, FakeEngine("b", vocab_size=VOCAB) as b:
        async with FrontendServer(model, engines=[a.address, b.address]) as frontend:
            for engine in (a, b):
                await engine.until(lambda e: e.sessions)
            await frontend.until_health(serving=True)
            await asyncio.gather(*(frontend.outputs(n=5, max_tokens=2, request_id=f"r{i}") for i in range(4)))
        for engine in (a, b):
            owners = [request.external_request_id for request in engine.requests]
            assert {owners.count(owner) for owner in owners} <= {5}
        assert len(a.requests) + len(b.requests) == 20


async def test_engines_get_single_sequences_and_only_one_scores_the_prompt(
    frontend: FrontendServer, engine: FakeEngine
) -> None:
    await frontend.outputs("abc", n=3, seed=1, max_tokens=1, prompt_logprobs=1, request_id="mine")
    assert len({request.request_id for request in engine.requests}) == 3
    assert all(request.request_id.startswith("mine-") for request in engine.requests)
    assert {request.external_request_id for request in engine.requests} == {"mine"}
    assert not any(request.sampling_params.HasField("n") for request in engine.requests)
    assert [request.sampling_params.HasField("prompt_logprobs") for request in engine.requests] == [True, False, False]
    assert len({tuple(request.prompt_token_ids) for request in engine.requests}) == 1


@pytest.mark.parametrize("kind", [sampling_pb2.OUTPUT_KIND_CUMULATIVE, sampling_pb2.OUTPUT_KIND_FINAL])
async def test_cumulative_and_final_sequences_end_with_what_their_deltas_join_to(
    frontend: FrontendServer, kind: Any
) -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 5, "max_tokens": 20, "stop": ("e",)}
    deltas = await frontend.outputs(**fields)
    others = await frontend.outputs(**fields, output_kind=kind)
    for index in range(3):
        last = of(others, index)[-1]
        assert (last.text, list(last.token_ids)) == (
            "".join(o.text for o in of(deltas, index)),
            tokens_of(of(deltas, index)),
        )
        assert last.finish_reason == of(deltas, index)[-1].finish_reason
    assert kind != sampling_pb2.OUTPUT_KIND_FINAL or len(others) == 3


async def test_a_stop_string_ends_its_sequence_only(manual: FakeEngine, model: Path) -> None:
    texts = {1: "a.bc", 2: "abcd"}
    ids = {seed: byte_level().encode(text, add_special_tokens=False).ids for seed, text in texts.items()}
    manual.script = lambda request: ids[request.sampling_params.seed]
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        reader = asyncio.create_task(collect(frontend.generate(n=2, seed=1, stop=["."])))
        await manual.until(lambda e: len(e.running) == 2)
        manual.step()
        manual.step()
        await manual.until(lambda e: e.aborted)
        assert [request.message.sampling_params.seed for request in manual.running.values()] == [2]
        while manual.running:
            manual.step()
        outputs = await reader
    assert ["".join(o.text for o in of(outputs, index)) for index in (0, 1)] == ["a", "abcd"]


async def test_a_cancelled_call_ends_all_its_sequences(manual: FakeEngine, model: Path) -> None:
    # The tokens are letters. With random tokens, a text could wait for the next token to complete a character.
    letters = byte_level().encode("abcdef", add_special_tokens=False).ids
    manual.script = lambda request: letters
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        call = frontend.generate(n=3)
        await manual.until(lambda e: len(e.running) == 3)
        manual.step()
        await anext(aiter(call))
        call.cancel()
        await manual.until(lambda e: len(e.aborted) == 3)
        assert manual.running == {}


async def test_a_passed_deadline_ends_all_sequences(manual: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        await frontend.until_health(serving=True)
        for seconds in deadlines():
            assert isinstance(await failure(frontend.generate(n=3, timeout=seconds)), DeadlineExceeded)
            if len(manual.requests) >= 3:
                break
        await manual.until(lambda e: len(e.aborted) == len(e.requests))
        assert manual.running == {}


async def test_one_failed_sequence_fails_the_call_and_ends_the_others(manual: FakeEngine, model: Path) -> None:
    def break_one(output: engine_pb.EngineCoreOutput) -> engine_pb.EngineCoreOutput:
        if output.request_id.endswith(".1"):
            output.finish_reason = finish_pb2.FINISH_REASON_ERROR
            output.error.code, output.error.message = "INVALID_ARGUMENT", "this one cannot be"
        return output

    manual.mangle = break_one
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        reader = asyncio.create_task(failure(frontend.generate(n=3, max_tokens=100)))
        await manual.until(lambda e: len(e.running) == 3)
        manual.step()
        assert isinstance(await reader, InvalidArgument)
        await manual.until(lambda e: len(e.aborted) == 2)
        assert len(frontend.frontend._models[0].assembly.llm._outputs) == 0
        assert len(frontend.frontend._models[0].assembly.llm._live) == 0


async def test_a_request_is_over_when_its_last_sequence_has_ended(manual: FakeEngine, model: Path) -> None:
    stop = byte_level().encode("a.", add_special_tokens=False).ids
    long = byte_level().encode("abc", add_special_tokens=False).ids
    manual.script = lambda request: stop if request.sampling_params.seed == 1 else long
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        call = frontend.generate(n=2, seed=1, request_id="same")
        messages = aiter(call)
        await manual.until(lambda e: len(e.running) == 2)
        manual.step()
        manual.step()
        while not (await anext(messages)).finish_reason:
            pass
        assert frontend.frontend._models[0].assembly.llm.num_live == 1
        manual.step()
        while not (await anext(messages)).finish_reason:
            pass
        again = frontend.generate(seed=1, request_id="same")
        await manual.until(lambda e: e.running)
        manual.step()
        manual.step()
        assert await collect(again)


async def test_the_limit_of_requests_counts_calls(manual: FakeEngine, model: Path) -> None:
    limits = LimitsConfig(max_requests=1)
    async with FrontendServer(model, engines=[manual.address], limits=limits) as frontend:
        reader = asyncio.create_task(collect(frontend.generate(n=5, max_tokens=1)))
        await manual.until(lambda e: len(e.running) == 5)
        assert isinstance(await failure(frontend.generate()), ResourceExhausted)
        manual.step()
        assert len([o for o in await reader if o.finish_reason]) == 5


async def test_greedy_sequences_are_all_alike(frontend: FrontendServer, engine: FakeEngine) -> None:
    ids = byte_level().encode("same", add_special_tokens=False).ids
    engine.script = lambda request: ids if request.sampling_params.temperature == 0 else None
    outputs = await frontend.outputs(n=3, temperature=0.0)
    assert {tuple(tokens_of(of(outputs, index))) for index in range(3)} == {tuple(ids)}
