"""Statistics of ``penstock.common.v1`` to the domain and back."""

import math

import msgspec

from penstock.common.v1 import stats_pb2
from penstock_common.errors import InvalidArgument
from penstock_common.types.outputs import SchedulerStats, SpecDecodingStats

_NAMES = tuple(field.name for field in msgspec.structs.fields(SchedulerStats) if field.name != "spec_decoding_stats")


def from_proto(message: stats_pb2.SchedulerStats, *, path: str = "scheduler_stats") -> SchedulerStats:
    """The domain's statistics. Raises InvalidArgument for numbers that can not be."""
    if not 0.0 <= message.kv_cache_usage <= 1.0:
        _refuse(f"{path}.kv_cache_usage", message.kv_cache_usage, "from 0 to 1")
    if not (message.seconds_since_last_step >= 0.0 and math.isfinite(message.seconds_since_last_step)):
        _refuse(f"{path}.seconds_since_last_step", message.seconds_since_last_step, "finite and at least 0")
    values = {name: getattr(message, name) for name in _NAMES}
    if message.HasField("spec_decoding_stats"):
        values["spec_decoding_stats"] = speculation_from_proto(message.spec_decoding_stats)
    return SchedulerStats(**values)


def to_proto(stats: SchedulerStats) -> stats_pb2.SchedulerStats:
    """The message for these statistics."""
    message = stats_pb2.SchedulerStats(**{name: getattr(stats, name) for name in _NAMES})
    if stats.spec_decoding_stats is not None:
        message.spec_decoding_stats.CopyFrom(speculation_to_proto(stats.spec_decoding_stats))
    return message


def speculation_from_proto(message: stats_pb2.SpecDecodingStats) -> SpecDecodingStats:
    """The domain's counts of drafts."""
    return SpecDecodingStats(
        num_drafts=message.num_drafts,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        num_accepted_tokens_per_pos=list(message.num_accepted_tokens_per_pos),
    )


def speculation_to_proto(stats: SpecDecodingStats) -> stats_pb2.SpecDecodingStats:
    """The message for these counts."""
    return stats_pb2.SpecDecodingStats(**msgspec.structs.asdict(stats))


def _refuse(field: str, value: float, limit: str) -> None:
    raise InvalidArgument(f"{field} is {value}; it must be {limit}", field=field)
