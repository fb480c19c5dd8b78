"""Generate through a real frontend, in front of engines without a model."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from penstock.common.v1 import finish_pb2, sampling_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import DeadlineExceeded
from tests.fakes.engines.fake_engine import FakeEngine, token_at
from tests.fakes.frontends.frontend_server import FrontendServer, collect, failure, make_request
from tests.fakes.models.small_tokenizers import EOS, byte_level, ids_of, save_model
from tests.fakes.patience import deadlines

TOKENIZER = byte_level()
VOCAB = TOKENIZER.get_vocab_size()


def says(text: str) -> FakeEngine:
    """Return an engine whose output is ``text``."""
    return FakeEngine(vocab_size=VOCAB, script=lambda _: ids_of(text))


def joined(outputs: list[pb.GenerateResponse]) -> tuple[str, list[int]]:
    return "".join(o.text for o in outputs), [token for o in outputs for token in o.token_ids]


async def test_a_stream_joins_to_the_tokens_and_the_text_of_the_engine(engine: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        outputs = await frontend.outputs("hello", seed=7, max_tokens=20, skip_special_tokens=False, request_id="r1")
    expected = [token_at(7, i, vocab_size=VOCAB) for i in range(20)]
    assert joined(outputs) == (TOKENIZER.decode(expected, skip_special_tokens=False), expected)
    assert {o.request_id for o in outputs} == {"r1"}
    assert [o.finish_reason for o in outputs[:-1]] == [0] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == finish_pb2.FINISH_REASON_LENGTH
    assert outputs[-1].usage.prompt_tokens == len(ids_of("hello")) + 1
    assert outputs[-1].usage.completion_tokens == 20


@pytest.mark.parametrize("stop", [(), ("\ufffd",), ("e", "th")])
async def test_cumulative_and_final_outputs_end_with_what_deltas_join_to(
    engine: FakeEngine, model: Path, stop: tuple[str, ...]
) -> None:
    fields: dict[str, Any] = {"seed": 3, "max_tokens": 40, "stop": stop}
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        delta = await frontend.outputs(**fields)
        cumulative = await frontend.outputs(**fields, output_kind=sampling_pb2.OUTPUT_KIND_CUMULATIVE)
        final = await frontend.outputs(**fields, output_kind=sampling_pb2.OUTPUT_KIND_FINAL)
    assert len(final) == 1
    assert joined(delta) == joined(final) == joined(cumulative[-1:])
    assert all(later.text.startswith(earlier.text) for earlier, later in itertools.pairwise(cumulative))
    assert delta[-1].usage == final[0].usage == cumulative[-1].usage


async def test_stream_interval_spaces_the_messages(manual: FakeEngine, model: Path) -> None:
    manual.script = lambda _: ids_of("abcdefgh")
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        call = frontend.generate(stream_interval=3)
        reader = asyncio.create_task(collect(call))
        await manual.until(lambda e: e.running)
        while manual.running:
            manual.step()
            await asyncio.sleep(0)
        outputs = await reader
    assert joined(outputs)[0] == "abcdefgh"
    assert len(outputs) <= 4


async def test_a_stop_string_cuts_the_output_and_ends_the_work_in_the_engine(model: Path) -> None:
    async with says("one two three four") as engine, FrontendServer(model, engines=[engine.address]) as frontend:
        engine.eos_token_id = -1
        outputs = await frontend.outputs(stop=["two th", "nothing"])
    text, tokens = joined(outputs)
    assert text == "one "
    assert TOKENIZER.decode(tokens) == "one "[: len(TOKENIZER.decode(tokens))]
    assert outputs[-1].finish_reason == finish_pb2.FINISH_REASON_STOP
    assert outputs[-1].stop_reason.text == "two th"


async def test_a_stop_string_aborts_the_request_in_the_engine(manual: FakeEngine, model: Path) -> None:
    manual.script = lambda _: ids_of("a.bcdefghijklm")
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        reader = asyncio.create_task(collect(frontend.generate(stop=["."])))
        await manual.until(lambda e: e.running)
        manual.step()
        manual.step()
        outputs = await reader
        await manual.until(lambda e: e.aborted)
        assert manual.running == {}
    assert joined(outputs) == ("a", ids_of("a"))


async def test_an_included_stop_string_is_part_of_the_output(model: Path) -> None:
    async with says("one. two") as engine, FrontendServer(model, engines=[engine.address]) as frontend:
        outputs = await frontend.outputs(stop=["."], include_stop_str_in_output=True)
    assert joined(outputs)[0] == "one."


async def test_the_models_end_of_sequence_ends_without_a_stop_reason_and_without_text(model: Path) -> None:
    async with says("bye" + EOS) as engine, FrontendServer(model, engines=[engine.address]) as frontend:
        [engine.eos_token_id] = ids_of(EOS)
        outputs = await frontend.outputs(skip_special_tokens=False)
    assert joined(outputs)[0] == "bye"
    assert outputs[-1].finish_reason == finish_pb2.FINISH_REASON_STOP
    assert not outputs[-1].HasField("stop_reason")


async def test_a_stop_token_id_is_named_as_the_stop_reason(model: Path) -> None:
    [token] = ids_of("x")
    async with says("abxcd") as engine, FrontendServer(model, engines=[engine.address]) as frontend:
        outputs = await frontend.outputs(stop_token_ids=[token])
    assert joined(outputs)[0] == "ab"
    assert outputs[-1].stop_reason.token_id == token


async def test_without_detokenization_only_tokens_come(engine: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        outputs = await frontend.outputs(seed=1, max_tokens=5, detokenize=False)
    assert joined(outputs) == ("", [token_at(1, i, vocab_size=VOCAB) for i in range(5)])


async def test_cached_prompt_tokens_are_in_the_usage(engine: FakeEngine, model: Path) -> None:
    engine.num_cached_tokens = 2
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        outputs = await frontend.outputs(max_tokens=2)
    assert outputs[-1].usage.cached_tokens == 2


async def test_the_request_reaches_the_engine_with_everything_in_it(engine: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        request = make_request("abc", request_id="mine", cache_salt="salt", temperature=0.5, max_tokens=2, stop=["zzz"])
        request.routing.priority = 3
        request.routing.trace_context["traceparent"] = "00-1-2-01"
        await collect(frontend.stub.Generate(request, timeout=50, metadata=(("x-penstock-priority", "9"),)))
    [seen] = engine.requests
    assert list(seen.prompt_token_ids) == [0, *ids_of("abc")]
    assert (seen.external_request_id, seen.cache_salt, seen.priority) == ("mine", "salt", 3)
    assert seen.request_id.startswith("mine-")
    assert (seen.sampling_params.temperature, seen.sampling_params.max_tokens) == (0.5, 2)
    assert seen.sampling_params.HasField("seed")
    assert seen.trace_context["traceparent"] == "00-1-2-01"
    assert 0 < seen.deadline - seen.arrival_time <= 50.5
    assert 0 < seen.time_left <= seen.deadline - seen.arrival_time
    assert not seen.HasField("data_parallel_rank")


async def test_routing_hints_may_come_as_metadata(engine: FakeEngine, model: Path) -> None:
    metadata = (("x-penstock-priority", "-4"), ("traceparent", "00-a-b-01"))
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        await collect(frontend.stub.Generate(make_request(max_tokens=1), metadata=metadata))
    assert engine.requests[0].priority == -4
    assert dict(engine.requests[0].trace_context) == {"traceparent": "00-a-b-01"}


async def test_the_models_generation_config_fills_what_the_request_leaves_open(
    engine: FakeEngine, tmp_path: Path
) -> None:
    defaults = {"do_sample": True, "temperature": 0.25, "top_k": 7, "max_new_tokens": 3}
    model = save_model(tmp_path / "model", generation_config=defaults)
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        outputs = await frontend.outputs(top_k=9)
    params = engine.requests[0].sampling_params
    assert (params.temperature, params.top_k) == (0.25, 9)
    assert outputs[-1].usage.completion_tokens == 3


async def test_a_cancelled_call_ends_the_work_in_the_engine_before_its_next_step(
    manual: FakeEngine, model: Path
) -> None:
    manual.script = lambda _: ids_of("abc")
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        call = frontend.generate()
        await manual.until(lambda e: e.running)
        manual.step()
        await anext(aiter(call))
        call.cancel()
        await manual.until(lambda e: e.aborted)
        assert manual.running == {}
        assert manual.num_steps == 1


async def test_a_passed_deadline_ends_the_call_and_the_work_in_the_engine(manual: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        await frontend.until_health(serving=True)
        for seconds in deadlines():
            assert isinstance(await failure(frontend.generate(timeout=seconds)), DeadlineExceeded)
            if manual.requests:
                break
        await manual.until(lambda e: e.aborted)
        assert manual.running == {}


async def test_a_client_that_does_not_read_delays_no_other(model: Path) -> None:
    long = "x" * 20_000
    engine = FakeEngine(vocab_size=VOCAB, script=lambda _: ids_of(long), max_model_len=100_000)
    async with engine, FrontendServer(model, engines=[engine.address]) as frontend:
        engine.tokens_per_step = 500
        lazy = frontend.generate(output_kind=sampling_pb2.OUTPUT_KIND_CUMULATIVE, max_tokens=20_000)
        outputs = await frontend.outputs(max_tokens=20_000)
        assert joined(outputs)[0] == long
        assert (await collect(lazy))[-1].text == long


async def test_many_streams_at_once_get_their_own_output_each(model: Path) -> None:
    async with FakeEngine("a", vocab_size=VOCAB) as a, FakeEngine("b", vocab_size=VOCAB) as b:
        async with FrontendServer(model, engines=[a.address, b.address]) as frontend:
            await frontend.until_health(serving=True)
            fields: dict[str, Any] = {"max_tokens": 12, "detokenize": False}
            streams = await asyncio.gather(*(frontend.outputs(seed=seed, **fields) for seed in range(200)))
        for seed, outputs in enumerate(streams):
            assert joined(outputs)[1] == [token_at(seed, i, vocab_size=VOCAB) for i in range(12)]
        assert a.running == b.running == {}


async def test_random_cancellations_leave_nothing_behind(model: Path) -> None:
    engine = FakeEngine(vocab_size=VOCAB, max_model_len=10_000)
    async with engine, FrontendServer(model, engines=[engine.address]) as frontend:
        calls = [frontend.generate(seed=i, max_tokens=100, detokenize=False) for i in range(100)]
        readers = [asyncio.create_task(collect(call)) for call in calls]
        await engine.until(lambda e: len(e.requests) >= 50)
        for call in calls[::2]:
            call.cancel()
        results = await asyncio.gather(*readers, return_exceptions=True)
        await engine.until(lambda e: not e.running)
        assert all(len(joined(result)[1]) == 100 for result in results[1::2])  # type: ignore[arg-type]
        assert len(frontend.frontend._models[0].assembly.llm._live) == 0
        assert len(frontend.frontend._models[0].assembly.llm._outputs) == 0


async def test_tokenize_and_detokenize_are_inverse(engine: FakeEngine, model: Path) -> None:
    text = "hello wörld 🦊"
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        await frontend.until_health(serving=True)
        with_bos = await frontend.stub.Tokenize(pb.TokenizeRequest(text=text))
        without = await frontend.stub.Tokenize(pb.TokenizeRequest(text=text, add_special_tokens=False))
        back = await frontend.stub.Detokenize(pb.DetokenizeRequest(token_ids=with_bos.token_ids))
        raw = await frontend.stub.Detokenize(
            pb.DetokenizeRequest(token_ids=with_bos.token_ids, skip_special_tokens=False)
        )
    assert list(with_bos.token_ids) == [0, *without.token_ids] == [0, *ids_of(text)]
    assert len(with_bos.tokens) == len(with_bos.token_ids)
    assert with_bos.max_model_len == 128
    assert (back.text, raw.text) == (text, "<s>" + text)


async def test_models_are_described(engine: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        before = (await frontend.stub.GetModel(pb.GetModelRequest(name="model"))).model
        await frontend.until_health(serving=True)
        [listed] = (await frontend.stub.ListModels(pb.ListModelsRequest())).models
    assert (before.name, before.root) == ("model", str(model))
    assert (listed.max_model_len, listed.vocab_size, listed.num_engines) == (128, VOCAB, 1)
    assert list(listed.capabilities) == ["generate"]
