"""Service ``vllm.grpc.engine.VllmEngine``. This service is vLLM's protocol for gateways and load generators that
tokenize prompts themselves.
"""

import asyncio
import importlib.metadata
import math
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

import grpc
import msgspec
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from penstock_common.config.settings import Reread
from penstock_common.errors import InvalidArgument, OutOfRange, Unavailable, Unimplemented
from penstock_common.rpc.by_field import to_message
from penstock_common.rpc.request import refuse_set
from penstock_common.types.kv_transfer import AllBlocksCleared, BlockRemoved, BlockStored, EngineRole, KvCacheEvent
from penstock_common.types.media import MediaLimits, Modality
from penstock_frontend.api.call_context import deadline_after
from penstock_frontend.api.grpc.servicers import ask_all, media_limits, refuses_unserved
from penstock_frontend.api.vllm import messages
from penstock_frontend.calls.admission import Readiness, demand_of
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.config import LimitsConfig, MediaConfig, ModelConfig
from penstock_frontend.dispatch.kv_events import KvEventBatch, KvEventFeed
from penstock_frontend.dispatch.kv_gateway import CONNECTOR
from penstock_frontend.processing.prompts.mixed_prompt import accepted
from penstock_frontend.processing.prompts.tokenizer_bundle import ModelCard, TokenizerBundle

# The code below converts KV cache events to messages.

_HASH_BYTES = 8


def kv_event_batch(batch: KvEventBatch, first_id: int) -> common_pb2.KvEventBatch:
    """Return the message for a batch of events. The events get consecutive ids from ``first_id`` on."""
    return common_pb2.KvEventBatch(
        sequence_number=batch.sequence,
        timestamp=batch.timestamp,
        dp_rank=batch.rank,
        events=[_kv_event(event, first_id + index) for index, event in enumerate(batch.events)],
    )


def _kv_event(event: KvCacheEvent, event_id: int) -> common_pb2.KvCacheEvent:
    match event:
        case BlockStored():
            return common_pb2.KvCacheEvent(event_id=event_id, stored=_stored(event))
        case BlockRemoved():
            removed = common_pb2.KvBlocksRemoved(block_hashes=[_folded(each) for each in event.block_hashes])
            return common_pb2.KvCacheEvent(event_id=event_id, removed=removed)
        case AllBlocksCleared():
            return common_pb2.KvCacheEvent(event_id=event_id, cleared=common_pb2.KvCacheCleared())


def _stored(event: BlockStored) -> common_pb2.KvBlocksStored:
    size = event.block_size
    stored = common_pb2.KvBlocksStored(
        blocks=[
            common_pb2.KvBlock(
                block_hash=_folded(block_hash),
                token_ids=event.token_ids[index * size : (index + 1) * size],
                block_size=size,
            )
            for index, block_hash in enumerate(event.block_hashes)
        ]
    )
    if event.lora_name:
        stored.lora_name = event.lora_name
    if event.parent_hash:
        stored.parent_block_hash = _folded(event.parent_hash)
    return stored


def _folded(block_hash: bytes) -> int:
    """Return the last eight bytes of a digest as a signed integer. In this protocol, this integer identifies a block."""
    return int.from_bytes(block_hash[-_HASH_BYTES:], "big", signed=True)


_SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]
SERVICE_NAME: str = _SERVICE.full_name
LASTING = (f"/{SERVICE_NAME}/SubscribeKvEvents",)
"""Names of the methods whose calls last until the client or the server ends them."""
_VERSION = importlib.metadata.version("penstock-frontend")
_CHUNK_BYTES = 64 * 1024
_KV_ROLES = {EngineRole.BOTH: "kv_both", EngineRole.PREFILL: "kv_producer", EngineRole.DECODE: "kv_consumer"}
_FLUSH_RETRY = 0.1
"""Number of seconds between two attempts to clear the prefix caches while requests are running."""
_PROFILE_OPTIONS = (
    "output_dir",
    "start_step",
    "num_steps",
    "activities",
    "with_stack",
    "record_shapes",
    "profile_by_stage",
)

add_to_server = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server
Context = grpc.aio.ServicerContext[Any, Any]


@refuses_unserved(_SERVICE)
class VllmEngineServicer:
    """Converts calls of vLLM's gRPC protocol into requests of ``AsyncLLM``. A gateway treats the frontend as one
    worker, even if the frontend has many engines.

    The server's interceptor converts errors into statuses.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        model: ModelConfig,
        card: ModelCard,
        kv_events: KvEventFeed,
        readiness: Readiness,
        *,
        media: MediaConfig,
        limits: Reread[LimitsConfig],
    ) -> None:
        self._media = media
        self._limits = limits
        self._llm = llm
        self._readiness = readiness
        self._model = model
        self._card = card
        self._kv_events = kv_events
        self._bundle = TokenizerBundle(card.folder)
        self._started = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Generate a continuation of a prompt. Yields chunks, or complete sequences at the end."""
        converted = messages.generate_request(request, **messages.call_details(context), anchor=self._anchor)
        said, n = request.kv_transfer_params_json, converted.sampling["n"]
        kv = self._llm.gateway.read_json(said, n=n, field="kv_transfer_params_json")
        converted = msgspec.structs.replace(converted, context=msgspec.structs.replace(converted.context, kv=kv))
        # -1 means the maximum length of a prompt after which there is room for one output token
        if converted.sampling["truncate_prompt_tokens"] == -1:
            room = await self._llm.prompt_room(1, converted.context)
            converted.sampling["truncate_prompt_tokens"] = room
        live = self._llm.accept(converted.context.external_request_id, demand_of(converted), abortable=True)
        # A call may be cancelled at any await, for example while a slow client reads a message. Only the done callback
        # runs in every case.
        context.add_done_callback(lambda _: self._llm.release(live))  # type: ignore[arg-type]  # its stub is no Protocol
        writer = messages.GenerateResponses(converted, live, stream=request.stream)
        async for output in self._llm.generate(converted, live):
            for response in writer.of(output):
                yield response

    def _anchor(self, modality: Modality) -> int:
        """Return the id of the token that the chat template writes for a media item of this modality. Raises
        InvalidArgument.
        """
        media = self._llm.inputs.media
        family = media.preparer.family if media is not None else None
        if family is None or modality not in family.modalities:
            taken = accepted(family, self._llm.inputs.no_media)
            raise InvalidArgument(f"media_refs has media of modality {modality}; {taken}", field="media_refs")
        return self._llm.tokenizer.token_id(family.placeholder(modality)) or 0

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Return the embedding of a prompt."""
        converted = messages.embed_request(request, **messages.call_details(context))
        result, _ = await self._llm.run_pooling(converted, abortable=True)
        return messages.embed_response(result)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Abort requests of the caller's tenant that were started with this protocol.

        Unknown ids are ignored, because the requests may have just ended.
        """
        self._llm.abort_ids(request.request_ids, messages.tenant_of(context))
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Report whether clients should send requests to this frontend."""
        return pb.HealthCheckResponse(healthy=self._readiness.ready, message=self._readiness.why or "serving")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """Return the properties of the served model. Waits for an engine, because the answer includes limits that the
        engine reports.
        """
        deadline = deadline_after(context.time_remaining())
        limits = await self._llm.engines.wait_until_usable(deadline, tenant=messages.tenant_of(context))
        defaults = self._card.sampling_defaults
        return pb.GetModelInfoResponse(
            model_path=self._model.path,
            is_generation="generate" in self._llm.engines.view.capabilities,
            supports_vision=any(each.modality == "image" for each in media_limits(self._llm, self._limits.now)),
            max_context_length=limits.max_model_len,
            vocab_size=limits.vocab_size,
            served_model_name=self._model.name,
            tokenizer_path=self._model.path,
            model_type=self._card.model_type,
            architectures=self._card.architectures,
            eos_token_ids=self._card.eos_token_ids,
            pad_token_id=self._card.pad_token_id,
            bos_token_id=self._card.bos_token_id,
            max_req_input_len=limits.max_model_len,
            default_sampling_params_json=msgspec.json.encode(defaults).decode() if defaults else "",
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Return the properties of this frontend and of its engines. docs/guides/gateways.md explains each field, and
        why some fields are not set.
        """
        infos = list((await ask_all([self._llm.engines], "engine_info")).values())
        dtypes = {info.get("dtype", "") for info in infos}
        dtype = dtypes.pop() if len(dtypes) == 1 else ""
        media = media_limits(self._llm, self._limits.now)
        return pb.GetServerInfoResponse(
            active_requests=self._llm.num_live,
            is_paused=all(info.get("pause_state", "running") != "running" for info in infos),
            last_receive_timestamp=self._llm.last_accepted,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",
            data_parallel_size=len(infos),
            block_size=min(info.get("block_size", 0) for info in infos),
            max_num_seqs=min(info.get("max_num_seqs", 0) for info in infos),
            kv_cache_dtype="auto",
            model_dtype=dtype and f"torch.{dtype}",
            constrained_decoding_start="first_token",
            **(self._media_info(media, dtype) if media else {}),
            **(self._kv_info() if self._llm.gateway.serves else {}),
        )

    def _media_info(self, media: Sequence[MediaLimits], dtype: str) -> dict[str, Any]:
        """Return the fields of the answer about media. Gateways send tensors as the model's processor produces them,
        and engines normalize the pixels.
        """
        schemes = ["data", "http", "https"] if self._media.allowed_domains else ["data"]
        return {
            "mm_processor": "inprocess",
            "mm_processor_source": "default",
            "mm_media_ref_schemes": ",".join(schemes),
            "mm_device_do_normalize": True,
            "mm_item_limits": ",".join(sorted(f"{each.modality}={each.max_items}" for each in media)),
            "mm_encoder_budget": max(each.max_tokens for each in media),
            "multimodal_encoder_dtype": dtype,
        }

    def _kv_info(self) -> dict[str, Any]:
        """Return the fields of the answer about KV transfer. Engines with the same fingerprint can exchange KV blocks."""
        known, connector = self._llm.engines.view.cluster(), self._llm.gateway.connector
        giving = [e for e in known if connector != CONNECTOR or (e.kv_address and e.kv_fingerprint)]
        if not giving:
            return {}
        roles = {each.role for each in giving}
        role = _KV_ROLES[roles.pop() if len(roles) == 1 else EngineRole.BOTH]
        fingerprints = {each.kv_fingerprint for each in giving}
        return {
            "kv_connector": connector,
            "kv_role": role,
            "kv_engine_id": giving[0].engine_id,
            "pairing_protocol": fingerprints.pop().hex() if len(fingerprints) == 1 else "",
        }

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """Return the load of each engine that has a rank."""
        loads = self._llm.engines.view.rank_loads()
        if request.HasField("dp_rank"):
            loads = [load for load in loads if load.rank == request.dp_rank]
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=_VERSION,
            dp_rank_count=len(loads),
            loads=[
                to_message(
                    load,
                    pb.SchedulerLoad,
                    dp_rank=load.rank,
                    num_total_reqs=load.num_running_reqs + load.num_waiting_reqs,
                    num_used_tokens=round(load.kv_cache_usage * load.capacity),
                    max_total_num_tokens=load.capacity,
                    token_usage=load.kv_cache_usage,
                    utilization=load.kv_cache_usage,
                    max_running_requests=load.max_running,
                )
                for load in loads
            ],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Stream a zip archive of the tokenizer's files. The last piece has the SHA-256 of the archive."""
        data, sha256 = await self._bundle.get()
        for start in range(0, len(data), _CHUNK_BYTES):
            stop = start + _CHUNK_BYTES
            yield common_pb2.GetTokenizerChunk(data=data[start:stop], sha256=sha256 if stop >= len(data) else "")

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Stream the current content of the engines' prefix caches, and after that all changes. In the stream, every
        engine is a rank that has its own sequence numbers.
        """
        if request.start_sequence_number:
            raise OutOfRange(
                f"start_sequence_number is {request.start_sequence_number}, but past events are not stored; set it to 0 "
                "to start with the current state",
                field="start_sequence_number",
            )
        engines = self._llm.engines
        if not engines.usable:
            raise Unavailable("no engine accepts requests", retry_after=1.0)
        if "kv_events" not in engines.view.capabilities:
            raise Unimplemented("the engines do not publish KV cache events; set cache.enable_kv_events to true")
        subscription = self._kv_events.subscribe()
        context.add_done_callback(lambda _: subscription.close())  # type: ignore[arg-type]  # its stub is no Protocol
        # subscribers wait for the initial metadata, and it may take long until the first event comes
        await context.send_initial_metadata(())
        num_events = 0
        async for batch in subscription:
            yield kv_event_batch(batch, num_events + 1)
            num_events += len(batch.events)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Clear the prefix caches of the engines. If engines refuse because requests are running, retry for at most
        ``timeout_s`` seconds.
        """
        if not 0.0 <= request.timeout_s < math.inf:
            raise InvalidArgument(
                f"timeout_s is {request.timeout_s}; it must be finite and not negative", field="timeout_s"
            )
        give_up = time.monotonic() + request.timeout_s
        while True:
            results = await ask_all([self._llm.engines], "reset_prefix_cache", False)
            refused = [engine for engine, done in results.items() if done is not True]
            if not refused:
                return common_pb2.FlushCacheResponse(success=True, message="the prefix caches are empty")
            if time.monotonic() >= give_up:
                message = (
                    f"the prefix cache was not cleared on {', '.join(refused)}, because requests are running there"
                )
                return common_pb2.FlushCacheResponse(success=False, message=message)
            await asyncio.sleep(_FLUSH_RETRY)

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Start the profilers of the engines. The options of the profilers come from the configuration."""
        refuse_set(request, _PROFILE_OPTIONS)
        await ask_all([self._llm.engines], "start_profile")
        return common_pb2.ProfileResponse(success=True, message="profiling")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> common_pb2.ProfileResponse:
        """Stop the profilers of the engines. The returned message has the paths of the traces on the engines' machines."""
        paths = (await ask_all([self._llm.engines], "stop_profile")).values()
        return common_pb2.ProfileResponse(success=True, message=", ".join(path for each in paths for path in each))
