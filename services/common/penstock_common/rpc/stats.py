"""Statistics of ``penstock.common.v1`` to the domain and back."""

import math

import msgspec

from penstock.common.v1 import stats_pb2
from penstock_common.errors import InvalidArgument
from penstock_common.lora_registry import MAX_HELD, LoraHeld
from penstock_common.types.outputs import KvTransferStats, LoraStats, MediaStats, SchedulerStats, SpecDecodingStats

_MESSAGES = ("spec_decoding_stats", "lora", "media", "kv_transfer")
_NAMES = tuple(field.name for field in msgspec.structs.fields(SchedulerStats) if field.name not in _MESSAGES)
_LORA_NUMBERS = tuple(
    field.name for field in msgspec.structs.fields(LoraStats) if field.name not in ("active", "waiting", "held")
)
_MEDIA_NUMBERS = tuple(field.name for field in msgspec.structs.fields(MediaStats))
_KV_NUMBERS = tuple(field.name for field in msgspec.structs.fields(KvTransferStats))


def from_proto(message: stats_pb2.SchedulerStats, *, path: str = "scheduler_stats") -> SchedulerStats:
    """The domain's statistics. Raises InvalidArgument for numbers that can not be."""
    if not 0.0 <= message.kv_cache_usage <= 1.0:
        _refuse(f"{path}.kv_cache_usage", message.kv_cache_usage, "from 0 to 1")
    if not (message.seconds_since_last_step >= 0.0 and math.isfinite(message.seconds_since_last_step)):
        _refuse(f"{path}.seconds_since_last_step", message.seconds_since_last_step, "finite and at least 0")
    values = {name: getattr(message, name) for name in _NAMES}
    if message.HasField("spec_decoding_stats"):
        values["spec_decoding_stats"] = speculation_from_proto(message.spec_decoding_stats)
    if message.HasField("lora"):
        values["lora"] = lora_from_proto(message.lora, path=f"{path}.lora")
    if message.HasField("media"):
        values["media"] = media_from_proto(message.media, path=f"{path}.media")
    if message.HasField("kv_transfer"):
        values["kv_transfer"] = KvTransferStats(**{name: getattr(message.kv_transfer, name) for name in _KV_NUMBERS})
    return SchedulerStats(**values)


def to_proto(stats: SchedulerStats) -> stats_pb2.SchedulerStats:
    """The message for these statistics."""
    message = stats_pb2.SchedulerStats(**{name: getattr(stats, name) for name in _NAMES})
    if stats.spec_decoding_stats is not None:
        message.spec_decoding_stats.CopyFrom(speculation_to_proto(stats.spec_decoding_stats))
    if stats.lora is not None:
        message.lora.CopyFrom(lora_to_proto(stats.lora))
    if stats.media is not None:
        message.media.CopyFrom(stats_pb2.MediaStats(**msgspec.structs.asdict(stats.media)))
    if stats.kv_transfer is not None:
        message.kv_transfer.CopyFrom(stats_pb2.KvTransferStats(**msgspec.structs.asdict(stats.kv_transfer)))
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


def lora_from_proto(message: stats_pb2.LoraStats, *, path: str = "lora") -> LoraStats:
    """The domain's statistics of adapters. Raises InvalidArgument for numbers that can not be."""
    if not (message.load_seconds >= 0.0 and math.isfinite(message.load_seconds)):
        _refuse(f"{path}.load_seconds", message.load_seconds, "finite and at least 0")
    values = {name: getattr(message, name) for name in _LORA_NUMBERS}
    held = held_from_proto(message.held, path=f"{path}.held") if message.HasField("held") else None
    return LoraStats(active=list(message.active), waiting=list(message.waiting), held=held, **values)


def lora_to_proto(stats: LoraStats) -> stats_pb2.LoraStats:
    """The message for these statistics."""
    values = {name: getattr(stats, name) for name in _LORA_NUMBERS}
    held = None if stats.held is None else held_to_proto(stats.held)
    return stats_pb2.LoraStats(active=stats.active, waiting=stats.waiting, held=held, **values)


def media_from_proto(message: stats_pb2.MediaStats, *, path: str = "media") -> MediaStats:
    """The domain's statistics of media. Raises InvalidArgument for numbers that can not be."""
    if not 0.0 <= message.encoder_cache_usage <= 1.0:
        _refuse(f"{path}.encoder_cache_usage", message.encoder_cache_usage, "from 0 to 1")
    return MediaStats(**{name: getattr(message, name) for name in _MEDIA_NUMBERS})


def held_from_proto(message: stats_pb2.LoraHeld, *, path: str = "held") -> LoraHeld:
    """Which adapters an engine holds. Raises InvalidArgument for numbers that can not be, and more than MAX_HELD."""
    for name in ("active", "held"):
        if (count := len(getattr(message, name))) > MAX_HELD:
            raise InvalidArgument(
                f"{path}.{name} has {count} adapters; it must have at most {MAX_HELD}", field=f"{path}.{name}"
            )
    if not (message.requests_per_load >= 0.0 and math.isfinite(message.requests_per_load)):
        _refuse(f"{path}.requests_per_load", message.requests_per_load, "finite and at least 0")
    return LoraHeld(
        version=message.version,
        active=tuple(message.active),
        held=tuple(message.held),
        max_loras=message.max_loras,
        requests_per_load=message.requests_per_load,
        full=message.full,
    )


def held_to_proto(held: LoraHeld) -> stats_pb2.LoraHeld:
    """The message for this."""
    return stats_pb2.LoraHeld(**msgspec.structs.asdict(held))


def _refuse(field: str, value: float, limit: str) -> None:
    raise InvalidArgument(f"{field} is {value}; it must be {limit}", field=field)
