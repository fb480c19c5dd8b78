"""``LLM`` (the engine inside the test process) with the demo model and MiniLM, compared with a server's answers."""

import asyncio
import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import tokenizers
import torch

import penstock_local
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import ConfigError, Internal, InvalidArgument, Unavailable, Unimplemented
from penstock_common.types.outputs import FinishReason as EngineFinishReason
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_local import LLM, BeamSearchParams, FinishReason, Interrupted, SamplingParams, StructuredOutput
from penstock_local.llm.options import engine_config
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.models import small_tokenizers
from tests.fakes.models.pooling_models import MINILM, save_pooling_model
from tests.fakes.patience import PATIENCE

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_memory": "32MiB", "max_num_seqs": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["Once upon a time", "The sun is", "<|user|>Count from 1 to 12.<|end|><|assistant|>", "A fox"]
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMO), **OPTIONS) as llm:
        yield llm


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[FrontendServer]:
    config = EngineCoreConfig(
        model=ModelConfig(path=str(DEMO), served_model_name="model", device="cpu"),
        cache=CacheConfig(num_blocks=256),
        executor=ExecutorConfig(num_threads=1),
    )
    engine = EngineServer(config, UniprocExecutor(config)).start().load()
    async with FrontendServer(DEMO, engines=[engine.address]) as frontend:
        await frontend.until_health(serving=True)
        yield frontend
    engine.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_greedy_texts_and_tokens_equal_those_of_a_server(llm: LLM, server: FrontendServer) -> None:
    outputs = await asyncio.to_thread(llm.generate, PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        messages = await server.outputs(prompt, temperature=0.0, max_tokens=24)
        assert output.prompt == prompt
        assert output.text == "".join(message.text for message in messages)
        assert output.outputs[0].token_ids == [i for message in messages for i in message.token_ids]
        assert output.outputs[0].finish_reason is FinishReason.of(EngineFinishReason(messages[-1].finish_reason))
        assert len(output.prompt_token_ids) == messages[-1].usage.prompt_tokens


@pytest.mark.asyncio(loop_scope="module")
async def test_a_greedy_chat_equals_that_of_a_server(llm: LLM, server: FrontendServer) -> None:
    (output,) = await asyncio.to_thread(llm.chat, QUESTION, GREEDY)
    request = pb.ChatRequest(messages=[pb.ChatMessage(**message) for message in QUESTION])
    request.sampling_params.temperature, request.sampling_params.max_tokens = 0.0, 24
    pieces = [message async for message in server.stub.Chat(request)]
    assert output.text == "".join(piece.content for piece in pieces) != ""
    assert output.prompt is not None
    assert output.prompt.endswith("<|assistant|>")


def test_one_prompt_gives_a_list_of_one_and_none_an_empty_one(llm: LLM) -> None:
    assert len(llm.generate("A fox", GREEDY)) == 1
    assert llm.generate([], GREEDY) == []


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    (as_text,) = llm.generate("A fox", GREEDY)
    as_ids, listed = llm.generate(list(as_text.prompt_token_ids), GREEDY)[0], llm.generate([[5, 6], "A fox"], GREEDY)
    assert as_ids.outputs == as_text.outputs
    assert as_ids.prompt is None
    assert listed[0].prompt_token_ids == [5, 6]
    assert listed[1].outputs == as_text.outputs


def test_prompts_may_be_generated(llm: LLM) -> None:
    outputs = llm.generate((prompt for prompt in ("A fox", "Once")), GREEDY)
    assert [output.prompt for output in outputs] == ["A fox", "Once"]


def test_a_cache_beyond_the_memory_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_memory is 400000000000000 bytes \(372529\.0 GiB\); this"):
        LLM("never/read", device="cpu", kv_cache_memory="400000GB")


def test_many_prompts_come_back_in_their_order(llm: LLM) -> None:
    prompts = [[10 + index] for index in range(100)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + index % 5, ignore_eos=True) for index in range(100)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + index % 5 for index in range(100)]


def test_several_outputs_and_their_log_probabilities(llm: LLM) -> None:
    (output,) = llm.generate("Once", {"n": 3, "seed": 1, "temperature": 1, "max_tokens": 5, "logprobs": 2})
    assert [each.index for each in output.outputs] == [0, 1, 2]
    for each in output.outputs:
        assert each.logprobs is not None
        assert len(each.logprobs) == len(each.token_ids)
        chosen = [each.logprobs.token_ids[start] for start in each.logprobs.offsets[:-1]]
        assert chosen == each.token_ids
        of_chosen = [each.logprobs.logprobs[start] for start in each.logprobs.offsets[:-1]]
        assert each.cumulative_logprob == pytest.approx(sum(of_chosen))


def test_outputs_have_the_words_numbers_and_times_that_vllm_has(llm: LLM) -> None:
    began = time.time()
    outputs = llm.generate([[5], [6]], {"temperature": 0, "max_tokens": 3, "ignore_eos": True})
    assert [output.outputs[0].finish_reason == "length" for output in outputs] == [True, True]
    assert f"{outputs[0].outputs[0].finish_reason}" == "length"
    assert len({output.request_id for output in outputs} - {""}) == 2
    assert outputs[0].outputs[0].cumulative_logprob is None
    metrics = outputs[0].metrics
    assert metrics is not None
    assert metrics.first_token_latency is not None
    assert 0 < metrics.first_token_latency <= metrics.latency
    assert began <= metrics.arrival_time <= time.time()
    assert metrics.num_generation_tokens == 3
    assert outputs[0].to_dict()["outputs"][0]["finish_reason"] == "length"


def test_a_schema_may_be_given_as_a_dict(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        "required": ["age"],
        "additionalProperties": False,
    }
    texts = [
        llm.generate("x", {"temperature": 0, "max_tokens": 40, "structured_output": constraint})[0].text
        for constraint in (
            {"json_schema": schema},
            StructuredOutput(json_schema=json.dumps(schema)),
            StructuredOutput(json_schema=schema),  # type: ignore[arg-type]  # as people write it
        )
    ]
    assert len(set(texts)) == 1
    assert set(json.loads(texts[0])) == {"age"}


def test_arguments_of_vllm_are_refused_with_what_to_use(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"generate\(\) has no argument 'lora_request'; use lora, the name"):
        llm.generate("x", lora_request=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"embed\(\) has no argument 'prompts'; use texts"):
        llm.embed(prompts=["x"])  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="LLM has no option 'enforce_eager'; leave it out: torch.compile"):
        LLM(str(DEMO), enforce_eager=True)


def test_the_package_lists_its_public_names_alone() -> None:
    assert dir(penstock_local) == sorted(penstock_local.__all__)
    for name in dir(penstock_local):
        assert getattr(penstock_local, name).__doc__
    for field in SamplingParams.__struct_fields__:
        assert f"\n        {field}: " in (SamplingParams.__doc__ or ""), field


def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=16)
    alone = llm.generate("Once", params)[0].text
    assert [output.text for output in llm.generate(["Once"] * 8, params)] == [alone] * 8


def test_stop_strings_end_an_output_before_them(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[2], {"temperature": 0, "max_tokens": 60, "stop": ["8"]})
    assert "8" not in output.text
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (FinishReason.STOP, "8")


def test_errors_name_the_prompt_before_any_runs(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match=r"^prompts\[2\]: prompt is \d+ tokens; max_model_len is 2048"):
        llm.generate(["a", "b", "c " * 4000], GREEDY)
    with pytest.raises(InvalidArgument, match=r"^prompts\[1\]: text is empty"):
        llm.generate(["a", ""], GREEDY)
    with pytest.raises(InvalidArgument, match=r"^prompts\[0\]: token_ids.ids\[1\] is 99999"):
        llm.generate([[1, 99999]], GREEDY)
    with pytest.raises(InvalidArgument, match=r"^prompts\[1\] is of type float"):
        llm.generate(["a", 2.5], GREEDY)  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match=r"^prompts\[1\]: sampling_params.top_p is 7"):
        llm.generate(["a", "b"], [GREEDY, {"top_p": 7}])


def test_prompts_that_fail_leave_the_others_when_errors_are_returned(llm: LLM) -> None:
    wrong = {"max_tokens": 4, "structured_output": StructuredOutput(regex="(")}
    prompts = ["A fox", "c " * 4000, "", 2.5, [1, 99999], "b", "A fox"]
    params: list[Any] = [GREEDY] * 5 + [wrong, GREEDY]
    outputs = llm.generate(prompts, params, errors="return")  # type: ignore[arg-type]
    assert [output.error is None for output in outputs] == [True, False, False, False, False, False, True]
    assert outputs[0].text == outputs[-1].text != ""
    assert [output.error.reason for output in outputs[1:3] if output.error] == ["PROMPT_TOO_LONG", "INVALID_FIELD"]
    with pytest.raises(InvalidArgument, match=r"^prompts\[1\]: prompt is \d+ tokens; max_model_len is 2048"):
        _ = outputs[1].text
    with pytest.raises(InvalidArgument, match="errors is 'skip'; it must be 'raise' or 'return'"):
        llm.generate("a", errors="skip")  # type: ignore[arg-type]


def test_results_come_as_they_end_or_in_order_and_prompts_are_read_lazily(llm: LLM) -> None:
    read = []

    def prompts() -> Iterator[list[int]]:
        for index in range(100_000):
            read.append(index)
            yield [10 + index % 500]

    lengths = ({"max_tokens": 1 + index % 7, "ignore_eos": True} for index in range(100_000))
    results = llm.generate_iter(prompts(), lengths)
    some = dict(next(results) for _ in range(300))
    results.close()
    assert all(len(output.outputs[0].token_ids) == 1 + index % 7 for index, output in some.items())
    assert len(read) <= 300 + 64
    ordered = llm.generate_iter(([10 + index] for index in range(100)), GREEDY, in_order=True)
    assert [(index, output.prompt_token_ids) for index, output in ordered] == [(i, [10 + i]) for i in range(100)]


def test_an_error_of_a_generator_ends_the_call(llm: LLM) -> None:
    def prompts() -> Iterator[str]:
        yield "a"
        raise LookupError("no more rows")

    with pytest.raises(LookupError, match="no more rows"):
        list(llm.generate_iter(prompts(), GREEDY))
    with pytest.raises(LookupError, match="no more rows"):
        llm.generate(prompts(), GREEDY, errors="return")
    assert llm.generate("A fox", GREEDY)[0].text


def test_an_interrupted_call_keeps_its_results(llm: LLM) -> None:
    def prompts() -> Iterator[str]:
        for index in range(1000):
            if index == 200:
                raise KeyboardInterrupt
            yield "A fox"

    with pytest.raises(Interrupted) as interrupted:
        llm.generate(prompts(), GREEDY, errors="return")
    texts = {output.text for output in interrupted.value.results if output is not None}
    assert texts == {llm.generate("A fox", GREEDY)[0].text}


def test_a_seed_of_the_llm_makes_its_calls_repeatable() -> None:
    def texts() -> list[str]:
        with LLM(str(DEMO), seed=11, **OPTIONS) as llm:
            return [output.text for output in llm.generate(["Once"] * 4, {"temperature": 1, "max_tokens": 8})]

    first = texts()
    assert first == texts()
    assert len(set(first)) > 1


def test_records_are_json(llm: LLM) -> None:
    (output,) = llm.generate("Once", {"temperature": 0, "max_tokens": 3, "logprobs": 1})
    record = json.loads(output.to_json())
    assert record["outputs"][0]["finish_reason"] == "length"
    assert record["outputs"][0]["text"] == output.text
    assert record["outputs"][0]["logprobs"]["offsets"] == [0, 2, 4, 6]
    assert json.loads(llm.generate("", errors="return")[0].to_json())["error"]["code"] == "INVALID_ARGUMENT"


def test_a_progress_bar_may_be_anybodys(llm: LLM) -> None:
    told: list[object] = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            told.append((total, desc))

        def update(self, count: int) -> None:
            told.append(count)

        def close(self) -> None:
            told.append("closed")

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert told == [(2, "penstock"), 1, 1, "closed"]


def test_tools_are_shown_to_the_model_or_refused_where_its_template_does_not(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    (shown,), (without,) = llm.chat(QUESTION, GREEDY, tools=tools), llm.chat(QUESTION, GREEDY)
    assert len(shown.prompt_token_ids) > len(without.prompt_token_ids)
    hides = "{{ messages[0].content }}"
    with pytest.raises(InvalidArgument, match=r"^conversations\[0\]: tools: the request's chat_template does not show"):
        llm.chat(QUESTION, GREEDY, tools=tools, chat_template=hides)


def test_a_chat_template_of_the_call_is_used_instead_of_the_models(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is 12 + 30?"}]
    params = SamplingParams(temperature=0, max_tokens=12)
    template = "<s>{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    (own,), (models,) = llm.chat(question, params, chat_template=template), llm.chat(question, params)
    assert own.prompt_token_ids == models.prompt_token_ids
    (other,) = llm.chat(question, params, chat_template="{{ word }}", chat_template_kwargs={"word": "12 + 30 ="})
    assert len(other.prompt_token_ids) < len(models.prompt_token_ids)
    with pytest.raises(InvalidArgument, match="chat_template, line 1: "):
        llm.chat(question, params, chat_template="{% if %}")


def test_another_models_tokenizer_is_used_for_texts_and_not_for_constraints() -> None:
    with LLM(str(DEMO), tokenizer=str(MINILM), **OPTIONS) as llm:
        (output,) = llm.generate("A cat sleeps.", {"max_tokens": 1, "truncate_prompt_tokens": 1})
        assert output.prompt_token_ids == [102]  # MiniLM's [SEP]
        with pytest.raises(Unimplemented, match="not supported with a custom tokenizer"):
            llm.generate([[5]], {"structured_output": StructuredOutput(choice=("a",))})


def test_the_tokenizer_and_the_defaults_can_be_had(llm: LLM) -> None:
    (output,) = llm.generate("A fox", GREEDY)
    assert llm.get_tokenizer().encode("A fox") == output.prompt_token_ids
    assert llm.get_default_sampling_params() == SamplingParams()


def test_the_defaults_can_be_changed_in_place_as_in_vllm(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.temperature = 0.0
    params.max_tokens = 6
    assert llm.generate("A fox", params)[0].text == llm.generate("A fox", GREEDY.clone(max_tokens=6))[0].text
    assert llm.get_default_sampling_params() == SamplingParams(), "each call has an object of its own"
    with pytest.raises(AttributeError, match="temprature"):
        params.temprature = 1.0  # type: ignore[attr-defined]


def test_beams_are_searched_with_a_mapping_too(llm: LLM) -> None:
    (given,) = llm.beam_search("A fox", {"beam_width": 2, "max_tokens": 3})
    (same,) = llm.beam_search("A fox", BeamSearchParams(beam_width=2, max_tokens=3))
    assert given.beams == same.beams
    for params, said in (
        (
            {"beam_width": 2, "max_tokens": 3, "temperature": 1.0},
            "params: BeamSearchParams has no 'temperature'; leave",
        ),
        ({"beam_width": 2}, "params: Object missing required field `max_tokens`"),
        ({"beam_width": 0, "max_tokens": 3}, r"params: Expected `int` >= 1 - at `\$.beam_width`"),
        (SamplingParams(n=2), "params is of type SamplingParams; it must be BeamSearchParams or a mapping"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            llm.beam_search("A fox", params)  # type: ignore[arg-type]


def test_errors_of_sampling_parameters_name_the_field(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match=r"SamplingParams has no 'temprature'; did you mean 'temperature'\?"):
        llm.generate("a", {"temprature": 1})
    with pytest.raises(InvalidArgument, match=r"^sampling_params\[1\]: Expected `float`, got `str`"):
        llm.generate(["a", "b"], [GREEDY, {"top_p": "high"}])
    with pytest.raises(InvalidArgument, match="has 1 entries for 2 inputs"):
        llm.generate(["a", "b"], [GREEDY])


def test_errors_of_conversations_name_the_message(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match=r"^conversations\[1\]: messages\[0\].role is 'robot'"):
        llm.chat([QUESTION, [{"role": "robot", "content": "hi"}]])
    with pytest.raises(
        InvalidArgument, match=r"^conversations\[0\].messages\[0\]: Object missing required field `role`"
    ):
        llm.chat([{"content": "hi"}])


def test_a_failure_on_the_way_ends_the_others_and_leaves_the_llm_usable(llm: LLM) -> None:
    wrong = {"max_tokens": 4, "structured_output": StructuredOutput(regex="(")}
    with pytest.raises(InvalidArgument, match=r"^prompts\[1\]: .*regex"):
        llm.generate(["a", "b"], [SamplingParams(max_tokens=2000, ignore_eos=True), wrong])
    assert llm.generate("A fox", GREEDY)[0].text


def test_calls_from_several_threads_share_the_engine(llm: LLM) -> None:
    texts: dict[int, list[str]] = {}

    def run(index: int) -> None:
        texts[index] = [output.text for output in llm.generate(PROMPTS, GREEDY)]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts[0] == texts[1] == texts[2]


def test_a_model_that_generates_does_not_embed(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match=r"^texts\[0\]: the model does not support embed; it supports generate"):
        llm.embed("hi")


def test_embeddings_are_unit_vectors_that_know_what_is_alike() -> None:
    with LLM(str(MINILM), device="cpu", num_threads=1) as llm:
        cat, kitten, tax = llm.embed(["A cat sleeps.", "A kitten is asleep.", "Taxes are due in April."])
        assert llm.embed("A cat sleeps.")[0].num_prompt_tokens == cat.num_prompt_tokens == 6
    assert math.isclose(math.hypot(*cat.embedding), 1.0, rel_tol=1e-4)
    assert _dot(cat, kitten) > _dot(cat, tax) + 0.3


def test_pairs_are_scored_by_the_cosine_of_their_vectors() -> None:
    with LLM(str(MINILM), device="cpu", num_threads=1) as llm:
        cat, kitten, tax = llm.embed(["A cat sleeps.", "A kitten is asleep.", "Taxes are due in April."])
        scores = llm.score("A cat sleeps.", ["A kitten is asleep.", "Taxes are due in April.", ""], errors="return")
        assert math.isclose(scores[0].score or 0.0, _dot(cat, kitten), rel_tol=1e-5)
        assert math.isclose(scores[1].score or 0.0, _dot(cat, tax), rel_tol=1e-4)
        assert scores[2].error is not None
        with pytest.raises(InvalidArgument, match="queries has 2 entries for 3 documents"):
            llm.score(["a", "b"], ["a", "b", "c"])
        (rows,) = llm.encode("A cat sleeps.", pooling_task="token_embed")
        assert (len(rows.data), len(rows.data[0])) == (cat.num_prompt_tokens, len(cat.embedding))
        with pytest.raises(InvalidArgument, match="pooling_task is 'rank'; it must be one of embed, classify"):
            llm.encode("a", pooling_task="rank")


def test_classes_have_the_probabilities_of_the_model(tmp_path: Path) -> None:
    small_tokenizers.save_model(tmp_path)
    model = save_pooling_model("bert", tmp_path, head="ForSequenceClassification", num_labels=3)
    with LLM(str(tmp_path), device="cpu", num_threads=1, dtype="float32") as llm:
        (output,) = llm.classify([[5, 6, 7]])
    expected = model.eval()(torch.tensor([[5, 6, 7]])).logits.softmax(-1)[0]
    assert torch.allclose(torch.tensor(output.probs), expected, atol=1e-5)
    assert output.label == f"LABEL_{int(expected.argmax())}"


def test_a_model_that_reads_pairs_scores_them_itself(tmp_path: Path) -> None:
    small_tokenizers.save_model(tmp_path)
    model = save_pooling_model("bert", tmp_path, head="ForSequenceClassification", num_labels=1, vocab_size=400)
    with LLM(str(tmp_path), device="cpu", num_threads=1, dtype="float32") as llm:
        (output,) = llm.score("the cat", "a dog")
        with pytest.raises(
            InvalidArgument, match=r"^documents\[0\] is set, but this model is a cross-encoder, which scores only texts"
        ):
            llm.score("the cat", [[5, 6]])
    pair = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("the cat", "a dog")
    given = {"input_ids": torch.tensor([pair.ids]), "token_type_ids": torch.tensor([pair.type_ids])}
    expected = model.eval()(**given).logits.sigmoid().item()
    assert output.score == pytest.approx(expected, abs=1e-5)


def _dot(left: Any, right: Any) -> float:
    return sum(a * b for a, b in zip(left.embedding, right.embedding, strict=True))


def test_what_two_sections_call_alike_is_the_models() -> None:
    config = engine_config(str(DEMO), {"dtype": "float32", "kv_cache_dtype": "fp8"})
    assert (config.model.dtype, config.cache.dtype) == ("float32", "fp8")


def test_options_are_checked_by_name_and_value() -> None:
    with pytest.raises(ConfigError, match=r"LLM has no option 'max_num_seq'; did you mean 'max_num_seqs'\?"):
        LLM(str(DEMO), max_num_seq=4)
    with pytest.raises(ConfigError, match="scheduler.max_num_seqs"):
        LLM(str(DEMO), max_num_seqs=0)
    with pytest.raises(ConfigError, match="kv_cache_memory: 'lots' is not a size"):
        LLM(str(DEMO), kv_cache_memory="lots")
    with pytest.raises(ConfigError, match="no such directory"):
        LLM("./nowhere")


def test_a_closed_llm_refuses_and_may_be_closed_again() -> None:
    with LLM(str(DEMO), **OPTIONS) as llm:
        llm.close()
        with pytest.raises(Unavailable, match="this LLM is closed"):
            llm.generate("a", GREEDY)


def test_closing_ends_a_call_of_another_thread() -> None:
    llm = LLM(str(DEMO), **OPTIONS)
    failures: list[BaseException] = []
    begun = threading.Event()

    def run() -> None:
        begun.set()
        try:
            llm.generate(["a"] * 16, SamplingParams(max_tokens=2000, ignore_eos=True))
        except Unavailable as e:
            failures.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    llm.close()
    thread.join()
    assert len(failures) == 1


def test_an_engine_that_dies_fails_every_call_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(DEMO), **OPTIONS) as llm:

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("the device is gone")

        for method in ("execute_model", "recover"):
            monkeypatch.setattr(UniprocExecutor, method, fail)
        for _ in range(2):
            with pytest.raises(Internal, match=r"^prompts\[0\]: the engine died: .*the device is gone"):
                llm.generate("a", GREEDY)


SCRIPT = f"""
from penstock_local import LLM, SamplingParams, StructuredOutput
print("imported", flush=True)
llm = LLM({str(DEMO)!r}, device="cpu", num_threads=1, kv_cache_memory="32MiB")
print(llm.generate("Name?", SamplingParams(structured_output=StructuredOutput(choice=("a", "b"))))[0].text in "ab")
try:
    print("running", flush=True)
    llm.generate(["a"] * 8, SamplingParams(max_tokens=2000, ignore_eos=True, temperature=0.0))
except KeyboardInterrupt:
    print("interrupted", len(llm.generate("b", {{"max_tokens": 2}})))
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_call_and_a_script_needs_neither_close_nor_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline() not in ("running\n", ""):
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, "interrupted 1\n", "")
