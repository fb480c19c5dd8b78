"""Conversion and validation of ``penstock.common.v1`` statistics."""

import math

import msgspec

from penstock.common.v1 import stats_pb2
from penstock_common.errors import InvalidArgument
from penstock_common.lora_registry import MAX_HELD, LoraHeld
from penstock_common.rpc.by_field import from_message
from penstock_common.types.outputs import LoraStats, MediaStats, SchedulerStats

_FRACTIONS = {SchedulerStats: ("kv_cache_usage",), MediaStats: ("encoder_cache_usage",)}
_AMOUNTS = {
    SchedulerStats: ("seconds_since_last_step",),
    LoraStats: ("load_seconds",),
    LoraHeld: ("requests_per_load",),
}


def from_proto(message: stats_pb2.SchedulerStats, *, path: str = "scheduler_stats") -> SchedulerStats:
    """Return the scheduler statistics of a message. Raises InvalidArgument for impossible values, and for more than
    MAX_HELD adapters.
    """
    stats = from_message(message, SchedulerStats)
    _check(stats, path)
    if stats.lora is not None:
        _check(stats.lora, f"{path}.lora")
        check_held(stats.lora.held, path=f"{path}.lora.held")
    if stats.media is not None:
        _check(stats.media, f"{path}.media")
    return stats


def check_held(held: LoraHeld | None, *, path: str = "held") -> None:
    """Raise InvalidArgument if a report of an engine's adapters has more than MAX_HELD adapters or impossible values."""
    if held is None:
        return
    for name in ("active", "held"):
        if (count := len(getattr(held, name))) > MAX_HELD:
            raise InvalidArgument(
                f"{path}.{name} has {count} adapters; it must have at most {MAX_HELD}", field=f"{path}.{name}"
            )
    _check(held, path)


def _check(stats: msgspec.Struct, path: str) -> None:
    for name in _FRACTIONS.get(type(stats), ()):
        if not 0.0 <= (value := getattr(stats, name)) <= 1.0:
            _refuse(f"{path}.{name}", value, "from 0 to 1")
    for name in _AMOUNTS.get(type(stats), ()):
        if not ((value := getattr(stats, name)) >= 0.0 and math.isfinite(value)):
            _refuse(f"{path}.{name}", value, "finite and at least 0")


def _refuse(field: str, value: float, limit: str) -> None:
    raise InvalidArgument(f"{field} is {value}; it must be {limit}", field=field)
