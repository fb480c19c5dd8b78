"""``/v1/completions`` with the published OpenAI client, in front of an engine without a model."""

from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.common.v1 import structured_output_pb2 as pb
from penstock_frontend.processing.prompts.infill import FORMS, InfillForm
from tests.fakes.engines.fake_engine import FakeEngine, logprob_of, token_at
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import EOS, byte_level, ids_of

TOKENIZER = byte_level()
VOCAB = TOKENIZER.get_vocab_size()


async def complete(
    api: OpenAIServer, prompt: Any = "hello", *, extra: dict[str, Any] | None = None, **body: Any
) -> Any:
    return await api.client.completions.create(model="model", prompt=prompt, extra_body=extra, **body)


async def streamed(api: OpenAIServer, prompt: Any = "hello", **body: Any) -> list[Any]:
    return [chunk async for chunk in await complete(api, prompt, stream=True, **body)]


def joined(chunks: list[Any], index: int = 0) -> str:
    return "".join(c.choices[0].text for c in chunks if c.choices and c.choices[0].index == index)


async def test_a_completion_is_the_engines_text(api: OpenAIServer, engine: FakeEngine) -> None:
    engine.script = lambda _: ids_of("the fox")
    answer = await complete(api)
    [choice] = answer.choices
    assert (answer.object, answer.model, choice.text) == ("text_completion", "model", "the fox")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.usage.prompt_tokens == len(ids_of("hello")) + 1
    assert answer.usage.completion_tokens == len(ids_of("the fox"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_sixteen_tokens_are_the_default(api: OpenAIServer, engine: FakeEngine) -> None:
    await complete(api)
    assert engine.requests[0].sampling_params.max_tokens == 16


async def test_a_stream_joins_to_the_whole(api: OpenAIServer) -> None:
    body: dict[str, Any] = {"seed": 3, "max_tokens": 40, "n": 2}
    whole = await complete(api, **body)
    chunks = await streamed(api, **body)
    assert [joined(chunks, index) for index in (0, 1)] == [choice.text for choice in whole.choices]
    assert {c.id for c in chunks} == {chunks[0].id}
    assert all(c.usage is None for c in chunks)
    assert [c.choices[0].finish_reason for c in chunks].count("length") == 2


async def test_a_stream_ends_with_the_usage_when_asked(api: OpenAIServer) -> None:
    chunks = await streamed(api, stream_options={"include_usage": True}, max_tokens=5)
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.completion_tokens, chunks[0].usage) == (5, None)


async def test_chunks_have_as_many_tokens_as_are_asked_for(api: OpenAIServer) -> None:
    chunks = await streamed(api, seed=3, max_tokens=9, extra={"stream_interval": 4, "return_token_ids": True})
    assert sum(len(chunk.choices[0].token_ids) for chunk in chunks) == 9
    assert min(len(chunk.choices[0].token_ids) for chunk in chunks[1:-1]) >= 4


async def test_usage_comes_with_every_chunk_when_asked(api: OpenAIServer) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await streamed(api, stream_options=options, max_tokens=5)
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert {c.usage.prompt_tokens for c in chunks} == {len(ids_of("hello")) + 1}


async def test_prompts_of_a_list_are_continued_side_by_side(api: OpenAIServer, engine: FakeEngine) -> None:
    engine.script = lambda request: list(request.prompt_token_ids)
    texts = ["one", "two", "three"]
    answer = await complete(api, texts, n=2)
    assert [choice.text for choice in answer.choices] == ["one", "one", "two", "two", "three", "three"]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.prompt_tokens == sum(len(ids_of(text)) + 1 for text in texts)
    chunks = await streamed(api, texts, n=2)
    assert [joined(chunks, index) for index in range(6)] == [choice.text for choice in answer.choices]


async def test_token_ids_are_used_as_they_are(api: OpenAIServer, engine: FakeEngine) -> None:
    await complete(api, [5, 6, 7])
    await complete(api, [[8, 9], [10]])
    assert [list(r.prompt_token_ids) for r in engine.requests] == [[5, 6, 7], [8, 9], [10]]


async def test_an_echo_begins_with_the_prompt(api: OpenAIServer, engine: FakeEngine) -> None:
    engine.script = lambda _: ids_of(" fox")
    assert (await complete(api, "the", echo=True)).choices[0].text == "the fox"
    assert (await complete(api, ids_of("the"), echo=True)).choices[0].text == "the fox"
    assert joined(await streamed(api, "the", echo=True)) == "the fox"


async def test_log_probabilities_are_in_the_legacy_form(api: OpenAIServer, engine: FakeEngine) -> None:
    engine.script = lambda _: ids_of("naïve 你好 fox")
    answer = await complete(api, logprobs=2)
    chunks = await streamed(api, logprobs=2)
    [choice] = answer.choices
    found = choice.logprobs
    ids = ids_of("naïve 你好 fox")
    assert found.token_logprobs == [logprob_of(token) for token in ids]
    assert len(found.tokens) == len(found.top_logprobs) == len(found.text_offset) == len(ids)
    assert all(len(top) <= 3 for top in found.top_logprobs)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)
    pieces = [token.removeprefix("bytes:") for token in found.tokens]
    raw = [bytes.fromhex(piece.replace("\\x", "")) if piece.startswith("\\x") else piece.encode() for piece in pieces]
    assert b"".join(raw).decode() == choice.text
    pieces = [c.choices[0].logprobs for c in chunks]
    assert [token for piece in pieces for token in piece.tokens] == found.tokens
    assert [offset for piece in pieces for offset in piece.text_offset] == found.text_offset


async def test_log_probabilities_of_given_tokens_replace_those_of_the_likeliest(
    api: OpenAIServer, engine: FakeEngine
) -> None:
    engine.script = lambda _: ids_of(" fox")
    chosen, given = ids_of(" fox"), ids_of(" king")
    found = (await complete(api, logprobs=2, extra={"logprob_token_ids": given})).choices[0].logprobs
    assert found.token_logprobs == [logprob_of(token) for token in chosen]
    assert [set(top.values()) for top in found.top_logprobs] == [
        {logprob_of(token), *map(logprob_of, given)} for token in chosen
    ]


async def test_an_echoed_prompt_has_log_probabilities(api: OpenAIServer, engine: FakeEngine) -> None:
    engine.script = lambda _: ids_of(" fox")
    found = (await complete(api, "the", echo=True, logprobs=1)).choices[0].logprobs
    prompt = [0, *ids_of("the")]
    assert found.token_logprobs == [None, *(logprob_of(token) for token in [*prompt[1:], *ids_of(" fox")])]
    assert found.top_logprobs[0] is None
    assert found.text_offset[:2] == [0, 0]  # the first token has no text
    assert "".join(found.tokens[1:]) == "the fox"
    only = await complete(api, "the", echo=True, logprobs=1, max_tokens=0)
    assert only.choices[0].text == "the"
    assert only.choices[0].logprobs.token_logprobs == found.token_logprobs[: len(prompt)]
    assert (only.choices[0].finish_reason, only.usage.completion_tokens) == ("length", 0)


async def test_a_stop_string_is_cut_off_and_named(api: OpenAIServer, engine: FakeEngine) -> None:
    engine.script = lambda _: ids_of("one two three")
    answer = await complete(api, stop=[" two", "x"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one", "stop")
    assert answer.choices[0].stop_reason == " two"
    answer = await complete(api, stop=" two", extra={"include_stop_str_in_output": True})
    assert answer.choices[0].text == "one two"


async def test_the_end_of_sequence_is_a_stop_without_a_reason(api: OpenAIServer, engine: FakeEngine) -> None:
    engine.script = lambda _: ids_of("bye" + EOS)
    [engine.eos_token_id] = ids_of(EOS)
    [choice] = (await complete(api)).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("bye", "stop", None)


async def test_minus_one_switches_top_k_off(api: OpenAIServer, engine: FakeEngine) -> None:
    await complete(api, extra={"top_k": -1})
    assert engine.requests[0].sampling_params.top_k == 0


async def test_every_sampling_parameter_reaches_the_engine(api: OpenAIServer, engine: FakeEngine) -> None:
    extra: dict[str, Any] = {
        "top_k": 5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [300],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "allowed_token_ids": [1, 2],
        "bad_words": ["fox"],
        "truncate_prompt_tokens": 2,
        "structured_outputs": {"regex": "a+"},
        "repetition_detection": {"max_pattern_size": 4},
        "priority": 3,
        "cache_salt": "salt",
        "add_special_tokens": False,
    }
    await complete(
        api,
        "hello world",
        extra=extra,
        max_tokens=9,
        temperature=0.5,
        top_p=0.75,
        seed=-5,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"7": 1.5},
    )
    [seen] = engine.requests
    params = seen.sampling_params
    assert (seen.priority, seen.cache_salt) == (3, "salt")
    assert list(seen.prompt_token_ids) == ids_of("hello world")[-2:]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.75, 5, 0.25)
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.5, 0.5, -0.5)
    assert (params.max_tokens, params.min_tokens, params.seed, params.ignore_eos) == (9, 2, -5, True)
    assert (list(params.stop_token_ids), list(params.allowed_token_ids)) == ([300], [1, 2])
    assert dict(params.logit_bias) == {7: 1.5}
    assert (params.skip_special_tokens, params.spaces_between_special_tokens) == (False, False)
    assert params.structured_output.regex == "a+"
    assert params.repetition_detection.max_pattern_size == 4
    assert [list(each.token_ids) for each in params.bad_word_token_ids] == [ids_of("fox"), ids_of(" fox")]


async def test_a_long_prompt_is_cut_to_leave_room_for_the_output(api: OpenAIServer, engine: FakeEngine) -> None:
    extra = {"truncate_prompt_tokens": -1}
    await complete(api, [5] * 200, extra=extra, max_tokens=28)
    [seen] = engine.requests
    assert len(seen.prompt_token_ids) == engine.ready.max_model_len - 28


async def test_unsupported_fields_may_have_their_neutral_value(api: OpenAIServer) -> None:
    nothing = {"use_beam_search": False, "logits_processors": [], "kv_transfer_params": {}, "lora_request": None}
    assert (await complete(api, extra=nothing)).choices


@pytest.mark.parametrize(
    ("extra", "name", "value"),
    [
        ({"structured_outputs": {"json": {"type": "object"}}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "grammar", "root ::= x"),
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"b": 1, "a": 2}}}},
            "json_schema",
            '{"b":1,"a":2}',
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "structural_tag",
            '{"type":"structural_tag","format":{"type":"any_text"}}',
        ),
    ],
)
async def test_constraints_are_handed_on_to_the_letter(
    api: OpenAIServer, engine: FakeEngine, extra: dict[str, Any], name: str, value: object
) -> None:
    await complete(api, extra=extra)
    assert getattr(engine.requests[0].sampling_params.structured_output, name) == value


@pytest.mark.parametrize(
    ("extra", "blanks"),
    [
        ({"structured_outputs": {"json_object": True}}, pb.JSON_WHITESPACE_UNSPECIFIED),
        ({"structured_outputs": {"json_object": True, "json_whitespace": "any"}}, pb.JSON_WHITESPACE_ANY),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, pb.JSON_WHITESPACE_COMPACT),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"json_whitespace": "compact"}},
            pb.JSON_WHITESPACE_COMPACT,
        ),
    ],
)
async def test_the_blanks_of_json_are_chosen(
    api: OpenAIServer, engine: FakeEngine, extra: dict[str, Any], blanks: int
) -> None:
    await complete(api, extra=extra)
    assert engine.requests[0].sampling_params.structured_output.json_whitespace == blanks


async def test_choices_are_a_constraint(api: OpenAIServer, engine: FakeEngine) -> None:
    await complete(api, extra={"structured_outputs": {"choice": ["yes", "no"]}})
    assert list(engine.requests[0].sampling_params.structured_output.choice.options) == ["yes", "no"]


async def test_token_ids_and_prompt_log_probabilities_are_returned_when_asked(
    api: OpenAIServer, engine: FakeEngine
) -> None:
    answer = await complete(api, "the", seed=1, max_tokens=3, extra={"return_token_ids": True, "prompt_logprobs": 1})
    [choice] = answer.choices
    assert choice.token_ids == [token_at(1, i, vocab_size=VOCAB) for i in range(3)]
    assert choice.prompt_token_ids == [0, *ids_of("the")]
    assert choice.prompt_logprobs[0] is None
    [token] = ids_of("the")[:1]
    assert choice.prompt_logprobs[1][str(token)]["logprob"] == logprob_of(token)
    assert choice.prompt_logprobs[1]["0"]["rank"] == 1


async def test_cached_tokens_are_in_the_usage(api: OpenAIServer, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 2
    assert (await complete(api)).usage.prompt_tokens_details.cached_tokens == 2


async def test_unknown_fields_are_ignored_and_null_is_unset(api: OpenAIServer) -> None:
    body = {"model": None, "prompt": "x", "max_tokens": None, "stop": None, "user": "me", "nothing": {"we": ["know"]}}
    assert (await api.http.post("/v1/completions", json=body)).status_code == 200


async def test_the_request_id_of_the_header_names_the_answer(api: OpenAIServer, engine: FakeEngine) -> None:
    response = await api.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"] == engine.requests[0].external_request_id == "cmpl-mine"
    response = await api.http.post("/v1/completions", json={"prompt": "x", "request_id": "body"})
    assert response.json()["id"] == "cmpl-body"
    assert response.headers["x-request-id"]


async def test_headers_carry_trace_and_deadline(api: OpenAIServer, engine: FakeEngine) -> None:
    headers = {"traceparent": "00-a-b-01", "x-request-timeout": "9"}
    response = await api.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert response.status_code == 200
    [seen] = engine.requests
    assert dict(seen.trace_context) == {"traceparent": "00-a-b-01"}
    assert 0 < seen.deadline - seen.arrival_time <= 9.5


async def test_a_wrong_parameter_is_named(api: OpenAIServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await complete(api, top_p=7.0)
    assert caught.value.body == {
        "message": "top_p is 7.0; it must be above 0 and at most 1",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": "invalid_value",
    }


async def test_the_best_of_several_sequences_come_first(api: OpenAIServer, engine: FakeEngine) -> None:
    """Uses log-probabilities that fall with the token id, so that the mean of each sequence is known."""
    tokens = {0: [9, 9], 1: [5], 2: [7, 5], 3: [30, 2]}
    engine.script = lambda request: tokens[int(request.request_id.rpartition(".")[2])]
    answer = await complete(api, best_of=4, n=2, max_tokens=2, extra={"return_token_ids": True})
    assert [choice.token_ids for choice in answer.choices] == [[5], [7, 5]]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.logprobs for choice in answer.choices] == [None, None]
    assert answer.usage.completion_tokens == 7
    both = await complete(api, ["a", "b"], best_of=4, logprobs=0)
    assert [choice.logprobs.token_logprobs for choice in both.choices] == [[logprob_of(5)]] * 2


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.before)
async def test_a_gap_is_filled_where_the_model_has_tokens_for_it(
    engine: FakeEngine, tmp_path: Path, form: InfillForm
) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(form))
    engine.ready.vocab_size = tokenizer.get_vocab_size()
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    async with openai_server(tmp_path, engines=[engine.address]) as api:
        await complete(api, "the fox", suffix="the dog")
    before, behind, middle = (tokenizer.token_to_id(token) for token in form)
    expected = [0, before, *ids_of("the fox"), behind, *ids_of("the dog"), middle]
    assert list(engine.requests[0].prompt_token_ids) == expected


async def test_two_bos_tokens_are_warned_of_in_a_header(api: OpenAIServer) -> None:
    for body in ({"prompt": "<s>the"}, {"prompt": "<s>the", "stream": True}):
        answer = await api.http.post("/v1/completions", json={"model": "model", "max_tokens": 1, **body})
        assert answer.status_code == 200
        assert answer.headers["penstock-warning"].startswith("double_bos: prompt begins with '<s>'")
    answer = await api.http.post("/v1/completions", json={"model": "model", "max_tokens": 1, "prompt": "the"})
    assert "penstock-warning" not in answer.headers
