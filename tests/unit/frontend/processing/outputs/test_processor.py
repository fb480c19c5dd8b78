"""The output processor: ends, errors, and aborts."""

from typing import Any

import pytest

from penstock_common.errors import (
    DeadlineExceeded,
    InvalidArgument,
    PenstockError,
    RequestFailed,
    ResourceExhausted,
    Unavailable,
)
from penstock_common.types.outputs import EngineCoreOutput, FinishReason, Logprobs, PrefillStats, RequestError
from penstock_common.types.request import EngineCoreRequest, RequestContext
from penstock_common.types.sampling import OutputKind, SamplingParams
from penstock_frontend.call_types import RequestOutput, Usage
from penstock_frontend.metrics import FrontendMetrics
from penstock_frontend.processing.outputs.processor import OutputProcessor, RequestState
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from tests.fakes.models import small_tokenizers

TOKENIZER = Tokenizer(small_tokenizers.byte_level())


@pytest.fixture
def metrics() -> FrontendMetrics:
    return FrontendMetrics("demo")


@pytest.fixture
def processor(metrics: FrontendMetrics) -> OutputProcessor:
    return OutputProcessor(TOKENIZER, metrics)


def ids_of(text: str) -> list[int]:
    return TOKENIZER._backend.encode(text, add_special_tokens=False).ids


def add(processor: OutputProcessor, request_id: str = "r", **params: Any) -> RequestState:
    request = EngineCoreRequest(
        request_id=request_id,
        context=RequestContext(external_request_id=request_id),
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(**params),
    )
    [state] = processor.add(request)
    return state


def output(tokens: list[int], offset: int = 0, **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id="r", new_token_ids=tokens, offset=offset, **fields)


async def take(state: RequestState) -> RequestOutput:
    return await state.collector.get()


async def test_an_output_carries_text_tokens_and_at_the_end_usage(processor: OutputProcessor) -> None:
    state = add(processor)
    stats = PrefillStats(num_prompt_tokens=3, num_cached_tokens=2)
    assert processor.process([output(ids_of("a"), prefill_stats=stats)]) == []
    assert processor.process([output(ids_of("b"), 1, finish_reason=FinishReason.LENGTH)]) == []
    last = await take(state)
    assert (last.text, last.token_ids) == ("ab", ids_of("ab"))
    assert last.finish is not None
    assert (last.finish.reason, last.finish.usage) == (FinishReason.LENGTH, Usage(3, 2, 2))
    assert len(processor) == 0


async def test_a_stop_string_ends_the_request_and_aborts_it_in_the_engine(processor: OutputProcessor) -> None:
    state = add(processor, stop=("b",))
    assert processor.process([output(ids_of("a")), output(ids_of("b"), 1)]) == ["r"]
    last = await take(state)
    assert last.finish is not None
    assert (last.text, last.finish.reason, last.finish.stop_reason) == ("a", FinishReason.STOP, "b")
    assert processor.process([output(ids_of("c"), 2)]) == []


async def test_a_stop_string_in_the_last_output_needs_no_abort(processor: OutputProcessor) -> None:
    state = add(processor, stop=("b",))
    assert processor.process([output(ids_of("ab"), finish_reason=FinishReason.LENGTH)]) == []
    last = await take(state)
    assert last.finish is not None
    assert (last.finish.reason, last.finish.stop_reason) == (FinishReason.STOP, "b")


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"error": RequestError(code="INVALID_ARGUMENT", message="bad", field="f")}, InvalidArgument, "bad"),
        (
            {"error": RequestError(code="RESOURCE_EXHAUSTED", message="full", retry_after=2.0)},
            ResourceExhausted,
            "full",
        ),
        ({}, Unavailable, "failed"),
    ],
)
async def test_an_error_reaches_its_client_with_its_status(
    processor: OutputProcessor, fields: dict[str, Any], error: type[PenstockError], message: str
) -> None:
    state, other = add(processor), add(processor, "other")
    processor.process([output([], finish_reason=FinishReason.ERROR, **fields)])
    with pytest.raises(error, match=message):
        await take(state)
    processor.process([EngineCoreOutput(request_id="other", new_token_ids=ids_of("a"))])
    assert (await take(other)).text == "a"


async def test_a_request_whose_time_was_up_in_the_engine_ends_with_that_status(processor: OutputProcessor) -> None:
    state = add(processor)
    error = RequestError(code="DEADLINE_EXCEEDED", message="too late")
    processor.process([output([], finish_reason=FinishReason.ABORT, error=error)])
    with pytest.raises(DeadlineExceeded, match="too late"):
        await take(state)


async def test_an_abort_that_the_client_did_not_ask_for_is_unavailable(processor: OutputProcessor) -> None:
    state = add(processor)
    processor.process([output([], finish_reason=FinishReason.ABORT)])
    with pytest.raises(Unavailable, match="shutting down"):
        await take(state)


async def test_outputs_of_unknown_requests_are_ignored(processor: OutputProcessor) -> None:
    assert processor.process([output([1])]) == []


def logprobs_of(token_ids: list[int]) -> Logprobs:
    logprobs = Logprobs()
    for token_id in token_ids:
        logprobs.add([token_id], [-float(token_id)], [1])
    return logprobs


async def test_log_probabilities_get_the_text_of_each_entry(processor: OutputProcessor) -> None:
    state = add(processor, logprobs=0)
    processor.process([output(ids_of("ab"), new_logprobs=logprobs_of(ids_of("ab")))])
    taken = (await take(state)).logprobs
    assert taken is not None
    assert (taken.token_ids, taken.tokens) == (ids_of("ab"), ["a", "b"])


async def test_without_detokenization_log_probabilities_have_no_texts(processor: OutputProcessor) -> None:
    state = add(processor, logprobs=0, detokenize=False)
    processor.process([output([5], new_logprobs=logprobs_of([5]))])
    assert (await take(state)).logprobs == logprobs_of([5])


@pytest.mark.parametrize("sent", [None, logprobs_of([5])])
async def test_log_probabilities_that_are_not_those_of_the_tokens_fail_their_request_alone(
    processor: OutputProcessor, sent: Logprobs | None
) -> None:
    state, other = add(processor, logprobs=0), add(processor, "other")
    assert processor.process([output([5, 6], new_logprobs=sent)]) == ["r"]
    with pytest.raises(PenstockError, match="as incident [0-9a-f]{8}$"):
        await take(state)
    processor.process([EngineCoreOutput(request_id="other", new_token_ids=ids_of("a"))])
    assert (await take(other)).text == "a"


async def test_prompt_log_probabilities_are_put_together_and_none_comes_twice(processor: OutputProcessor) -> None:
    state = add(processor, prompt_logprobs=0, detokenize=False)  # its prompt is 1, 2, 3
    for piece in ([2], [3], [2, 3]):
        processor.process([output([], new_prompt_logprobs=logprobs_of(piece))])
    processor.process([output([9])])
    assert (await take(state)).prompt_logprobs == logprobs_of([2, 3])


async def test_sequences_of_a_call_share_its_stream(processor: OutputProcessor) -> None:
    params = SamplingParams(detokenize=False)
    requests = [EngineCoreRequest(request_id=r, prompt_token_ids=[1], sampling_params=params) for r in ("r", "s")]
    first, second = processor.add(*requests)
    assert first.collector is second.collector
    processor.process([EngineCoreOutput(request_id="s", new_token_ids=[7]), output([8])])
    outputs = [await take(first), await take(first)]
    assert [(o.index, o.token_ids) for o in outputs] == [(1, [7]), (0, [8])]


async def test_an_output_that_repeats_itself_ends_as_such(processor: OutputProcessor) -> None:
    state = add(processor)
    processor.process([output(ids_of("aa"), finish_reason=FinishReason.REPETITION)])
    finish = (await take(state)).finish
    assert finish is not None
    assert finish.reason is FinishReason.REPETITION


def test_nan_logits_are_counted_and_logged_once_per_request(
    processor: OutputProcessor, metrics: FrontendMetrics, capsys: pytest.CaptureFixture[str]
) -> None:
    add(processor)
    processor.process([output([5], num_nans_in_logits=3)])
    processor.process([output([6], 1, num_nans_in_logits=2)])
    assert metrics.registry.get_sample_value("penstock:nan_logits_total", {"model_name": "demo", "engine": ""}) == 5
    assert capsys.readouterr().out.count("NaN logits") == 1


async def test_final_output_comes_once(processor: OutputProcessor) -> None:
    state = add(processor, output_kind=OutputKind.FINAL)
    processor.process([output(ids_of("a"))])
    processor.process([output(ids_of("b"), 1, finish_reason=FinishReason.STOP)])
    assert (await take(state)).text == "a"  # the token that stopped the output has no text


async def test_a_defect_in_one_request_leaves_the_others_alone(processor: OutputProcessor) -> None:
    broken, other = add(processor), add(processor, "other")
    not_a_token = -1
    to_abort = processor.process(
        [output([not_a_token]), EngineCoreOutput(request_id="other", new_token_ids=ids_of("a"))]
    )
    assert to_abort == ["r"]
    assert (await take(other)).text == "a"
    with pytest.raises(PenstockError, match="as incident [0-9a-f]{8}$"):
        await take(broken)


def test_times_of_two_engines_are_not_compared(processor: OutputProcessor, metrics: FrontendMetrics) -> None:
    add(processor)
    processor.process([output(ids_of("a"))], "", 1000.0)
    processor.process([output(ids_of("b"), 1)], "", 1000.5)
    processor.moved(["r", "unknown"])
    processor.process([output(ids_of("c"), 2)], "", 3.0)
    processor.process([output(ids_of("d"), 3, finish_reason=FinishReason.LENGTH)], "", 3.25)

    def value(name: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model_name": "demo", "engine": ""})

    assert value("vllm:inter_token_latency_seconds_sum") == pytest.approx(0.75)
    assert value("vllm:inter_token_latency_seconds_count") == 2
    assert value("vllm:request_decode_time_seconds_sum") == pytest.approx(0.75)
    assert value("vllm:time_to_first_token_seconds_count") == 1


def test_metrics_count_tokens_and_ends(processor: OutputProcessor, metrics: FrontendMetrics) -> None:
    add(processor)
    processor.process([output(ids_of("ab"))])
    processor.process([output(ids_of("c"), 2, finish_reason=FinishReason.LENGTH)])

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model_name": "demo", "engine": "", **labels})

    assert value("vllm:generation_tokens_total") == 3
    assert value("vllm:prompt_tokens_total") == 3
    assert value("vllm:request_success_total", finished_reason="length") == 1
    assert value("vllm:time_to_first_token_seconds_count") == 1
    assert value("vllm:e2e_request_latency_seconds_count") == 1


async def test_new_tokens_alone_are_processed_as_an_output_with_them(
    processor: OutputProcessor, metrics: FrontendMetrics
) -> None:
    state = add(processor)
    processor.process([], "", 1.0, [("r", ids_of("ab")), ("unknown", ids_of("c"))])
    assert (await take(state)).text == "ab"
    assert metrics.registry.get_sample_value("vllm:generation_tokens_total", {"model_name": "demo", "engine": ""}) == 2


async def test_new_tokens_alone_can_complete_a_stop_string(processor: OutputProcessor) -> None:
    state = add(processor, stop=("b",))
    assert processor.process([], "", 1.0, [("r", ids_of("a"))]) == []
    assert processor.process([], "", 2.0, [("r", ids_of("b"))]) == ["r"]
    assert len(processor) == 0
    output = await take(state)
    assert output.text == "a"
    assert output.finish is not None
    assert output.finish.stop_reason == "b"


async def test_new_tokens_alone_come_before_the_outputs_of_a_frame(processor: OutputProcessor) -> None:
    state = add(processor)
    processor.process([output(ids_of("b"), 1, finish_reason=FinishReason.LENGTH)], "", 1.0, [("r", ids_of("a"))])
    assert (await take(state)).text == "ab"


async def test_tokens_without_requested_log_probabilities_end_only_their_request(processor: OutputProcessor) -> None:
    state = add(processor, logprobs=1)
    assert processor.process([], "", 1.0, [("r", ids_of("a"))]) == ["r"]
    with pytest.raises(RequestFailed):
        await take(state)
