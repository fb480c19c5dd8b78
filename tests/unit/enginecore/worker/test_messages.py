"""Messages between the engine and its workers arrive unchanged."""

from typing import Any

import msgspec
import numpy as np
import pytest

from penstock_common.errors import ConfigError, InvalidArgument, ResourceExhausted
from penstock_common.types.media import EmbedRun, MultiModalFeature, TensorData
from penstock_common.types.outputs import Logprobs
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import PoolingParams, PoolingTask, RequestContext, Vectors
from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ModelConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.core.scheduler.output import (
    CachedRequestData,
    EncoderStart,
    GrammarBitmask,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from penstock_enginecore.executor.multiproc.calls import agreed
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.worker.failures import Failure, WorkerError, WorkersGone
from penstock_enginecore.worker.messages import (
    Execute,
    Sample,
    Sampled,
    Start,
    WorkerConfig,
    decode_answer,
    decode_call,
    digest_of,
    encode,
    execute,
)


def new_request(**fields: Any) -> NewRequestData:
    return NewRequestData(
        **{
            "request_id": "r",
            "token_ids": [1, 2, 3],
            "num_prompt_tokens": 3,
            "num_computed_tokens": 0,
            "block_ids": ([1], [2, 3]),
            "sampling_params": SamplingParams(
                seed=-(2**63),
                logit_bias={7: -1.5},
                bad_word_token_ids=((1, 2), (3,)),
                structured_output=StructuredOutput(choice=("a", "b")),
            ),
            "context": RequestContext(cache_salt="s", deadline=1.5, trace_context={"traceparent": "x"}),
            **fields,
        }
    )


def step_of(new: NewRequestData) -> SchedulerOutput:
    return SchedulerOutput(
        step=9,
        new_requests=[new],
        cached_requests=CachedRequestData(
            request_ids=["a", "b"], num_computed_tokens=[4, 5], new_block_ids=[None, ([6], [])]
        ),
        num_scheduled_tokens={"a": 1, "b": 1, "r": 3},
        total_num_scheduled_tokens=5,
        finished_request_ids=["gone"],
        preempted_request_ids=["waits"],
    )


@pytest.mark.parametrize(
    "fields", [{}, {"pooling_params": PoolingParams(task=PoolingTask.EMBED, normalize=False), "second_text_start": 2}]
)
def test_a_step_arrives_as_it_was_scheduled(fields: dict[str, Any]) -> None:
    step = step_of(new_request(**fields))
    sent = execute(step)
    assert sent.step == step
    assert decode_call(encode(sent)) == sent


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_vectors_arrive_without_what_the_engine_noted_about_them(kind: type) -> None:
    embeds = PromptEmbeds(dtype="float32", num_tokens=3, hidden_size=1, data=kind(b"12345678"), is_token=b"\1\0\0")
    embeds.memo[(0, 4)] = b"digest"
    step = step_of(new_request(prompt_embeds=embeds))
    arrived = decode_call(encode(execute(step)))
    assert isinstance(arrived, Execute)
    [new] = arrived.step.new_requests
    assert new.prompt_embeds is not None
    assert bytes(new.prompt_embeds.data) == b"12345678"
    assert new.prompt_embeds.is_token == b"\1\0\0"
    assert new.prompt_embeds.memo == {}
    assert embeds.memo == {(0, 4): b"digest"}
    assert step.new_requests[0].prompt_embeds is embeds


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_media_arrive_with_their_requests_and_all_of_their_data_once(kind: type) -> None:
    pixels = TensorData(dtype="uint8", shape=(1, 3, 2**10, 2**10), data=kind(3 * 2**20))
    grid = {"image_grid_thw": TensorData(dtype="int64", shape=(1, 3), data=bytes(24))}
    image = MultiModalFeature(
        modality="image", identifier="a" * 64, offset=1, length=2, embed_runs=(EmbedRun(0, 1),), data=grid
    )
    step = step_of(new_request(mm_features=[image, image]))
    step.encoder_starts = [
        EncoderStart(identifier="a" * 64, modality="image", num_embeds=1, data={"pixel_values": pixels, **grid})
    ]
    step.encoder_budget, step.freed_identifiers = 7, ["b" * 64]
    sent = encode(execute(step))
    assert len(sent) < 3 * 2**20 + 4096
    arrived = decode_call(sent)
    assert isinstance(arrived, Execute)
    assert arrived.step == step


@pytest.mark.parametrize(
    "rows", [np.array([[1, -1, 2**31 - 1], [-(2**31), 0, 5]]), np.empty((0, 3)), np.ones((4, 2)).T]
)
def test_a_bitmask_arrives_and_may_be_written_to(rows: Any) -> None:
    grammar = GrammarBitmask(["a"] * len(rows), rows.astype(np.int32), list(range(len(rows))))
    sample = decode_call(encode(Sample(3, grammar)))
    assert isinstance(sample, Sample)
    arrived = sample.grammar
    assert arrived is not None
    assert (arrived.request_ids, arrived.offsets) == (grammar.request_ids, grammar.offsets)
    np.testing.assert_array_equal(arrived.bitmask, grammar.bitmask)
    assert arrived.bitmask.dtype == np.int32
    arrived.bitmask[:1] = 7
    assert not np.any(grammar.bitmask == 7)


def test_a_message_that_holds_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot contain an? object"):
        encode(Sample(3, object()))  # type: ignore[arg-type]


def test_results_arrive_as_they_were() -> None:
    output = ModelRunnerOutput(
        request_ids=["a", "b"],
        sampled_token_ids=[[5], []],
        logprobs={"a": Logprobs([0, 1], [5], [-0.25], [1])},
        pooled={"b": Vectors((2,), b"12345678")},
        num_nans_in_logits={"a": 1},
        encoder_failures={"c" * 64: "it is no image"},
    )
    answer = decode_answer(encode(Sampled(4, digest_of(output), output)))
    assert isinstance(answer, Sampled)
    assert answer.output == output
    assert answer.digest == digest_of(output)


def test_other_tokens_requests_and_failures_have_another_digest() -> None:
    outputs = [
        ModelRunnerOutput(request_ids=ids, sampled_token_ids=tokens)
        for ids, tokens in ((["a"], [[5]]), (["a"], [[6]]), (["b"], [[5]]), (["a"], [[]]))
    ]
    outputs.append(ModelRunnerOutput(request_ids=["a"], sampled_token_ids=[[5]], encoder_failures={"c": "no image"}))
    assert len({digest_of(output) for output in outputs}) == len(outputs)


def test_a_worker_is_told_the_whole_configuration() -> None:
    engine = EngineCoreConfig(model=ModelConfig(path="p", max_model_len=7), cache=CacheConfig(kv_cache_memory=2**20))
    start = Start(WorkerConfig(engine=engine, rank=1, world_size=2), calls=3, answers=4, engine=5, stacks=6)
    assert msgspec.msgpack.decode(encode(start), type=Start) == start


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigError("no"), ConfigError, "worker 1: no"),
        (ModelLoadError("no"), ModelLoadError, "worker 1: no"),
        (ResourceExhausted("no", field="f", reason="R"), ResourceExhausted, "worker 1: no"),
        (InvalidArgument("no", field="f", reason="R"), InvalidArgument, "worker 1: no"),
        (KeyError("x"), WorkerError, "worker 1: KeyError: 'x'"),
    ],
)
def test_an_error_is_raised_again_as_what_it_was_with_its_worker(
    error: Exception, kind: type[Exception], text: str
) -> None:
    failure = msgspec.msgpack.decode(encode(Failure.of(error)), type=Failure)
    raised = failure.error("worker 1")
    assert type(raised) is kind
    assert str(raised) == text
    assert "raised in the worker" in raised.__notes__[0]
    if isinstance(raised, (ResourceExhausted, InvalidArgument)):
        assert (raised.field, raised.reason) == ("f", "R")
    assert "worker" not in str(failure.error(""))


def test_workers_that_agree_have_one_answer() -> None:
    info = ModelInfo(max_len=10, vocab_size=5, pooling=PoolingLimits(tasks=frozenset({PoolingTask.EMBED})))
    assert agreed("the model", [info, msgspec.structs.replace(info)]) == info


def test_workers_that_do_not_agree_are_named_with_what_differs() -> None:
    info = ModelInfo(max_len=10, vocab_size=5)
    with pytest.raises(
        WorkersGone, match="worker 1 differs from worker 0 in the model: dtype is 'float16' and not 'float32'"
    ):
        agreed("the model", [info, msgspec.structs.replace(info, dtype="float16")])
    spec = KVCacheSpec(block_size=4, num_kv_heads=2, head_size=8, head_size_v=8, dtype_size=4)
    with pytest.raises(WorkersGone, match="in the KV cache: a.num_kv_heads is 1 and not 2"):
        agreed("the KV cache", [{"a": spec}, {"a": msgspec.structs.replace(spec, num_kv_heads=1)}])
    with pytest.raises(WorkersGone, match="b is None and not"):
        agreed("the KV cache", [{"a": spec, "b": spec}, {"a": spec}])


# A worker's place among the workers of its engine.

ENGINE = EngineCoreConfig(model=ModelConfig(path="m"))


def test_an_engine_of_one_worker_is_the_default() -> None:
    config = WorkerConfig(engine=ENGINE)
    assert (config.rank, config.world_size) == (0, 1)


@pytest.mark.parametrize(("rank", "world_size", "name"), [(2, 2, "rank"), (-1, 2, "rank"), (0, 0, "world_size")])
def test_a_rank_that_is_none_is_refused(rank: int, world_size: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"worker.{name}"):
        WorkerConfig(engine=ENGINE, rank=rank, world_size=world_size)
