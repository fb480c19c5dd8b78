"""Refusals of pooling requests, and the sizing of an engine without a KV cache."""

from typing import Any

import pytest

from penstock_common.errors import ConfigError, InvalidArgument, RequestFailed
from penstock_common.types.request import EngineCoreRequest, PoolingParams, PoolingTask
from penstock_enginecore.config import SchedulerConfig
from penstock_enginecore.core.kv_cache.sizing import size_without_kv_cache
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.core.validation import RequestLimits, validate_request

EMBEDS = PoolingLimits(tasks=frozenset({PoolingTask.EMBED, PoolingTask.TOKEN_EMBED}), embedding_size=16)
CLASSIFIES = PoolingLimits(tasks=frozenset({PoolingTask.CLASSIFY, PoolingTask.SCORE}))


def limits(pooling: PoolingLimits | None) -> RequestLimits:
    return RequestLimits(model=ModelInfo(max_len=10, vocab_size=100, pooling=pooling), max_model_len=10)


def check(pooling: PoolingLimits | None, task: PoolingTask, *, length: int = 3, **fields: Any) -> None:
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1] * length,
        pooling_params=PoolingParams(task=task, **{k: fields.pop(k) for k in list(fields) if k in _PARAMS}),
        **fields,
    )
    validate_request(request, limits(pooling))


_PARAMS = PoolingParams.__struct_fields__


def refusal(*arguments: Any, **fields: Any) -> RequestFailed:
    with pytest.raises(RequestFailed) as error:
        check(*arguments, **fields)
    return error.value


def test_a_prompt_may_fill_the_whole_model() -> None:
    check(EMBEDS, PoolingTask.EMBED, length=10)
    error = refusal(EMBEDS, PoolingTask.EMBED, length=11)
    assert error.message == "prompt_token_ids has 11 tokens; max_model_len is 10"


def test_an_empty_prompt_is_refused() -> None:
    assert refusal(EMBEDS, PoolingTask.EMBED, length=0).field == "prompt_token_ids"


@pytest.mark.parametrize("dimensions", [0, 17])
def test_dimensions_are_at_most_those_of_the_model(dimensions: int) -> None:
    check(EMBEDS, PoolingTask.EMBED, dimensions=16)
    error = refusal(EMBEDS, PoolingTask.EMBED, dimensions=dimensions)
    assert error.message == f"pooling_params.dimensions is {dimensions}; it must be at least 1 and at most 16"


@pytest.mark.parametrize(
    ("limits", "task", "params"),
    [
        (EMBEDS, PoolingTask.EMBED, {"use_activation": False}),
        (CLASSIFIES, PoolingTask.CLASSIFY, {"dimensions": 2}),
        (CLASSIFIES, PoolingTask.SCORE, {"normalize": True}),
    ],
)
def test_a_parameter_without_a_meaning_is_refused(
    limits: PoolingLimits, task: PoolingTask, params: dict[str, Any]
) -> None:
    error = refusal(limits, task, **params)
    assert isinstance(error, InvalidArgument)
    assert error.field == f"pooling_params.{next(iter(params))}"


def test_a_task_is_refused_by_engines_that_do_not_serve_it() -> None:
    assert refusal(None, PoolingTask.EMBED).message == "pooling_params.task is embed; this engine supports generate"
    assert (
        refusal(CLASSIFIES, PoolingTask.EMBED).message
        == "pooling_params.task is embed; this engine supports classify, score"
    )


def test_generation_is_refused_by_an_engine_that_pools() -> None:
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1])
    with pytest.raises(
        InvalidArgument, match="this engine does not generate; its pooling tasks are embed, token_embed"
    ):
        validate_request(request, limits(EMBEDS))


@pytest.mark.parametrize("start", [0, 3])
def test_the_second_text_begins_inside_the_prompt(start: int) -> None:
    check(CLASSIFIES, PoolingTask.SCORE, second_text_start=2)
    assert refusal(CLASSIFIES, PoolingTask.SCORE, second_text_start=start).field == "second_text_start"


def test_a_pooling_request_continues_nothing() -> None:
    assert refusal(EMBEDS, PoolingTask.EMBED, prior_output_token_ids=[1]).field == "prior_output_token_ids"


def test_without_a_kv_cache_a_prompt_is_as_long_as_a_step() -> None:
    limits = SchedulerConfig(max_num_batched_tokens=100, max_num_seqs=7)
    sized = size_without_kv_cache(limits, requested_max_model_len=None, model_max_len=512)
    assert (sized.max_model_len, sized.block_size) == (100, 100)
    assert [group.layer_names for group in sized.groups] == [()], "one table of blocks without memory"
    assert sized.num_blocks > limits.max_num_seqs
    short = size_without_kv_cache(limits, requested_max_model_len=30, model_max_len=512)
    assert short.max_model_len == 30


@pytest.mark.parametrize(("requested", "message"), [(600, "the model supports at most 512"), (101, "in one step")])
def test_a_length_that_no_step_holds_is_refused(requested: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size_without_kv_cache(
            SchedulerConfig(max_num_batched_tokens=100), requested_max_model_len=requested, model_max_len=512
        )
