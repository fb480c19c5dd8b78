"""Every field of the messages between processes arrives: no conversion and no message loses one.

The values are generated from the structs' own definitions. All values differ, and none is a default, so the tests cover
new fields automatically. ``STAYS`` lists fields that are left out on purpose, with the reason.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.common.v1 import (
    control_pb2,
    data_parallel_pb2,
    events_pb2,
    finish_pb2,
    kv_pb2,
    logprobs_pb2,
    media_pb2,
    pooling_pb2,
    sampling_pb2,
    stats_pb2,
)
from penstock.coordinator.v1 import messages_pb2 as coordinator_pb
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.inference.v1 import messages_pb2 as inference_pb
from penstock_common.errors import RequestFailed, ResourceExhausted
from penstock_common.lora_registry import LoraAdapter, LoraHeld, LoraRefusal, LoraRegistration
from penstock_common.rpc import cluster, data_parallel
from penstock_common.rpc.by_field import from_message, to_message
from penstock_common.tensors.chunks import IncomingTensors
from penstock_common.types.cluster import ClusterView, EngineLoads, EngineRegistration, EngineStatus, ViewDelta
from penstock_common.types.data_parallel import (
    GroupRegistration,
    GroupView,
    PauseMode,
    Pauses,
    PeerLost,
    Place,
    PoolGroup,
    PrepareFailed,
    RankGroup,
    RankReport,
    Reconfigure,
    StartDpWave,
    StartWave,
    WaveComplete,
)
from penstock_common.types.kv_transfer import (
    AllBlocksCleared,
    BlockMedia,
    BlockRemoved,
    BlockStored,
    KvParams,
    KvSource,
)
from penstock_common.types.media import MediaLimits, MultiModalFeature, TensorData
from penstock_common.types.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    FinishReason,
    Logprobs,
    LoraLimits,
    MediaStats,
    PrefillStats,
    RequestError,
    SchedulerStats,
    SpecDecodingStats,
    TokenColumns,
    UtilityOutput,
)
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest, PoolingParams, RequestContext, Vectors
from penstock_common.types.sampling import RepetitionDetection, SamplingParams, StructuredOutput
from penstock_coordinator.rpc import convert as coordinator
from penstock_enginecore.config import EngineCoreConfig, ModelConfig
from penstock_enginecore.config.executor import NodesConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.output import DraftTokenIds, NewRequestData, SchedulerOutput
from penstock_enginecore.kv_transfer.core.base import BlockFacts, Copy
from penstock_enginecore.lora.core.request import LoadedLora
from penstock_enginecore.lora.store import LoadsAwaited
from penstock_enginecore.media.core.receiver_cache import ReceiverCache
from penstock_enginecore.rpc import convert, coordinator_client
from penstock_enginecore.rpc.node_listener import ENGINE_ONLY, NODE_ONLY, shared_config
from penstock_enginecore.rpc.request_tensors import FeatureReader
from penstock_enginecore.structured_output import compiling_process
from penstock_enginecore.structured_output import grammar_processes as following
from penstock_enginecore.structured_output.core.reasoning import ReasoningBudget
from penstock_enginecore.worker import failures, messages
from penstock_enginecore.worker.messages import WorkerConfig
from penstock_frontend.call_types import ToolCall, Usage
from penstock_frontend.interfaces import Variant
from penstock_frontend.processing.media import worker_messages
from penstock_frontend.rpc.session_messages import add_request, engine_core_outputs, engine_ready
from penstock_frontend.rpc.tensor_sender import Sent, fill_feature
from penstock_frontend.tenants import Refused
from penstock_local.rpc.admin import Cluster, ListedAdapter, LostEngine, TenantRefusals
from penstock_local.rpc.admin import Variant as ListedVariant
from tests.fakes.whole_structs import Whole, lost

RANK = "engine#1"
TURNS = range(3)
GIVEN: dict[tuple[type, str], Any] = {
    # Fields that the receiver validates.
    (StructuredOutput, "json_object"): False,
    (StructuredOutput, "regex"): None,
    (StructuredOutput, "choice"): (),
    (StructuredOutput, "grammar"): None,
    (StructuredOutput, "structural_tag"): None,
    (EngineRegistration, "address"): "engine:1",
    (EngineRegistration, "kv_address"): "engine:2",
    (EngineRegistration, "kv_fingerprint"): b"fingerprint of 16"[:16],
    (GroupRegistration, "size"): 7,
    (GroupRegistration, "min_size"): 6,
    (GroupRegistration, "meeting_address"): "engine:3",
    (LoraRegistration, "digest"): b"a digest of 16 bytes"[:16],
    (LoraRegistration, "unloaded"): False,
    (MediaStats, "encoder_cache_usage"): 0.25,
    (MultiModalFeature, "identifier"): "5a" * 32,
    (PromptEmbeds, "num_tokens"): 3,
    (PromptEmbeds, "hidden_size"): 1,
    (PromptEmbeds, "dtype"): "float16",
    (PromptEmbeds, "data"): b"1234",
    (PromptEmbeds, "is_token"): b"\0\1\0",
    (SchedulerStats, "kv_cache_usage"): 0.75,
    (TensorData, "dtype"): "int8",
    (TensorData, "shape"): (2, 3),
    (TensorData, "data"): b"123456",
    (Vectors, "shape"): (2,),
    (Vectors, "data"): b"12345678",
    (Pauses, "number"): 9,
    (Pauses, "mode"): PauseMode.KEEP,
    (EngineCoreRequest, "prompt_token_ids"): [21, 22, 23],
    # Values that must be valid as a whole, and are sent as structs.
    (WorkerConfig, "engine"): EngineCoreConfig(model=ModelConfig(path="a model", max_model_len=7)),
    (WorkerConfig, "rank"): 1,
    (WorkerConfig, "world_size"): 2,
    # Used only inside the engine, and recomputed when needed.
    (PromptEmbeds, "memo"): {},
}
STAYS: dict[tuple[type, str], str] = {
    (EngineReady, "shared_memory_nonce"): "a session writes what it has read of that session's frontend",
    (Logprobs, "tokens"): "the frontend writes the texts; engines have none",
    (KvParams, "source"): "EngineCoreRequest.kv_source says it",
    (RequestContext, "model"): "an engine serves one model",
    (RequestContext, "lora"): "EngineCoreRequest.lora says it",
    (RequestContext, "data_parallel_rank"): "the frontend has chosen the engine; engines refuse it",
}


def whole(kind: type, turn: int = 0, **fields: Any) -> Any:
    """Return a value in which all fields that arrive are set. Fields in ``STAYS`` have their defaults."""
    made = Whole(GIVEN | {key: defaults(*key) for key in STAYS}, turn)
    return made.struct(kind, **fields)


def defaults(kind: type, name: str) -> Any:
    field = next(field for field in msgspec.structs.fields(kind) if field.name == name)
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def structs_of(*modules: ModuleType) -> list[type[msgspec.Struct]]:
    """Return the structs that these modules define."""
    return [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    ]


# Messages that are structs.


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("kind", structs_of(messages, failures), ids=lambda kind: kind.__name__)
def test_a_message_between_engine_and_worker_arrives_whole(kind: type, turn: int) -> None:
    sent, decode = whole(kind, turn), {}
    decode |= dict.fromkeys(messages.Call.__args__, messages.decode_call)  # type: ignore[attr-defined]
    decode |= dict.fromkeys(messages.Answer.__args__, messages.decode_answer)  # type: ignore[attr-defined]
    read: Callable[[bytes], Any] = decode.get(kind, lambda data: msgspec.msgpack.decode(data, type=kind))
    assert lost(sent, read(messages.encode(sent))) == []


def test_messages_between_engine_and_worker_hold_no_copies_of_other_structs() -> None:
    """A copied struct would lose the fields that the copy does not have."""
    settings = {messages.WorkerConfig, messages.Node}
    kinds = {*messages.Call.__args__, *messages.Answer.__args__, messages.Start, *settings}  # type: ignore[attr-defined]
    assert set(structs_of(messages)) == kinds


@pytest.mark.parametrize("turn", TURNS)
def test_a_step_arrives_whole(turn: int) -> None:
    step = whole(SchedulerOutput, turn)
    arrived = messages.decode_call(messages.encode(messages.execute(step)))
    assert isinstance(arrived, messages.Execute)
    assert lost(step, arrived.step) == []


@pytest.mark.parametrize(
    "kind",
    [
        ModelInfo,
        dict[str, KVCacheSpec],
        KVCacheConfig,
        DraftTokenIds,
        dict[int, float],
        BlockFacts,
        list[Copy],
        LoadedLora,
    ],
    ids=str,
)
def test_an_argument_or_a_result_of_a_worker_s_method_arrives_whole(kind: Any) -> None:
    sent = Whole(GIVEN).of(kind)
    assert lost(sent, msgspec.msgpack.decode(messages.encode(sent), type=kind)) == []


def test_an_adapter_that_all_workers_have_loaded_is_told_whole() -> None:
    loads, loaded = LoadsAwaited(2), whole(LoadedLora)
    number, future = loads.begin()
    for rank in range(2):
        loads.answered(rank, number, loaded)
    assert lost(loaded, future.result()) == []


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize(
    "kind",
    structs_of(following, compiling_process, worker_messages),
    ids=lambda kind: f"{kind.__module__}.{kind.__name__}",
)
def test_a_message_to_or_from_a_helping_process_arrives_whole(kind: type, turn: int) -> None:
    sent = whole(kind, turn)
    assert lost(sent, msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=kind)) == []


# Messages about requests, from engine to workers.


def test_a_new_request_has_all_that_the_engine_got() -> None:
    """``NewRequestData`` is filled from a Request, which is filled from the frontend's message."""
    sent = whole(EngineCoreRequest)
    request = Request(sent, client_id="c", max_model_len=2**60)
    request.num_computed_tokens = 2
    budget = ReasoningBudget(
        limit=3, begin_token_id=1, end_token_id=2, begun=True
    )  # made of tags that not every request has
    request.reasoning_budget = budget
    step = SchedulerOutput()
    step.add_new(request, 1, ([5], [6]))
    [new] = step.new_requests
    left = [
        field.name
        for field in msgspec.structs.fields(NewRequestData)
        if field.default is not msgspec.NODEFAULT and getattr(new, field.name) == field.default
    ]
    assert left == []
    for name in ("sampling_params", "pooling_params", "second_text_start", "context", "mm_features", "prompt_embeds"):
        assert lost(getattr(sent, name), getattr(new, name)) == [], name
    assert lost(msgspec.structs.asdict(sent.lora), msgspec.structs.asdict(new.lora)) == []
    assert new.prediction_token_ids == sent.prediction_token_ids
    assert new.token_ids == [*sent.prompt_token_ids, *sent.prior_output_token_ids]


# Errors of workers.


def test_an_error_of_a_worker_is_raised_with_all_that_it_said() -> None:
    raised = ResourceExhausted("full", field="f", reason="R", retry_after=1.5, quota_subject="tenant:t")
    failure = msgspec.msgpack.decode(messages.encode(failures.Failure.of(raised)), type=failures.Failure)
    assert vars_of(failure.error("")) == vars_of(raised)


def test_an_error_of_a_request_is_told_whole() -> None:
    error = whole(RequestError, code="NOT_FOUND")
    assert lost(error, from_message(to_message(error, finish_pb2.RequestError), RequestError)) == []
    assert lost(error, RequestError.from_exception(error.to_exception())) == []


def vars_of(error: RequestFailed) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if name != "__notes__"} | {"code": error.code}


# Structs and messages with fields of the same names.

CONVERTED: dict[type[msgspec.Struct], tuple[Any, set[str]]] = {
    BlockMedia: (events_pb2.BlockMedia, set()),
    EngineLoads: (coordinator_pb.EngineLoads, set()),
    EngineReady: (pb.Ready, set()),
    EngineStatus: (control_pb2.EngineStatus, set()),
    KvSource: (kv_pb2.KvSource, set()),
    ListedVariant: (admin_pb.Variant, set()),
    Logprobs: (logprobs_pb2.Logprobs, set()),
    LoraAdapter: (pb.LoraAdapter, set()),
    LoraHeld: (stats_pb2.LoraHeld, set()),
    LoraLimits: (pb.LoraLimits, set()),
    LoraRefusal: (coordinator_pb.LoraRefusal, set()),
    LoraRegistration: (coordinator_pb.LoraRegistration, set()),
    LostEngine: (admin_pb.LostEngine, set()),
    MediaLimits: (media_pb2.MediaLimits, set()),
    Pauses: (data_parallel_pb2.Pauses, set()),
    PeerLost: (coordinator_pb.PeerLost, {"engine"}),
    PoolingParams: (pooling_pb2.PoolingParams, set()),
    PrefillStats: (stats_pb2.PrefillStats, set()),
    PrepareFailed: (coordinator_pb.PrepareFailed, {"engine"}),
    Refused: (admin_pb.TenantRefusals, set()),
    RepetitionDetection: (sampling_pb2.RepetitionDetection, set()),
    RequestError: (finish_pb2.RequestError, set()),
    SchedulerStats: (stats_pb2.SchedulerStats, set()),
    SpecDecodingStats: (stats_pb2.SpecDecodingStats, set()),
    StartDpWave: (data_parallel_pb2.GroupWave, {"engine"}),
    StartWave: (data_parallel_pb2.GroupWave, {"engine"}),
    TenantRefusals: (admin_pb.TenantRefusals, set()),
    ToolCall: (inference_pb.ToolCall, set()),
    Usage: (stats_pb2.Usage, {"reasoning_tokens"}),
    Variant: (admin_pb.Variant, set()),
    WaveComplete: (data_parallel_pb2.GroupWave, {"engine"}),
}
"""The message of each struct, and the fields that the message does not have. Structs whose fields callers give are in
``GIVEN_BY_CALLERS``.
"""
GIVEN_BY_CALLERS = {
    BlockRemoved,
    BlockStored,
    Cluster,
    EngineCoreRequest,
    EngineRegistration,
    GroupRegistration,
    GroupView,
    ListedAdapter,
    MultiModalFeature,
    PoolGroup,
    RankReport,
    Reconfigure,
    RequestContext,
    UtilityOutput,
    ViewDelta,
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("kind", CONVERTED, ids=lambda kind: kind.__name__)
def test_a_struct_arrives_whole_by_the_names_of_its_fields(kind: type[msgspec.Struct], turn: int) -> None:
    message, stays = CONVERTED[kind]
    assert stays == set(kind.__struct_fields__).difference(message.DESCRIPTOR.fields_by_name)
    sent = Whole(GIVEN, turn).struct(kind)
    arrived = message.FromString(to_message(sent, message).SerializeToString())
    assert lost(sent, from_message(arrived, kind, **{name: getattr(sent, name) for name in stays})) == []


def test_each_struct_that_services_convert_by_field_is_in_these_tests() -> None:
    tested = {kind.__name__ for kind in (*CONVERTED, *GIVEN_BY_CALLERS)}
    read = re.compile(r"\bfrom_message\(\s*[\w.\[\]]+,\s*([A-Z]\w+)")
    services = Path(__file__).parents[4] / "services"
    found = {name for path in services.rglob("*.py") for name in read.findall(path.read_text())}
    assert found <= tested
    assert {"KvSource", "EngineCoreRequest", "LoraHeld"} <= found


# Messages between a frontend and an engine.


def request_arrived(sent: EngineCoreRequest) -> EngineCoreRequest:
    message = add_request(sent).add
    for feature in sent.mm_features:
        fill_feature(message.mm_features.add(), Sent(feature, with_data=True, keep=False), {})
    arrived = pb.EngineCoreRequest.FromString(message.SerializeToString())
    features = FeatureReader(IncomingTensors(2**20), ReceiverCache(0).session(), None).read(arrived)
    embeds = convert.parts.prompt_embeds_from_proto(arrived.prompt_embeds, arrived.prompt_is_token_ids)
    return convert.request_from_proto(arrived, embeds, features)


def test_a_request_that_generates_arrives_whole() -> None:
    sent = whole(EngineCoreRequest, pooling_params=None)
    assert lost(sent, request_arrived(sent)) == []


def test_a_request_that_pools_arrives_whole() -> None:
    sent = whole(EngineCoreRequest)
    assert lost(sent.pooling_params, request_arrived(sent).pooling_params) == []


@pytest.mark.parametrize("constraint", ["json_schema", "regex", "grammar", "structural_tag"])
def test_a_constraint_arrives_whole(constraint: str) -> None:
    fields: dict[str, Any] = {constraint: "text"}
    sent = whole(EngineCoreRequest, pooling_params=None)
    params = msgspec.structs.replace(sent.sampling_params, structured_output=StructuredOutput(**fields))
    sent = msgspec.structs.replace(sent, sampling_params=params)
    assert lost(sent, request_arrived(sent)) == []


@pytest.mark.parametrize("turn", TURNS)
def test_outputs_of_a_step_arrive_whole(turn: int) -> None:
    columns = TokenColumns()
    columns.add(1, 2, [3, 4], num_drafts=5)
    output = whole(EngineCoreOutput, turn, finish_reason=FinishReason.ERROR)
    stored, removed = whole(BlockStored), whole(BlockRemoved)
    sent = whole(
        EngineCoreOutputs,
        turn,
        outputs=[output],
        utility_output=whole(UtilityOutput, error=None),
        kv_events=[stored, removed, AllBlocksCleared()],
        tokens=columns,
    )
    message = pb.EngineCoreOutputs.FromString(convert.outputs_to_proto(sent).SerializeToString())
    assert lost(sent, engine_core_outputs(message)) == []


def test_the_failure_of_a_call_arrives_whole() -> None:
    sent = EngineCoreOutputs(utility_output=whole(UtilityOutput, result=b""))
    message = pb.EngineCoreOutputs.FromString(convert.outputs_to_proto(sent).SerializeToString())
    assert lost(sent, engine_core_outputs(message)) == []


def test_properties_of_an_engine_arrive_whole() -> None:
    sent = whole(EngineReady)
    message = pb.Ready.FromString(to_message(sent, pb.Ready, protocol_revision=1).SerializeToString())
    assert lost(sent, engine_ready(message)) == []


# Messages between engines, frontends and a coordinator.


def test_a_registration_arrives_whole() -> None:
    report = whole(RankReport, engine=RANK, group=RankGroup(3, (RANK, "other#2")), place=Place(3, 4, 5, 9))
    group = whole(GroupRegistration, report=report)
    sent = whole(EngineRegistration, engine_id="engine", incarnation="1", group=group)
    message = coordinator_pb.EngineReport(register=coordinator_client.register_to_proto(sent))
    arrived = coordinator.registration(coordinator_pb.EngineReport.FromString(message.SerializeToString()))
    assert lost(sent, arrived) == []


@pytest.mark.parametrize("kind", [StartWave, WaveComplete, PeerLost, PrepareFailed], ids=lambda kind: kind.__name__)
def test_messages_of_a_rank_arrive_whole(kind: type) -> None:
    sent = whole(kind, engine=RANK)
    message = coordinator_client.report_to_proto(sent).SerializeToString()
    assert lost(sent, coordinator.from_rank(coordinator_pb.EngineReport.FromString(message), RANK)) == []


def test_commands_to_a_rank_arrive_whole() -> None:
    group = RankGroup(3, (RANK, "other#2"))
    told = whole(Reconfigure, engine=RANK, group=group)
    message = coordinator.to_rank(told, {RANK: "a:1"}).reconfigure
    named = coordinator_client.named_from_proto(message, RANK)
    assert lost(told, named.message) == []
    assert named.meetings == {RANK: "a:1", "other#2": ""}
    start = whole(StartDpWave, engine=RANK)
    message_of_wave = coordinator.to_rank(start, {}).start_dp_wave
    assert lost(start, coordinator_client.start_dp_wave_from_proto(message_of_wave, RANK)) == []


def test_a_view_arrives_whole() -> None:
    view = whole(GroupView, group=RankGroup(3, (RANK, "other#2")), routed=("other#2",))
    sent = whole(ClusterView, groups=(whole(PoolGroup, view=view),))
    message = coordinator_pb.ClusterView.FromString(cluster.view_to_proto(sent).SerializeToString())
    assert lost(sent, cluster.view_from_proto(message)) == []


def test_a_change_of_a_view_arrives_whole() -> None:
    sent = whole(ViewDelta, changed=[whole(EngineStatus)], loras={3: whole(LoraHeld)})
    message = cluster.delta_to_proto(sent, base_version=1).SerializeToString()
    arrived = cluster.delta_from_proto(coordinator_pb.ViewDelta.FromString(message))
    loads = {name: list(getattr(arrived.loads, name)) for name in type(sent.loads).__struct_fields__}
    assert lost(msgspec.structs.asdict(sent.loads), loads) == []
    assert (list(arrived.removed), list(arrived.changed), dict(arrived.loras)) == (
        list(sent.removed),
        list(sent.changed),
        dict(sent.loras),
    )


def test_records_of_adapter_names_arrive_whole() -> None:
    sent = whole(LoraRegistration)
    assert lost([sent], cluster.registrations_from_proto(cluster.registrations_to_proto([sent]))) == []


def test_reports_of_a_rank_arrive_whole() -> None:
    sent = whole(RankReport, engine=RANK, group=RankGroup(3, (RANK,)), place=Place(3, 4, 5, 9))
    assert lost(sent, data_parallel.report_from_proto(data_parallel.report_to_proto(sent), RANK)) == []


# Settings that the nodes of an engine compare.


def test_each_setting_is_compared_between_nodes_or_is_the_engine_s_own() -> None:
    compared = {key.split(".")[0] for key in shared_config(EngineCoreConfig(model=ModelConfig(path="p")))}
    assert compared.isdisjoint(ENGINE_ONLY)
    assert compared | ENGINE_ONLY == {field.name for field in msgspec.structs.fields(EngineCoreConfig)}
    assert set(NODE_ONLY) < {field.name for field in msgspec.structs.fields(NodesConfig)}


def test_sampling_parameters_that_are_not_given_are_the_defaults() -> None:
    sent = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())
    arrived = convert.request_from_proto(add_request(sent).add)
    assert lost(sent, arrived) == []
