"""``penstock.common.v1.SchedulerStats`` to the domain and back."""

import math

import msgspec

from penstock.common.v1 import stats_pb2
from penstock_common.errors import InvalidArgument
from penstock_common.types.outputs import SchedulerStats

_NAMES = tuple(field.name for field in msgspec.structs.fields(SchedulerStats))


def from_proto(message: stats_pb2.SchedulerStats, *, path: str = "scheduler_stats") -> SchedulerStats:
    """The domain's statistics. Raises InvalidArgument for numbers that can not be."""
    if not 0.0 <= message.kv_cache_usage <= 1.0:
        _refuse(f"{path}.kv_cache_usage", message.kv_cache_usage, "from 0 to 1")
    if not (message.seconds_since_last_step >= 0.0 and math.isfinite(message.seconds_since_last_step)):
        _refuse(f"{path}.seconds_since_last_step", message.seconds_since_last_step, "finite and at least 0")
    return SchedulerStats(**{name: getattr(message, name) for name in _NAMES})


def to_proto(stats: SchedulerStats) -> stats_pb2.SchedulerStats:
    """The message for these statistics."""
    return stats_pb2.SchedulerStats(**msgspec.structs.asdict(stats))


def _refuse(field: str, value: float, limit: str) -> None:
    raise InvalidArgument(f"{field} is {value}; it must be {limit}", field=field)
