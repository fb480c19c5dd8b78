"""Calls of gateways to ``vllm.grpc.engine.VllmEngine`` other than generation."""

import hashlib
import io
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from penstock.common.v1 import finish_pb2, stats_pb2, tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as engine_pb
from penstock_common.errors import Cancelled, InvalidArgument, NotFound, Unavailable, Unimplemented
from penstock_frontend.api.vllm import engine as vllm_engine
from penstock_frontend.processing.prompts.tokenizer_bundle import TokenizerBundle
from tests.fakes.clients.vllm_client import VllmClient
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, collect, eventually, failure
from tests.fakes.models.small_tokenizers import byte_level, save_model

VOCAB = byte_level().get_vocab_size()
NOWHERE = "127.0.0.1:1"


@pytest.fixture
def stub(frontend: FrontendServer) -> Any:
    return VllmClient(frontend).stub


@pytest.fixture
async def embedding(model: Path) -> Any:
    """Yield the stub of a frontend, whose engine returns the embedding (0.5, -1) for every input."""

    def embed(output: engine_pb.EngineCoreOutput) -> engine_pb.EngineCoreOutput:
        vector = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2], inline=struct.pack("<2f", 0.5, -1.0))
        reason = finish_pb2.FINISH_REASON_STOP
        return engine_pb.EngineCoreOutput(request_id=output.request_id, pooling_output=vector, finish_reason=reason)

    engine = FakeEngine(vocab_size=VOCAB)
    engine.ready.capabilities[:] = ["embed"]
    engine.mangle = embed
    async with engine, FrontendServer(model, engines=[engine.address]) as frontend:
        await frontend.until_health(serving=True)
        yield VllmClient(frontend).stub


async def test_embed_gives_the_vector_of_a_prompt(embedding: Any) -> None:
    response = await embedding.Embed(pb.EmbedRequest(tokenized={"input_ids": [1, 2, 3]}))
    assert list(response.embedding) == [0.5, -1.0]
    assert (response.embedding_dim, response.prompt_tokens) == (2, 3)


async def test_an_embed_without_tokens_names_the_field(embedding: Any) -> None:
    for request, field in ((pb.EmbedRequest(), "tokenized"), (pb.EmbedRequest(tokenized={}), "tokenized.input_ids")):
        error = await failure(embedding.Embed(request))
        assert isinstance(error, InvalidArgument)
        assert error.field == field


async def test_a_model_that_generates_does_not_embed_and_says_so(stub: Any) -> None:
    error = await failure(stub.Embed(pb.EmbedRequest(tokenized={"input_ids": [1]})))
    assert isinstance(error, InvalidArgument)
    assert (error.field, error.reason) == ("model", "WRONG_MODEL_KIND")
    assert error.message == "the model does not support embed; it supports generate"


async def test_abort_ends_an_embed(model: Path) -> None:
    engine = FakeEngine(vocab_size=VOCAB, manual=True)
    engine.ready.capabilities[:] = ["embed"]
    async with engine, FrontendServer(model, engines=[engine.address]) as frontend:
        await frontend.until_health(serving=True)
        stub = VllmClient(frontend).stub
        call = stub.Embed(pb.EmbedRequest(request_id="mine", tokenized={"input_ids": [1]}))
        await engine.until(lambda e: e.running)
        await stub.Abort(pb.AbortRequest(request_ids=["mine"]))
        assert isinstance(await failure(call), Cancelled)
        await engine.until(lambda e: e.aborted)


async def test_health_is_whether_to_send_requests_here(engine: FakeEngine, model: Path) -> None:
    port = engine.port
    await engine.kill()
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        stub = VllmClient(frontend).stub
        response = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (response.healthy, response.message) == (False, "no engine has accepted requests yet")
        await engine.start(port)
        await frontend.until_health(serving=True, service=vllm_engine.SERVICE_NAME)
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        await engine.kill()
        await frontend.until_engines(0)
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_the_models_info_has_its_files_and_the_engines_limits(engine: FakeEngine, tmp_path: Path) -> None:
    own = {"do_sample": True, "temperature": 0.5, "top_k": 5, "eos_token_id": [3, 2], "max_new_tokens": 9}
    folder = save_model(tmp_path / "model", generation_config=own)
    described = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(described))
    async with FrontendServer(folder, engines=[engine.address]) as frontend:
        info = await VllmClient(frontend).stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model_path, info.tokenizer_path, info.served_model_name) == (str(folder), str(folder), "model")
    assert (info.model_type, list(info.architectures)) == ("llama", ["LlamaForCausalLM"])
    assert (list(info.eos_token_ids), info.bos_token_id, info.pad_token_id) == ([2, 3], 1, 0)
    assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (128, 128, VOCAB)
    assert json.loads(info.default_sampling_params_json) == {"temperature": 0.5, "top_k": 5}
    assert info.is_generation
    assert not info.supports_vision


async def test_the_section_of_a_models_text_part_counts(engine: FakeEngine, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "outer", "text_config": {"eos_token_id": 4}}))
    async with FrontendServer(folder, engines=[engine.address]) as frontend:
        info = await VllmClient(frontend).stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model_type, list(info.eos_token_ids)) == ("outer", [4])
    assert info.default_sampling_params_json == ""


async def test_the_models_info_is_unavailable_without_an_engine(model: Path) -> None:
    async with FrontendServer(model, engines=[NOWHERE], engine_wait_timeout=0.0) as frontend:
        error = await failure(VllmClient(frontend).stub.GetModelInfo(pb.GetModelInfoRequest()))
    assert isinstance(error, Unavailable)


async def test_the_servers_info_has_its_requests_and_its_engines(manual: FakeEngine, model: Path) -> None:
    own = {"pause_state": "paused", "block_size": 16, "max_num_seqs": 32, "dtype": "bfloat16"}
    manual.utilities["engine_info"] = own
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        await frontend.until_health(serving=True)
        client = VllmClient(frontend)
        before = await client.stub.GetServerInfo(pb.GetServerInfoRequest())
        call = client.generate(stream=True)
        await manual.until(lambda e: e.running)
        info = await client.stub.GetServerInfo(pb.GetServerInfoRequest())
        call.cancel()
    assert (before.active_requests, before.last_receive_timestamp) == (0, 0)
    assert (info.active_requests, info.is_paused, info.server_type) == (1, True, "vllm-grpc")
    assert (info.data_parallel_size, info.block_size, info.max_num_seqs) == (1, 16, 32)
    assert (info.model_dtype, info.kv_cache_dtype) == ("torch.bfloat16", "auto")
    assert info.last_receive_timestamp > 0
    assert info.uptime_seconds >= before.uptime_seconds


async def test_every_field_of_the_servers_info_is_set_or_explained(engine: FakeEngine, model: Path) -> None:
    engine.utilities["engine_info"] = {
        "pause_state": "paused",
        "block_size": 16,
        "max_num_seqs": 32,
        "dtype": "float32",
    }
    page = (Path(__file__).parents[2] / "docs/guides/gateways.md").read_text()
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        client = VllmClient(frontend)
        await collect(client.generate(stream=True))
        info = await client.stub.GetServerInfo(pb.GetServerInfoRequest())
        loads = await client.stub.GetLoads(pb.GetLoadsRequest())
    unset = {
        field.name
        for message in (info, loads.loads[0])
        for field in message.DESCRIPTOR.fields
        if field.name not in {set_field.name for set_field, _ in message.ListFields()}
    }
    of_an_idle_engine = {
        "active_requests",
        "dp_rank",
        "token_usage",
        "utilization",
        "cache_hit_rate",
        "num_used_tokens",
    }
    of_an_idle_engine |= {"num_running_reqs", "num_waiting_reqs", "num_total_reqs"}
    assert [name for name in sorted(unset - of_an_idle_engine) if f"`{name}`" not in page] == []


async def test_loads_are_told_by_engine(model: Path) -> None:
    engines = [FakeEngine(name, vocab_size=VOCAB, manual=True) for name in "ab"]  # both engines report rank 0
    async with engines[0], engines[1], FrontendServer(model, engines=[e.address for e in engines]) as frontend:
        client = VllmClient(frontend)
        await eventually(lambda: frontend.frontend._models[0].assembly.engines.view.num_engines == 2)
        calls = [client.generate(stream=True, max_tokens=50) for _ in range(2)]
        for engine in engines:  # the router chooses the engine for each call
            await engine.until(lambda e: e.running)
        for engine in engines:
            engine.step()
        for call in calls:
            await anext(aiter(call))
        response = await client.stub.GetLoads(pb.GetLoadsRequest())
        one = await client.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
        for call in calls:
            call.cancel()
    assert response.dp_rank_count == 2
    assert [load.dp_rank for load in response.loads] == [0, 1]
    assert [load.num_total_reqs for load in response.loads] == [1, 1]
    assert {load.max_total_num_tokens for load in response.loads} == {1024 * 16}
    assert {load.max_running_requests for load in response.loads} == {8}
    assert [load.dp_rank for load in one.loads] == [1]


async def test_loads_tell_how_often_the_prefix_cache_had_what_was_looked_up(manual: FakeEngine, model: Path) -> None:
    async with FrontendServer(model, engines=[manual.address]) as frontend:
        await frontend.until_health(serving=True)
        stats = stats_pb2.SchedulerStats(kv_cache_usage=0.25, prefix_cache_queries=40, prefix_cache_hits=10)
        manual.sessions[0].send(outputs=engine_pb.EngineCoreOutputs(scheduler_stats=stats))
        await eventually(lambda: frontend.frontend._models[0].assembly.engines.view.rank_loads()[0].kv_cache_usage)
        [load] = (await VllmClient(frontend).stub.GetLoads(pb.GetLoadsRequest())).loads
    assert (load.cache_hit_rate, load.token_usage, load.utilization) == (0.25, 0.25, 0.25)


async def test_the_tokenizers_files_come_as_an_archive(engine: FakeEngine, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(b"weights")
    # Random bytes, which do not compress.
    (folder / "vocab.json").write_text(json.dumps(hashlib.shake_256(b"").hexdigest(200_000)))
    async with FrontendServer(folder, engines=[engine.address]) as frontend:
        stub = VllmClient(frontend).stub
        chunks = await collect(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
        again = await collect(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert len(chunks) > 1
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    assert again == chunks
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert sorted(archive.namelist()) == ["chat_template.jinja", "tokenizer.json", "vocab.json"]
        assert archive.read("tokenizer.json") == (folder / "tokenizer.json").read_bytes()


async def test_a_model_without_tokenizer_files_is_not_found(tmp_path: Path) -> None:
    bundle = TokenizerBundle(tmp_path)
    for _ in range(2):  # a failure is not cached
        with pytest.raises(NotFound):
            await bundle.get()
    save_model(tmp_path)
    assert (await bundle.get()).data


async def test_flushing_empties_the_prefix_caches_of_all_engines(stub: Any, engine: FakeEngine) -> None:
    response = await stub.FlushCache(common_pb2.FlushCacheRequest())
    assert response.success
    assert engine.utility_calls == [("reset_prefix_cache", [False])]


async def test_a_cache_in_use_is_not_flushed_and_the_engine_is_named(stub: Any, engine: FakeEngine) -> None:
    engine.utilities["reset_prefix_cache"] = False
    response = await stub.FlushCache(common_pb2.FlushCacheRequest())
    assert not response.success
    assert "engine-0" in response.message


async def test_flushing_waits_for_a_cache_that_is_in_use(stub: Any, engine: FakeEngine) -> None:
    engine.utilities["reset_prefix_cache"] = False
    call = stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=20))
    await eventually(lambda: engine.utility_calls)
    engine.utilities["reset_prefix_cache"] = True
    assert (await call).success


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
async def test_a_time_to_wait_must_be_finite_and_not_negative(stub: Any, seconds: float) -> None:
    error = await failure(stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=seconds)))
    assert isinstance(error, InvalidArgument)
    assert error.field == "timeout_s"


async def test_profilers_are_started_and_stopped(stub: Any, engine: FakeEngine) -> None:
    assert (await stub.StartProfile(common_pb2.StartProfileRequest())).success
    response = await stub.StopProfile(common_pb2.StopProfileRequest())
    assert (response.success, response.message) == (True, "trace.json")
    assert [name for name, _ in engine.utility_calls] == ["start_profile", "stop_profile"]


async def test_options_of_a_profile_are_refused_by_name(stub: Any, engine: FakeEngine) -> None:
    error = await failure(stub.StartProfile(common_pb2.StartProfileRequest(num_steps=3)))
    assert isinstance(error, Unimplemented)
    assert error.field == "num_steps"
    assert engine.utility_calls == []


async def test_an_engines_failure_is_the_calls_and_names_the_engine(stub: Any, engine: FakeEngine) -> None:
    engine.utilities["start_profile"] = finish_pb2.RequestError(code="INVALID_ARGUMENT", message="no profiler")
    error = await failure(stub.StartProfile(common_pb2.StartProfileRequest()))
    assert isinstance(error, InvalidArgument)
    assert error.message == "engine engine-0: no profiler"


def test_every_method_of_the_contract_is_there() -> None:
    for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods:
        assert callable(getattr(vllm_engine.VllmEngineServicer, method.name))


async def test_reflection_lists_and_describes_the_service(frontend: FrontendServer) -> None:
    channel: Any = frontend.channel
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    make: Any = reflection_pb2.ServerReflectionRequest
    requests = [make(list_services=""), make(file_containing_symbol=vllm_engine.SERVICE_NAME)]
    listed, described = [m async for m in stub.ServerReflectionInfo(iter(requests))]
    assert vllm_engine.SERVICE_NAME in [service.name for service in listed.list_services_response.service]
    assert described.file_descriptor_response.file_descriptor_proto
