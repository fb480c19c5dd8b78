"""Structs and messages with fields of the same names. Every pair of the services is in ``enginecore/rpc/test_round_trips.py``."""

from typing import Any

import msgspec
import pytest

from penstock.common.v1 import control_pb2, data_parallel_pb2, events_pb2, finish_pb2, pooling_pb2, stats_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.rpc.by_field import UNKNOWN, fill, from_message, member, to_message
from penstock_common.types.cluster import DEFAULT_POOL, EngineState, EngineStatus
from penstock_common.types.data_parallel import PauseMode, Pauses
from penstock_common.types.kv_transfer import BlockRemoved, EngineRole, KvMedium
from penstock_common.types.outputs import EngineReady, LoraStats, PrefillStats, RequestError, SchedulerStats
from penstock_common.types.request import PoolingParams, PoolingTask, RequestContext


def test_fields_missing_in_a_message_get_the_structs_default() -> None:
    status = from_message(control_pb2.EngineStatus(engine_id="a"), EngineStatus)
    assert (status.engine_id, status.pool, status.role, status.loras) == ("a", DEFAULT_POOL, EngineRole.BOTH, None)
    assert from_message(pb.EngineCoreRequest(), RequestContext, lora="").tenant_weight == 1.0
    assert from_message(pb.Ready(), EngineReady).hidden_size is None


def test_required_fields_missing_in_a_message_are_empty() -> None:
    assert from_message(stats_pb2.PrefillStats(), PrefillStats) == PrefillStats(
        num_prompt_tokens=0, num_cached_tokens=0
    )


def test_zero_is_told_from_unset() -> None:
    assert from_message(finish_pb2.RequestError(retry_after=0.0), RequestError).retry_after == 0.0
    assert from_message(pb.Ready(hidden_size=0), EngineReady).hidden_size == 0
    told = to_message(RequestError(code="c", message="m", retry_after=0.0), finish_pb2.RequestError)
    assert told.HasField("retry_after")
    assert not to_message(RequestError(code="c", message="m"), finish_pb2.RequestError).HasField("retry_after")


def test_the_default_of_a_field_that_may_be_unset_is_left_unset() -> None:
    message = pb.EngineCoreRequest()
    fill(message, RequestContext(tenant="t"), "lora")
    assert (message.tenant, message.HasField("tenant_weight")) == ("t", False)
    fill(message, RequestContext(tenant_weight=2.5), "lora")
    assert message.tenant_weight == 2.5


def test_a_struct_without_values_is_told_from_none() -> None:
    there = to_message(SchedulerStats(lora=LoraStats()), stats_pb2.SchedulerStats)
    assert (there.HasField("lora"), there.HasField("media")) == (True, False)
    assert from_message(there, SchedulerStats) == SchedulerStats(lora=LoraStats())


def test_special_fields_are_what_the_caller_says() -> None:
    error = RequestError(code="c", message="m", field="f")
    assert to_message(error, finish_pb2.RequestError, message="other", field=None) == finish_pb2.RequestError(
        code="c", message="other"
    )
    read = from_message(finish_pb2.RequestError(code="c", message="m"), RequestError, message="other")
    assert read == RequestError(code="c", message="other")
    with pytest.raises(ValueError, match="no_such"):
        to_message(error, finish_pb2.RequestError, no_such=1)
    with pytest.raises(TypeError, match="no_such"):
        from_message(finish_pb2.RequestError(), RequestError, no_such=1)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_number_that_is_not_known_is_what_stands_for_it(kind: Any) -> None:
    assert member(kind, 99, "") is UNKNOWN[kind]


def test_the_zero_of_an_enum_is_a_number_as_any_other() -> None:
    assert from_message(control_pb2.EngineStatus(), EngineStatus).state is EngineState.LOADING
    assert from_message(data_parallel_pb2.Pauses(), Pauses).mode is PauseMode.NONE
    assert from_message(events_pb2.BlockRemoved(), BlockRemoved).medium is KvMedium.DEVICE


@pytest.mark.parametrize(("path", "field"), [("", "task"), ("pooling_params", "pooling_params.task")])
def test_a_number_that_nothing_stands_for_is_refused_with_its_field(path: str, field: str) -> None:
    unknown = pooling_pb2.PoolingParams.FromString(pooling_pb2.PoolingParams(task=9).SerializeToString())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=rf"^{field} is 9; known: EMBED, CLASSIFY, SCORE") as refused:
        from_message(unknown, PoolingParams, path)
    assert refused.value.field == field


class _Task(msgspec.Struct):
    pooling_params: PoolingParams


def test_the_field_of_a_part_is_named_by_its_path() -> None:
    message = pb.EngineCoreRequest(pooling_params=pooling_pb2.PoolingParams(task=9))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument) as refused:
        from_message(message, _Task, "add")
    assert refused.value.field == "add.pooling_params.task"
    assert (
        from_message(pb.EngineCoreRequest(pooling_params={"task": 1}), _Task).pooling_params.task is PoolingTask.EMBED
    )  # type: ignore[arg-type]
