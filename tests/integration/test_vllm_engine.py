"""Generation through ``vllm.grpc.engine.VllmEngine``, in front of engines without a model."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from penstock.common.v1.finish_pb2 import FINISH_REASON_LENGTH
from penstock.inference.v1.messages_pb2 import RoutingHints
from penstock_common.errors import Cancelled, InvalidArgument, Unavailable, Unimplemented
from tests.fakes.clients.vllm_client import PROMPT, VllmClient, chunks, completes, joined, make_request
from tests.fakes.engines.fake_engine import FakeEngine, logprob_of, token_at
from tests.fakes.frontends.frontend_server import FrontendServer, collect, eventually, failure
from tests.fakes.models.small_tokenizers import byte_level, save_model
from tests.fakes.patience import PATIENCE

VOCAB = byte_level().get_vocab_size()
LETTERS = {c: byte_level().token_to_id(c) for c in "abcdefg"}


def expected(seed: int, count: int) -> list[int]:
    return [token_at(seed, i, vocab_size=VOCAB) for i in range(count)]


@pytest.fixture
def client(frontend: FrontendServer) -> VllmClient:
    return VllmClient(frontend)


async def test_token_ids_are_streamed_and_a_complete_ends_them(client: VllmClient) -> None:
    outputs = await client.outputs(stream=True, seed=3, max_tokens=5)
    assert joined(chunks(outputs)) == expected(3, 5)
    assert [c.completion_tokens for c in chunks(outputs)] == [len(c.token_ids) for c in chunks(outputs)]
    assert {c.prompt_tokens for c in chunks(outputs)} == {3}
    (complete,) = completes(outputs)
    assert outputs[-1] is complete
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 5)


async def test_without_streaming_one_message_has_everything(client: VllmClient) -> None:
    (complete,) = await client.outputs(seed=3, max_tokens=5)
    assert list(complete.output_ids) == expected(3, 5)
    assert complete.finish_reason == "length"
    assert complete.WhichOneof("matched_stop") is None


async def test_token_ids_reach_the_engine_as_they_are(client: VllmClient, engine: FakeEngine) -> None:
    await client.outputs(max_tokens=1)
    assert list(engine.requests[0].prompt_token_ids) == list(PROMPT)
    assert not engine.requests[0].sampling_params.detokenize


async def test_text_is_tokenized_with_the_models_special_tokens(client: VllmClient, engine: FakeEngine) -> None:
    (complete,) = await client.outputs(text="hello", max_tokens=1)
    assert list(engine.requests[0].prompt_token_ids) == byte_level().encode("hello").ids
    assert complete.prompt_tokens == len(engine.requests[0].prompt_token_ids)


@pytest.mark.parametrize("stream", [True, False])
async def test_every_one_of_n_sequences_is_told_apart_by_its_index(client: VllmClient, stream: bool) -> None:
    outputs = await client.outputs(stream=stream, n=3, seed=10, max_tokens=4)
    assert [complete.index for complete in completes(outputs)] == [0, 1, 2]
    for index in range(3):
        tokens = joined(chunks(outputs, index)) if stream else list(completes(outputs)[index].output_ids)
        assert tokens == expected(10 + index, 4)


async def test_cached_prompt_tokens_are_told_from_the_first_chunk_on(client: VllmClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 2
    outputs = await client.outputs(stream=True, max_tokens=2)
    assert {o.cached_tokens for o in outputs} == {2}


@pytest.mark.parametrize("stream", [True, False])
async def test_log_probabilities_have_the_chosen_tokens_and_the_likeliest(client: VllmClient, stream: bool) -> None:
    outputs = await client.outputs(stream=stream, seed=3, max_tokens=4, logprobs=2)
    parts = [c.output_logprobs for c in (chunks(outputs) if stream else outputs)]
    tokens = [token for part in parts for token in part.token_ids]
    assert tokens == expected(3, 4)
    assert [value for part in parts for value in part.token_logprobs] == [logprob_of(token) for token in tokens]
    tops = [top for part in parts for top in part.top_logprobs]
    assert [list(top.token_ids) for top in tops] == [[0, 1]] * 4
    assert [list(top.values) for top in tops] == [[logprob_of(0), logprob_of(1)]] * 4


async def test_zero_log_probabilities_are_those_of_the_chosen_tokens_alone(client: VllmClient) -> None:
    (complete,) = await client.outputs(max_tokens=2, logprobs=0)
    assert len(complete.output_logprobs.token_logprobs) == 2
    assert not complete.output_logprobs.top_logprobs


async def test_without_logprobs_there_are_none(client: VllmClient) -> None:
    for output in await client.outputs(stream=True, max_tokens=2):
        assert not output.HasField("output_logprobs")
        assert not output.HasField("input_logprobs")


@pytest.mark.parametrize("stream", [True, False])
async def test_prompt_log_probabilities_come_once_with_a_first_position_without_value(
    client: VllmClient, stream: bool
) -> None:
    outputs = await client.outputs(stream=stream, max_tokens=3, prompt_logprobs=1)
    having = [output for output in outputs if output.HasField("input_logprobs")]
    assert having == [outputs[0]]
    prompt = having[0].input_logprobs
    assert list(prompt.token_ids) == list(PROMPT)
    assert not prompt.token_logprobs[0].HasField("value")
    assert [each.value for each in prompt.token_logprobs[1:]] == [logprob_of(token) for token in PROMPT[1:]]
    assert [list(top.token_ids) for top in prompt.top_logprobs] == [[], [0], [0]]


async def test_a_stop_string_is_named_and_all_tokens_up_to_its_end_are_sent(model: Path) -> None:
    script = [LETTERS[c] for c in "abcde"]
    engine = FakeEngine(vocab_size=VOCAB, script=lambda _: script)
    async with engine, FrontendServer(model, engines=[engine.address]) as frontend:
        await frontend.until_health(serving=True)
        for stream, include in itertools.product((True, False), repeat=2):
            outputs = await VllmClient(frontend).outputs(
                stream=stream, max_tokens=5, stop=["cd"], include_stop_str_in_output=include
            )
            (complete,) = completes(outputs)
            assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "cd")
            assert complete.completion_tokens == 4
            assert (joined(chunks(outputs)) if stream else list(complete.output_ids)) == script[:4]


async def test_a_stop_token_is_named_and_the_end_of_the_sequence_is_not(model: Path) -> None:
    script = [LETTERS[c] for c in "abc"]
    engine = FakeEngine(vocab_size=VOCAB, script=lambda _: script)
    async with engine, FrontendServer(model, engines=[engine.address]) as frontend:
        await frontend.until_health(serving=True)
        (stopped,) = await VllmClient(frontend).outputs(stop_token_ids=[script[1]])
        engine.eos_token_id = script[1]
        (ended,) = await VllmClient(frontend).outputs()

    assert (stopped.finish_reason, stopped.matched_token_id) == ("stop", script[1])
    assert (ended.finish_reason, ended.WhichOneof("matched_stop")) == ("stop", None)


async def test_every_sampling_parameter_reaches_the_engine(client: VllmClient, engine: FakeEngine) -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "max_tokens": 4,
        "min_tokens": 2,
        "ignore_eos": True,
        "seed": 11,
    }
    await client.outputs(**given, stop_token_ids=[5], logit_bias={4: 1.5})
    params = engine.requests[0].sampling_params
    assert {name: getattr(params, name) for name in given} == given
    assert list(params.stop_token_ids) == [5]
    assert dict(params.logit_bias) == {4: 1.5}


async def test_unset_parameters_are_the_protocols_and_not_the_models(engine: FakeEngine, tmp_path: Path) -> None:
    own = {"do_sample": True, "temperature": 0.3, "top_p": 0.5, "top_k": 5, "repetition_penalty": 1.3}
    folder = save_model(tmp_path / "model", generation_config={**own, "max_new_tokens": 2})
    async with FrontendServer(folder, engines=[engine.address]) as frontend:
        await frontend.until_health(serving=True)
        await VllmClient(frontend).outputs()
    params = engine.requests[0].sampling_params
    assert not any(params.HasField(name) for name in ("temperature", "top_p", "top_k", "max_tokens"))
    assert not params.HasField("repetition_penalty")


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"json_schema": '{"type": "object"}'}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"json_object": True}, "json_object"),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, "choice"),
    ],
)
async def test_every_constraint_reaches_the_engine(
    client: VllmClient, engine: FakeEngine, given: dict[str, Any], kind: str
) -> None:
    await client.outputs(**given, max_tokens=1, grammar_from_first_token=True)
    sent = engine.requests[0].sampling_params.structured_output
    assert sent.WhichOneof("constraint") == kind
    if kind == "choice":
        assert list(sent.choice.options) == ["a", "b"]
    else:
        assert getattr(sent, kind) == given[kind]


@pytest.mark.parametrize(("given", "kept"), [(2, [8, 9]), (-1, list(PROMPT))])
async def test_prompts_are_cut_at_their_beginning(
    client: VllmClient, engine: FakeEngine, given: int, kept: list[int]
) -> None:
    await client.outputs(truncate_prompt_tokens=given, max_tokens=1)
    assert list(engine.requests[0].prompt_token_ids) == kept


async def test_a_prompt_cut_to_what_the_model_can_take_leaves_room_for_a_token(
    client: VllmClient, engine: FakeEngine
) -> None:
    (complete,) = await client.outputs(tokenized={"input_ids": range(1, 300)}, truncate_prompt_tokens=-1)
    assert complete.prompt_tokens == engine.ready.max_model_len - 1
    assert complete.completion_tokens == 1


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"tokenized": None}, InvalidArgument, "input"),
        ({"top_p": 1.5}, InvalidArgument, "sampling_params.top_p"),
        ({"logit_bias": {-1: 1.0}}, InvalidArgument, "sampling_params.logit_bias"),
        ({"truncate_prompt_tokens": -2}, InvalidArgument, "sampling_params.truncate_prompt_tokens"),
        ({"data_parallel_rank": -1}, InvalidArgument, "data_parallel_rank"),
        ({"kv_transfer_params": {"remote_port": 1}}, Unimplemented, "kv_transfer_params"),
        ({"kv_transfer_params_json": "{}"}, Unimplemented, "kv_transfer_params_json"),
        ({"mm_inputs": {}}, InvalidArgument, "mm_inputs.mm_placeholders"),
        ({"extra_mm_inputs": [{}]}, InvalidArgument, "extra_mm_inputs[0].mm_placeholders"),
        ({"media_refs": {"items": [{"url": "data:,"}]}}, InvalidArgument, "media_refs"),
    ],
)
async def test_unsupported_requests_are_refused_by_name(
    client: VllmClient, fields: dict[str, Any], kind: type[Exception], field: str
) -> None:
    error = await failure(client.generate(**fields))
    assert isinstance(error, kind)
    assert error.field == field


async def test_a_request_can_be_pinned_to_an_engine(model: Path) -> None:
    engines = [FakeEngine(f"e{rank}", vocab_size=VOCAB, rank=rank) for rank in (0, 1)]
    async with engines[0], engines[1], FrontendServer(model, engines=[e.address for e in engines]) as frontend:
        for engine in engines:
            await engine.until(lambda e: e.sessions)
        await frontend.until_health(serving=True)
        await eventually(lambda: frontend.frontend._models[0].assembly.engines.view.num_engines == 2)
        for _ in range(3):
            await VllmClient(frontend).outputs(data_parallel_rank=1, max_tokens=1)
    assert [len(engine.requests) for engine in engines] == [0, 3]


async def test_cancelling_the_call_ends_it_in_the_engine_at_once(manual: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        await frontend.until_health(serving=True)
        call = VllmClient(frontend).generate(stream=True, n=2, max_tokens=50)
        await manual.until(lambda e: len(e.running) == 2)
        manual.step()
        await anext(aiter(call))
        call.cancel()
        await manual.until(lambda e: len(e.aborted) == 2 and e.num_steps == 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_abort_ends_running_requests_with_what_they_have(manual: FakeEngine, model: Path, stream: bool) -> None:
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        await frontend.until_health(serving=True)
        client = VllmClient(frontend)
        call = client.generate(request_id="mine", stream=stream, seed=3, n=2, max_tokens=50)
        await manual.until(lambda e: len(e.running) == 2)
        manual.step()
        await eventually(
            lambda: all(s.num_received for s in frontend.frontend._models[0].assembly.llm._live.copy().pop().states)
        )
        await client.stub.Abort(pb.AbortRequest(request_ids=["another", "mine"]))
        outputs = [getattr(m, m.WhichOneof("response")) for m in await collect(call)]
        await manual.until(lambda e: len(e.aborted) == 2)
    assert [complete.finish_reason for complete in completes(outputs)] == ["abort", "abort"]
    assert [complete.completion_tokens for complete in completes(outputs)] == [1, 1]
    tokens = joined(chunks(outputs)) if stream else list(completes(outputs)[0].output_ids)
    assert tokens == expected(3, 1)


async def test_abort_reaches_the_callers_own_requests_alone(manual: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        await frontend.until_health(serving=True)
        client = VllmClient(frontend)
        ours, theirs = (("x-penstock-tenant", tenant) for tenant in ("ours", "theirs"))
        call = client.stub.Generate(make_request(request_id="mine", max_tokens=2), timeout=PATIENCE, metadata=[ours])
        other = client.stub.Generate(make_request(request_id="mine", max_tokens=2), timeout=PATIENCE, metadata=[theirs])
        native = frontend.generate(request_id="mine", max_tokens=2, routing=RoutingHints(tenant="ours"))
        await manual.until(lambda e: len(e.running) == 3)
        await client.stub.Abort(pb.AbortRequest(request_ids=["mine"]), metadata=[ours])
        await manual.until(lambda e: e.aborted)
        assert sorted(r.message.tenant for r in manual.running.values()) == ["ours", "theirs"]
        while manual.running:
            manual.step()
        results = [[getattr(m, m.WhichOneof("response")) for m in await collect(each)] for each in (call, other)]
        assert [completes(result)[0].finish_reason for result in results] == ["abort", "length"]
        assert (await collect(native))[-1].finish_reason == FINISH_REASON_LENGTH


async def test_the_id_of_a_running_request_is_refused_until_the_request_has_ended(
    manual: FakeEngine, model: Path
) -> None:
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        await frontend.until_health(serving=True)
        client = VllmClient(frontend)
        first = client.generate(request_id="mine", max_tokens=1)
        await manual.until(lambda e: e.running)
        error = await failure(client.generate(request_id="mine", max_tokens=1))
        assert (error.code, error.field, error.reason) == ("INVALID_ARGUMENT", "request_id", "DUPLICATE_REQUEST_ID")
        manual.step()
        assert await collect(first)
        again = client.generate(request_id="mine", max_tokens=1)
        await manual.until(lambda e: e.running)
        manual.step()
        assert await collect(again)


async def test_abort_ends_a_request_that_waits_for_an_engine(model: Path) -> None:
    async with FrontendServer(model, engines=["127.0.0.1:1"]) as frontend:
        client = VllmClient(frontend)
        call = client.generate(request_id="mine")
        await eventually(lambda: frontend.frontend._models[0].assembly.llm.num_live)
        await client.stub.Abort(pb.AbortRequest(request_ids=["mine", "mine"]))
        error = await failure(call)
        assert isinstance(error, Cancelled)
        assert error.reason == "ABORTED"
        await eventually(lambda: not frontend.frontend._models[0].assembly.llm.num_live)


async def test_a_call_that_finds_no_engine_any_more_is_unavailable(engine: FakeEngine, model: Path) -> None:
    engine.mangle = lambda output: None
    async with FrontendServer(model, engines=[engine.address], engine_wait_timeout=0.1) as frontend:
        await frontend.until_health(serving=True)
        call = VllmClient(frontend).stub.Generate(make_request(stream=True))
        await engine.until(lambda e: e.requests)
        await engine.kill()
        error = await failure(call)
    assert isinstance(error, Unavailable)
