"""External scaler service for KEDA, which reports the load of pools and whether they are in use."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping

import grpc
import msgspec

from penstock.keda import externalscaler_pb2 as pb
from penstock.keda import externalscaler_pb2_grpc
from penstock_common.config.sections import PeersConfig
from penstock_common.errors import InvalidArgument, Unavailable, nearest, quoted
from penstock_common.types.cluster import DEFAULT_POOL
from penstock_coordinator.autoscaling import ScalingSignals, Targets, load_with_held
from penstock_coordinator.cluster import Clock
from penstock_coordinator.config import ScalingConfig

# The code below parses the metadata of a trigger of a KEDA ScaledObject. The metadata name a pool of engines, and give
# the load and the KV cache usage to which KEDA scales the pool.

_NUMBERS: dict[str, tuple[float, float]] = {
    "targetLoad": (0.01, 100.0),
    "targetKvUsage": (0.01, 1.0),
    "slots": (1, 65_536),
    "idleSeconds": (0, 86_400),
}
"""Minimum and maximum of the value of each metadata key whose value is a number. KEDA sends all values as text."""
_KNOWN = ("pool", *_NUMBERS)
_OF_KEDA = frozenset({"scalerAddress", "enableTLS", "unsafeSsl"})


class ScalerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Pool that a ScaledObject scales, and the load to which KEDA scales the pool."""

    pool: str
    targets: Targets
    idle_seconds: float
    """Seconds after the pool's last request for which the pool counts as in use."""


def scaler_metadata(texts: Mapping[str, str], defaults: ScalingConfig) -> ScalerMetadata:
    """Parse ``texts``, the metadata of a trigger. If a key is missing, its value comes from the coordinator's
    configuration ``defaults``.

    Raises InvalidArgument for an invalid value or a misspelled key. Other unknown keys are ignored, because KEDA uses
    them.
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
    if not least <= value <= greatest:  # the comparison is also False for nan
        raise InvalidArgument(
            f"scalerMetadata.{key} is {quoted(text)}; it must be a number from {least:g} to {greatest:g}",
            field=f"scalerMetadata.{key}",
        )
    return value


Context = grpc.aio.ServicerContext[object, object]

_SERVICE = pb.DESCRIPTOR.services_by_name["ExternalScaler"]
SERVICE_NAME: str = _SERVICE.full_name
LOAD = "load"
KV_CACHE_USAGE = "kv_cache_usage"


class ExternalScalerServicer(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Service that answers KEDA's calls with the scaling signals.

    Each call contains the metadata, so the service stores no state per ScaledObject. Until the cluster is known, unary
    calls fail with UNAVAILABLE, and KEDA then does not change the number of engines. Streams wait until the cluster is
    known.
    """

    def __init__(self, signals: ScalingSignals, config: ScalingConfig, clock: Clock) -> None:
        self._signals = signals
        self._config = config
        self._now = clock
        self._stopping = asyncio.Event()

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Register the service with a server."""
        externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(self, server)

    def stop(self) -> None:
        """End the streams that KEDA keeps open."""
        self._stopping.set()

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Context) -> pb.GetMetricSpecResponse:
        return self._metric_spec(request)

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:
        metadata = self._metadata(request.scaledObjectRef)
        pool = self._signals.pool(metadata.pool)
        if request.metricName == LOAD:
            value = load_with_held(pool, metadata.targets)
        elif request.metricName == KV_CACHE_USAGE:
            value = pool.kv_cache_usage
        else:
            raise InvalidArgument(
                f"metricName is {quoted(request.metricName)}; known: {LOAD}, {KV_CACHE_USAGE}", field="metricName"
            )
        if value is None:
            raise Unavailable(
                f"an engine of pool {quoted(metadata.pool)} does not report how many requests it can run at once, because "
                "its release is too old; upgrade the engine",
                reason="LOAD_NOT_KNOWN",
            )
        return pb.GetMetricsResponse(
            metricValues=[pb.MetricValue(metricName=request.metricName, metricValueFloat=value)]
        )

    async def IsActive(self, request: pb.ScaledObjectRef, context: Context) -> pb.IsActiveResponse:
        metadata = self._metadata(request)
        return pb.IsActiveResponse(result=self._active_for(metadata) > 0)

    async def StreamIsActive(self, request: pb.ScaledObjectRef, context: Context) -> AsyncIterator[pb.IsActiveResponse]:
        metadata = self._metadata(request)
        told: bool | None = None
        version = 0
        while not self._stopping.is_set():
            left = math.inf
            if self._signals.known:
                left = self._active_for(metadata)
                if (active := left > 0) is not told:
                    told = active
                    yield pb.IsActiveResponse(result=active)
            version = await self._next_change(version, left or math.inf)

    async def StreamMetricSpec(
        self, request: pb.ScaledObjectRef, context: Context
    ) -> AsyncIterator[pb.GetMetricSpecResponse]:
        yield self._metric_spec(request)
        await self._stopping.wait()

    def _metric_spec(self, request: pb.ScaledObjectRef) -> pb.GetMetricSpecResponse:
        targets = self._metadata(request).targets
        return pb.GetMetricSpecResponse(
            metricSpecs=[
                pb.MetricSpec(metricName=LOAD, targetSizeFloat=targets.load),
                pb.MetricSpec(metricName=KV_CACHE_USAGE, targetSizeFloat=targets.kv_cache_usage),
            ]
        )

    def _metadata(self, request: pb.ScaledObjectRef) -> ScalerMetadata:
        return scaler_metadata(request.scalerMetadata, self._config)

    def _active_for(self, metadata: ScalerMetadata) -> float:
        return self._signals.active_for(metadata.pool, metadata.idle_seconds, self._now())

    async def _next_change(self, version: int, seconds: float) -> int:
        newer = asyncio.create_task(self._signals.changes.newer_than(version))
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            timeout = None if math.isinf(seconds) else seconds
            await asyncio.wait({newer, stopped}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            return newer.result()[0] if newer.done() else version
        finally:
            for task in (newer, stopped):
                task.cancel()
            await asyncio.gather(newer, stopped, return_exceptions=True)


def allowed(peers: PeersConfig) -> dict[str, tuple[str, ...]]:
    """Return the allowed certificate names for each method."""
    return {f"/{SERVICE_NAME}/{method.name}": peers.scalers for method in _SERVICE.methods}
