"""What a ScaledObject says of its pool, in the metadata of its trigger."""

import math
from collections.abc import Mapping

import msgspec

from penstock_common.errors import InvalidArgument, nearest, quoted
from penstock_common.types.cluster import DEFAULT_POOL
from penstock_coordinator.config import ScalingConfig
from penstock_coordinator.scaling.wanted import Targets

_NUMBERS: dict[str, tuple[float, float]] = {
    "targetLoad": (0.01, 100.0),
    "targetKvUsage": (0.01, 1.0),
    "slots": (1, 65_536),
    "idleSeconds": (0, 86_400),
}
"""Least and greatest value. KEDA passes everything on as text."""
_KNOWN = ("pool", *_NUMBERS)
_OF_KEDA = frozenset({"scalerAddress", "enableTLS", "unsafeSsl"})


class ScalerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Which pool is asked for, and how it shall be loaded."""

    pool: str
    targets: Targets
    idle_seconds: float
    """Seconds that the pool counts as in use behind its last request."""


def scaler_metadata(texts: Mapping[str, str], defaults: ScalingConfig) -> ScalerMetadata:
    """The metadata, what it leaves out from the coordinator's configuration. Raises InvalidArgument for a value that is none, and
    for a misspelt key; keys that are not ours are KEDA's.
    """
    for key in texts:
        if key not in _KNOWN and key not in _OF_KEDA and (hint := nearest(key, _KNOWN)):
            raise InvalidArgument(f"scalerMetadata.{key} is not known{hint}", field=f"scalerMetadata.{key}")
    slots = _number(texts, "slots", defaults.slots)
    if slots != int(slots):
        raise InvalidArgument(f"scalerMetadata.slots is {slots}; it must be an integer", field="scalerMetadata.slots")
    return ScalerMetadata(
        pool=texts.get("pool") or DEFAULT_POOL,
        targets=Targets(
            load=_number(texts, "targetLoad", defaults.target_load),
            kv_cache_usage=_number(texts, "targetKvUsage", defaults.target_kv_usage),
            slots=int(slots),
        ),
        idle_seconds=_number(texts, "idleSeconds", defaults.idle_seconds),
    )


def _number(texts: Mapping[str, str], key: str, default: float) -> float:
    text = texts.get(key)
    if text is None:
        return default
    least, greatest = _NUMBERS[key]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= greatest:  # nan is not either
        raise InvalidArgument(
            f"scalerMetadata.{key} is {quoted(text)}; it must be a number from {least:g} to {greatest:g}",
            field=f"scalerMetadata.{key}",
        )
    return value
