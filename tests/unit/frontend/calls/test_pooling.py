"""Pooling calls to engines that answer, fail, or do not answer."""

import asyncio
import gc
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock_common.config.settings import Reread
from penstock_common.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable
from penstock_common.in_flight import SMALL, BytesInFlight
from penstock_common.types.outputs import EngineCoreOutput, FinishReason, RequestError
from penstock_common.types.request import EngineCoreRequest, PoolingParams, PoolingTask, RequestContext, Vectors
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.call_types import PoolingRequest
from penstock_frontend.calls.adapters import AdapterCalls
from penstock_frontend.calls.pooling import PoolingCalls
from penstock_frontend.config import FairnessConfig, LimitsConfig, LoraConfig, ModelConfig
from penstock_frontend.dispatch.adapters import Adapters
from penstock_frontend.interfaces import ModelLimits
from penstock_frontend.metrics import FrontendMetrics
from penstock_frontend.processing.outputs.pooling import PooledOutputs, PooledState, SplitOutputs
from penstock_frontend.processing.outputs.processor import OutputProcessor
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.named_prompts import NamedPrompts
from penstock_frontend.processing.prompts.pooling import PoolingInputs, check_generates, load_labels
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from tests.fakes.models import small_tokenizers

EMBED = PoolingParams(task=PoolingTask.EMBED)


class SilentEngines:
    """Engines that accept requests, and answer when the test tells them to."""

    capabilities = ("embed", "token_embed")
    limits = ModelLimits(max_model_len=64, vocab_size=1000, embedding_size=8192)

    def __init__(self) -> None:
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.changed = asyncio.Event()
        self.refuses_from = 100

    @property
    def view(self) -> "SilentEngines":
        return self

    async def wait_until_usable(self, deadline: float | None = None, *, tenant: str = "") -> ModelLimits:
        return self.limits

    def add(self, request: EngineCoreRequest) -> None:
        if len(self.added) >= self.refuses_from:
            raise Unavailable("no engine is there")
        self.added.append(request)
        self.changed.set()

    def abort(self, request_ids: Sequence[str], reason: str) -> None:
        self.aborted += request_ids


def done(request: EngineCoreRequest) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request.request_id, finish_reason=FinishReason.STOP, pooling_output=Vectors((0,), b"")
    )


class Rig:
    """A ``PoolingCalls`` with engines that wait."""

    def __init__(self) -> None:
        tokenizer = Tokenizer(small_tokenizers.byte_level())
        limits = Reread(LimitsConfig())
        inputs = InputProcessor(tokenizer, {}, model_name="model", limits=limits, fairness=Reread(FairnessConfig()))
        self.engines = SilentEngines()
        self.done: list[PooledState] = []
        self.outputs = PooledOutputs(lambda state, _: self.done.append(state))
        self.answers = BytesInFlight(lambda: 5 * SMALL, "limits.max_answer_bytes_in_flight", what="answers")
        self.calls = PoolingCalls(
            inputs=PoolingInputs(tokenizer, inputs, limits, NamedPrompts()),
            outputs=self.outputs,
            engines=self.engines,  # type: ignore[arg-type]
            adapters=AdapterCalls(
                Adapters(LoraConfig(), model="model", frontend_id="f"),
                LoraConfig(),
                self.engines,  # type: ignore[arg-type]
            ),
            answers=self.answers,
        )

    def request(self, *texts: str, deadline: float | None = None) -> PoolingRequest:
        fields = [f"inputs[{i}].text" for i in range(len(texts))]
        return PoolingRequest(inputs=texts, fields=fields, params=EMBED, context=RequestContext(deadline=deadline))

    async def started(self, request: PoolingRequest) -> asyncio.Task:
        task = asyncio.create_task(self.calls.run(request, "r"))
        await self.engines.changed.wait()
        return task


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_results_are_in_the_order_of_the_inputs_whatever_ends_first(rig: Rig) -> None:
    task = await rig.started(rig.request("one", "two", "three"))
    outputs = [done(request) for request in rig.engines.added]
    rig.outputs.process(outputs[2:])
    rig.outputs.process(outputs[:2])
    result = await task
    assert [output.request_id for output in result.outputs] == [r.request_id for r in rig.engines.added]
    assert result.prompt_tokens == sum(len(r.prompt_token_ids) for r in rig.engines.added)
    assert rig.engines.aborted == []
    assert len(rig.done) == 3


def of_tokens(count: int) -> PoolingRequest:
    """Return a request for the embeddings of ``count`` tokens, each of which takes half of SMALL."""
    params = PoolingParams(task=PoolingTask.TOKEN_EMBED)
    return PoolingRequest(inputs=[[7] * count], fields=["inputs[0].text"], params=params)


async def test_answers_of_all_calls_at_once_are_bounded_until_they_are_dropped(rig: Rig) -> None:
    task = await rig.started(of_tokens(8))
    assert rig.answers.num_bytes == 4 * SMALL
    with pytest.raises(ResourceExhausted, match="answers of 393216 bytes would be in memory") as refused:
        await rig.calls.run(of_tokens(4), "s")
    assert refused.value.reason == "ANSWERS_IN_FLIGHT"
    assert refused.value.retry_after == 1.0
    assert len(rig.engines.added) == 1
    rig.outputs.process([done(rig.engines.added[0])])
    result = await task
    assert rig.answers.num_bytes == 4 * SMALL
    del task, result
    await asyncio.sleep(0)  # the event loop still refers to the task that it ran last
    gc.collect()
    assert rig.answers.num_bytes == 0


async def test_a_small_answer_is_taken_beside_large_ones_and_a_large_one_alone(rig: Rig) -> None:
    large = await rig.started(of_tokens(40))
    rig.engines.changed.clear()
    small = await rig.started(rig.request("one"))
    assert rig.answers.num_bytes == 20 * SMALL + SMALL // 2
    for task in (large, small):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert rig.answers.num_bytes == 0


async def test_cancelling_a_call_aborts_what_runs(rig: Rig) -> None:
    task = await rig.started(rig.request("one", "two"))
    rig.outputs.process([done(rig.engines.added[0])])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.engines.aborted == [rig.engines.added[1].request_id]
    assert len(rig.outputs) == 0


async def test_one_failure_ends_the_call_and_aborts_the_others(rig: Rig) -> None:
    task = await rig.started(rig.request("one", "two"))
    failed = RequestError(code="UNAVAILABLE", message="lost")
    rig.outputs.process(
        [EngineCoreOutput(request_id=rig.engines.added[0].request_id, finish_reason=FinishReason.ERROR, error=failed)]
    )
    with pytest.raises(Unavailable, match="lost"):
        await task
    assert rig.engines.aborted == [rig.engines.added[1].request_id]


async def test_requests_that_outlive_no_engine_fail_their_call(rig: Rig) -> None:
    task = await rig.started(rig.request("one", "two"))
    rig.outputs.moved([request.request_id for request in rig.engines.added])
    rig.outputs.fail_all(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await task
    assert rig.engines.aborted == []


async def test_when_no_engine_takes_an_input_those_sent_are_aborted(rig: Rig) -> None:
    rig.engines.refuses_from = 1
    with pytest.raises(Unavailable, match="no engine is there"):
        await rig.calls.run(rig.request("one", "two"), "r")
    assert rig.engines.aborted == [rig.engines.added[0].request_id]


async def test_a_deadline_that_passes_ends_the_call(rig: Rig) -> None:
    with pytest.raises(DeadlineExceeded):
        await rig.calls.run(rig.request("one", deadline=time.time()), "r")
    assert rig.engines.aborted == [rig.engines.added[0].request_id]


async def test_an_end_without_a_result_is_a_failure(rig: Rig) -> None:
    task = await rig.started(rig.request("one"))
    rig.outputs.process(
        [EngineCoreOutput(request_id=rig.engines.added[0].request_id, finish_reason=FinishReason.ABORT)]
    )
    with pytest.raises(Unavailable, match="shutting down"):
        await task


async def test_generated_and_pooled_outputs_find_their_requests(rig: Rig) -> None:
    tokenizer = Tokenizer(small_tokenizers.byte_level())
    generated = OutputProcessor(tokenizer, FrontendMetrics("model"))
    both = SplitOutputs(generated, rig.outputs)
    [state] = generated.add(
        EngineCoreRequest(request_id="g", prompt_token_ids=[1], sampling_params=SamplingParams(seed=0))
    )
    task = await rig.started(rig.request("one"))
    end = EngineCoreOutput(request_id="g", new_token_ids=[5], finish_reason=FinishReason.LENGTH)
    assert both.process([done(rig.engines.added[0]), end]) == []
    assert len((await task).outputs) == 1
    assert (await state.collector.get()).finish is not None
    both.fail(["g"], Unavailable("late"))


def test_a_model_that_only_embeds_does_not_generate() -> None:
    with pytest.raises(InvalidArgument, match="it supports embed, token_embed"):
        check_generates(["embed", "token_embed"])
    check_generates(["generate", "prefix_caching"])


@pytest.mark.parametrize(
    ("config", "labels"),
    [('{"id2label": {"1": "b", "0": "a"}}', ["a", "b"]), ("{}", [])],
)
def test_labels_are_in_the_order_of_the_classes(config: str, labels: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert load_labels(ModelConfig(path=str(tmp_path))) == labels


async def test_a_text_far_beyond_the_engines_limit_is_refused_unread() -> None:
    rig = Rig()
    with pytest.raises(InvalidArgument, match=r"inputs\[1\].text has 4097 characters; for max_model_len 64"):
        await rig.calls.run(rig.request("a", "x" * 4097), "r")
    assert rig.engines.added == []
