"""Pooling requests of a step: laid out by adapter, and each with its own tokens."""

from penstock_common.types.request import NO_SAMPLING, PoolingParams, PoolingTask
from penstock_enginecore.core.scheduler.output import NewRequestData, SchedulerOutput
from penstock_enginecore.executor.pooling_runner import PoolingBatch
from penstock_enginecore.lora.adapter import LoraSegment
from penstock_enginecore.lora.core.request import LoraRequest


def new(key: str, count: int, digest: bytes = b"") -> NewRequestData:
    return NewRequestData(
        request_id=key,
        token_ids=[ord(key)] * count,
        num_prompt_tokens=count,
        num_computed_tokens=0,
        block_ids=(),
        sampling_params=NO_SAMPLING,
        pooling_params=PoolingParams(task=PoolingTask.EMBED),
        lora=LoraRequest("name", "/path", digest) if digest else None,
    )


def test_requests_with_adapters_come_last_by_digest_and_their_tokens_are_told_of() -> None:
    batch = PoolingBatch(num_groups=0, block_size=1)
    news = [new("a", 3, b"B"), new("b", 2), new("c", 1, b"A"), new("d", 2, b"B")]
    batch.update(SchedulerOutput(new_requests=news))
    inputs = batch.prepare({"a": 3, "b": 2, "c": 1, "d": 2})
    assert [chunk.request.key for chunk in inputs.chunks] == ["b", "c", "a", "d"]
    assert bytes(inputs.batch.token_ids.tolist()) == b"bbcaaadd"
    assert inputs.batch.segments == (LoraSegment(b"A", 2, 3), LoraSegment(b"B", 3, 8))
    assert inputs.batch.query_start_loc.tolist() == [0, 2, 3, 6, 8]


def test_requests_without_adapters_keep_their_order() -> None:
    batch = PoolingBatch(num_groups=0, block_size=1)
    batch.update(SchedulerOutput(new_requests=[new("a", 1), new("b", 2)]))
    inputs = batch.prepare({"b": 2, "a": 1})
    assert [chunk.request.key for chunk in inputs.chunks] == ["b", "a"]
    assert inputs.batch.segments == ()
