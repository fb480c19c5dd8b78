"""API for operators, ``penstock.admin.v1.AdminService``."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import grpc
import msgspec

from penstock.admin.v1 import messages_pb2 as pb
from penstock.admin.v1 import service_pb2, service_pb2_grpc
from penstock.common.v1 import control_pb2
from penstock_common.errors import FailedPrecondition, InvalidArgument, NotFound, RequestFailed, quoted
from penstock_common.nesting_depth import MAX_ARGUMENT_DEPTH, nests_deeper
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.by_field import fill, to_message
from penstock_common.rpc.call_authorization import peer_names
from penstock_common.rpc.data_parallel import pool_group_to_proto
from penstock_common.types.cluster import DEFAULT_POOL
from penstock_frontend.api.grpc.servicers import ask_all, refuses_unserved
from penstock_frontend.call_types import current_principal
from penstock_frontend.calls.adapters import AdapterInfo, HeldAdapter
from penstock_frontend.dispatch.client import LostEngines
from penstock_frontend.interfaces import EngineClient
from penstock_frontend.rpc.coordinator_client import CoordinatorClient
from penstock_frontend.served_models import ServedModel, ServedModels


def lora_info(info: AdapterInfo) -> pb.LoraInfo:
    """Return the message that describes a LoRA adapter."""
    message = to_message(info.held or HeldAdapter(b""), pb.LoraInfo, digest=None, pinned=None)
    fill(message, info.adapter)
    fill(message, info)
    return message


_SERVICE = service_pb2.DESCRIPTOR.services_by_name["AdminService"]
SERVICE_NAME = _SERVICE.full_name
METHODS = tuple(f"/{SERVICE_NAME}/{method.name}" for method in _SERVICE.methods)

_PAUSE_MODES: dict[int, str] = {
    control_pb2.PAUSE_MODE_ABORT: "abort",
    control_pb2.PAUSE_MODE_WAIT: "wait",
    control_pb2.PAUSE_MODE_KEEP: "keep",
}
_MAX_SLEEP_LEVEL = 2
_MAX_DEPTH = MAX_ARGUMENT_DEPTH - 1
"""Maximum nesting depth of the arguments of a worker method. The maximum is one less than for a call, because the
arguments of a worker method are nested in the arguments of a call.
"""
_MAX_DRAIN_TIMEOUT = 86_400.0
_DRAIN_INTERVAL = 0.1
"""Number of seconds between two checks of the state of a draining engine."""
_WAKE_UP_TAGS = ("weights", "kv_cache")

add_to_server = service_pb2_grpc.add_AdminServiceServicer_to_server
Context = grpc.aio.ServicerContext[Any, Any]


class OperatedModel(NamedTuple):
    """Components of a model that only operators use. ``coordinator`` is None if the configuration lists the engines."""

    coordinator: CoordinatorClient | None
    lost: LostEngines


@refuses_unserved(_SERVICE)
class AdminServicer(service_pb2_grpc.AdminServiceServicer):
    """Controls engines through the frontend's sessions with them. Methods that are not supported yet fail with
    UNIMPLEMENTED.

    The servicer sends a call to all connected engines of the named model, or of all models, in parallel. If an engine
    fails, the call fails with the error of this engine, after all engines have answered. The engines without an error
    have carried out the call in this case.
    """

    def __init__(self, models: ServedModels, operated: Sequence[OperatedModel]) -> None:
        """Create the servicer of the operators' API. ``operated`` has one entry per model, in the order of ``models``."""
        self._models = models
        self._operated = {model.name: each for model, each in zip(models, operated, strict=True)}

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        """Make the engines stop scheduling requests. Returns once all engines are paused."""
        await self._ask(request.model, "pause", _pause_mode(request.mode), request.clear_cache)
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """Make paused engines schedule requests again."""
        await self._ask(request.model, "resume")
        return pb.ResumeResponse()

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepResponse:
        """Make the engines free device memory."""
        if request.level > _MAX_SLEEP_LEVEL:
            raise InvalidArgument(f"level is {request.level}; it must be from 0 to {_MAX_SLEEP_LEVEL}", field="level")
        await self._ask(
            request.model, "sleep", request.level, _pause_mode(request.mode or control_pb2.PAUSE_MODE_ABORT)
        )
        return pb.SleepResponse()

    async def WakeUp(self, request: pb.WakeUpRequest, context: Context) -> pb.WakeUpResponse:
        """Make sleeping engines allocate device memory again."""
        for index, tag in enumerate(request.tags):
            if tag not in _WAKE_UP_TAGS:
                raise InvalidArgument(
                    f"tags[{index}] is {quoted(tag)}; known: {', '.join(_WAKE_UP_TAGS)}", field=f"tags[{index}]"
                )
        await self._ask(request.model, "wake_up", list(request.tags))
        return pb.WakeUpResponse()

    async def IsSleeping(self, request: pb.IsSleepingRequest, context: Context) -> pb.IsSleepingResponse:
        """Return for each engine whether it sleeps."""
        return pb.IsSleepingResponse(engines=await self._ask(request.model, "is_sleeping"))

    async def GetEngineInfo(self, request: pb.GetEngineInfoRequest, context: Context) -> pb.GetEngineInfoResponse:
        """Return the properties and memory of each engine."""
        infos = await self._ask(request.model, "engine_info")
        return pb.GetEngineInfoResponse(
            engines={engine: msgspec.json.encode(info).decode() for engine, info in infos.items()}
        )

    async def GetCluster(self, request: pb.GetClusterRequest, context: Context) -> pb.GetClusterResponse:
        """Return the state of the cluster, as this frontend knows it."""
        chosen = self._chosen(request.model)
        views = [model.llm.engines.view for model in chosen]
        operated = [self._operated[model.name] for model in chosen]
        losses = sorted((loss for each in operated for loss in each.lost.recent()), key=lambda loss: loss[1])
        refusals = [refused for model in chosen for refused in model.llm.tenants.recent()]
        return pb.GetClusterResponse(
            engines=[to_message(status, control_pb2.EngineStatus) for view in views for status in view.cluster()],
            coordinator_connected=all(each.coordinator is not None and each.coordinator.connected for each in operated),
            variants=[to_message(variant, pb.Variant) for view in views for variant in view.variants()],
            groups=[pool_group_to_proto(group) for view in views for group in view.groups()],
            lost_engines=[to_message(lost, pb.LostEngine, seconds_ago=seconds) for lost, seconds in losses],
            tenant_refusals=[
                to_message(each, pb.TenantRefusals)
                for each in sorted(refusals, key=lambda each: each.num_refused, reverse=True)
            ],
        )

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        """Clear the prefix caches of the engines."""
        return pb.ResetPrefixCacheResponse(
            num_engines_reset=await self._reset(request.model, "reset_prefix_cache", request.preempt_running)
        )

    async def ResetMultimodalCache(
        self, request: pb.ResetMultimodalCacheRequest, context: Context
    ) -> pb.ResetMultimodalCacheResponse:
        """Clear the engines' caches of media that the frontends have sent."""
        return pb.ResetMultimodalCacheResponse(num_engines_reset=len(await self._ask(request.model, "reset_mm_cache")))

    async def ResetEncoderCache(
        self, request: pb.ResetEncoderCacheRequest, context: Context
    ) -> pb.ResetEncoderCacheResponse:
        """Clear the engines' caches of media embeddings."""
        return pb.ResetEncoderCacheResponse(
            num_engines_reset=len(await self._ask(request.model, "reset_encoder_cache"))
        )

    async def StartProfile(self, request: pb.StartProfileRequest, context: Context) -> pb.StartProfileResponse:
        """Start the profilers of the engines."""
        await self._ask(request.model, "start_profile")
        return pb.StartProfileResponse()

    async def StopProfile(self, request: pb.StopProfileRequest, context: Context) -> pb.StopProfileResponse:
        """Stop the profilers of the engines. The returned paths are on the engines' machines."""
        paths = await self._ask(request.model, "stop_profile")
        return pb.StopProfileResponse(paths=[path for of_engine in paths.values() for path in of_engine])

    async def Drain(self, request: pb.DrainRequest, context: Context) -> AsyncIterator[pb.DrainResponse]:
        """Drain an engine. Yields the number of its remaining requests after each change, until it is 0 or the engine
        has left.
        """
        known = {
            status.engine_id: (status, model.llm.engines)
            for model in self._models
            for status in model.llm.engines.view.cluster()
        }
        if request.engine_id not in known:
            raise NotFound(
                f"engine_id is {quoted(request.engine_id)}; engines: {', '.join(sorted(known)) or 'none'}",
                field="engine_id",
            )
        if not 0 <= request.timeout_seconds <= _MAX_DRAIN_TIMEOUT:
            # also refuse NaN, for which every comparison is false
            raise InvalidArgument(
                f"timeout_seconds is {request.timeout_seconds:g}; it must be from 0 to {_MAX_DRAIN_TIMEOUT:g}",
                field="timeout_seconds",
            )
        status, engines = known[request.engine_id]
        told: tuple[int, int] | None = None
        while told != (0, 0):
            left = await self._drain(engines, request.engine_id, request.timeout_seconds, gives=bool(status.kv_address))
            if left != told:
                requests, num_bytes = told = left
                yield pb.DrainResponse(
                    engine_id=request.engine_id,
                    num_unfinished_reqs=requests,
                    num_bytes_left=num_bytes,
                    done=told == (0, 0),
                )
            else:
                await asyncio.sleep(_DRAIN_INTERVAL)

    async def _drain(
        self,
        engines: EngineClient,
        engine: str,
        timeout: float,  # noqa: ASYNC109 - the engine's, not the call's
        *,
        gives: bool,
    ) -> tuple[int, int]:
        """Tell an engine to drain. The call may be repeated.

        Return the number of the engine's requests, and the size in bytes of the KV blocks that it keeps for other
        engines. The size is requested only if ``gives`` is True. The two numbers are 0 if the engine has left.
        """
        requests = await self._ask_of(engines, "drain", [timeout], engine)
        info = await self._ask_of(engines, "engine_info", [], engine) if gives else None
        kept = info.get("kv_transfer") if isinstance(info, dict) else None
        return int(requests or 0), int(kept.get("leased_bytes", 0)) if kept else 0

    async def _ask_of(self, engines: EngineClient, method: str, arguments: list[Any], engine: str) -> Any:
        """Return the answer of one engine to a call. Return None if the engine has left. Raises the error of the
        engine.
        """
        result = (await engines.call_utility(method, arguments, engine=engine)).get(engine)
        if isinstance(result, RequestFailed):
            if result.reason == "ENGINE_GONE":
                return None
            raise result
        return result

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        """Change the number of engines in a pool. The coordinator checks the request and changes the number."""
        # The sessions of all models are with the same coordinator.
        coordinator = self._operated[self._models.first.name].coordinator
        if coordinator is None:
            raise FailedPrecondition(
                "this frontend has no coordinator, so it cannot change the number of engines; set coordinator.address",
                reason="NO_COORDINATOR",
            )
        replicas = request.replicas if request.HasField("replicas") else None
        previous = await coordinator.scale(request.pool, replicas)
        get_logger().info(
            "changed the number of engines in a pool",
            pool=request.pool or DEFAULT_POOL,
            replicas=replicas,
            previous=previous,
            by=_caller(context),
        )
        return pb.ScaleResponse(previous_replicas=previous)

    async def LoadLora(self, request: pb.LoadLoraRequest, context: Context) -> pb.LoadLoraResponse:
        """Load a LoRA adapter on every engine, and register the adapter's name."""
        model = self._models.of(request.model)
        model.llm.inputs.check_model(request.model)
        loaded = await model.llm.adapters.load(
            request.name, request.path, load_inplace=request.load_inplace, pinned=request.pinned
        )
        return pb.LoadLoraResponse(lora=lora_info(loaded))

    async def UnloadLora(self, request: pb.UnloadLoraRequest, context: Context) -> pb.UnloadLoraResponse:
        """Remove the name of a LoRA adapter, so that requests cannot use this name any more."""
        adapters = self._models.of(request.name, field="name").llm.adapters
        return pb.UnloadLoraResponse(lora=lora_info(await adapters.unload(request.name)))

    async def ListLoras(self, request: pb.ListLorasRequest, context: Context) -> pb.ListLorasResponse:
        """Return the LoRA adapters that requests can name, of all models that serve adapters."""
        chosen = self._chosen(request.model)
        serving = [model for model in chosen if model.llm.adapters.adapters.serves] or chosen[:1]
        lists = await asyncio.gather(*(model.llm.adapters.list() for model in serving))
        adapters = sorted((each for listed in lists for each in listed), key=lambda each: each.adapter.name)
        return pb.ListLorasResponse(names=[each.adapter.name for each in adapters], loras=map(lora_info, adapters))

    async def PinLora(self, request: pb.PinLoraRequest, context: Context) -> pb.PinLoraResponse:
        """Pin a LoRA adapter in the memory of the engines, or unpin it."""
        adapters = self._models.of(request.name, field="name").llm.adapters
        return pb.PinLoraResponse(lora=lora_info(await adapters.pin(request.name, pinned=not request.unpin)))

    async def CollectiveRpc(self, request: pb.CollectiveRpcRequest, context: Context) -> pb.CollectiveRpcResponse:
        """Call a method on every worker of the engines. The engines decide which methods are allowed."""
        if not request.method:
            raise InvalidArgument("method is not set", field="method")
        results = await self._ask(request.model, "collective_rpc", request.method, _arguments(request.arguments))
        return pb.CollectiveRpcResponse(
            results=[msgspec.msgpack.encode(result) for of_engine in results.values() for result in of_engine]
        )

    async def _reset(self, model: str, method: str, *arguments: object) -> int:
        """Call a reset method on the engines of a model. The method returns True if it has reset something. Return the number of
        engines that returned True.
        """
        return sum(result is True for result in (await self._ask(model, method, *arguments)).values())

    def _chosen(self, name: str) -> list[ServedModel]:
        """Return the model with this name, or all models if the name is empty. Raises NotFound."""
        if not name:
            return list(self._models)
        model = self._models.of(name)
        model.llm.inputs.check_model(name)
        return [model]

    async def _ask(self, model: str, method: str, *arguments: object) -> dict[str, Any]:
        return await ask_all([each.llm.engines for each in self._chosen(model)], method, *arguments)


def _caller(context: Context) -> str:
    """Return the name of the caller for logs. The caller's name is the name of its key, token or certificate. The
    result is empty if authentication is off.
    """
    principal = current_principal.get()
    return ", ".join(peer_names(context)) if principal is None else principal.name


def _pause_mode(mode: int) -> str:
    if mode not in _PAUSE_MODES:
        known = ", ".join(f"{name.upper()} ({number})" for number, name in _PAUSE_MODES.items())
        raise InvalidArgument(f"mode is {mode}; known: {known}", field="mode")
    return _PAUSE_MODES[mode]


def _arguments(packed: bytes) -> Sequence[object]:
    """Return the arguments of a CollectiveRpc call. Return an empty list if ``packed`` is empty. Raises
    InvalidArgument.
    """
    if not packed:
        return []
    try:
        decoded = msgspec.msgpack.decode(packed, type=list[Any])
    except msgspec.DecodeError as e:  # this error class includes ValidationError
        raise InvalidArgument(f"arguments is not a msgpack array: {e}", field="arguments") from None
    except RecursionError:
        raise _too_deep() from None
    if nests_deeper(decoded, _MAX_DEPTH):
        raise _too_deep()
    return decoded


def _too_deep() -> InvalidArgument:
    return InvalidArgument(f"arguments are nested more than {_MAX_DEPTH} levels deep", field="arguments")
