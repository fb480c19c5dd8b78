"""The session of a frontend and an engine, over real gRPC. The fake executor returns scripted tokens."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.common.v1 import finish_pb2
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import service_pb2_grpc
from penstock_common.errors import Unavailable
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.handshake import PROTOCOL_REVISION
from penstock_common.rpc.server import LIVENESS
from penstock_common.rpc.status import from_rpc_error
from penstock_enginecore.config import LoraConfig
from penstock_enginecore.lora.core.request import LoadedLora
from penstock_enginecore.rpc.io_thread import SERVICE_NAME
from tests.fakes.engines.engine_harness import make_config
from tests.fakes.engines.engine_server import EngineServer, wait_until
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_tokens
from tests.fakes.engines.fake_grammars import FakeGrammars

VOCAB = 1000


class Client:
    """A session whose messages the test writes itself."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = service_pb2_grpc.EngineCoreServiceStub(channel).Session()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, pb.EngineCoreOutput] = {}
        self.frames = 0

    async def hello(self, frontend_id: str = "f", revision: int = 1) -> pb.Ready:
        await self.call.write(pb.SessionRequest(hello=pb.Hello(protocol_revision=revision, frontend_id=frontend_id)))
        return (await self.read()).ready

    async def read(self) -> pb.SessionResponse:
        message = await self.call.read()
        assert message is not grpc.aio.EOF
        return message

    async def add(self, request_id: str, *, prompt: int = 5, seed: int = 0, max_tokens: int = 8, **fields: Any) -> None:
        params = SamplingParams(seed=seed, max_tokens=max_tokens)
        request = pb.EngineCoreRequest(
            request_id=request_id, prompt_token_ids=range(prompt), **({"sampling_params": params} | fields)
        )
        await self.call.write(pb.SessionRequest(add=request))

    async def until_ended(self, *request_ids: str) -> None:
        """Read frames until these requests have ended. Checks that the offsets have no gaps."""
        while not set(request_ids) <= set(self.ends):
            message = await self.read()
            assert message.WhichOneof("message") == "outputs", message
            self.frames += 1
            for output in message.outputs.outputs:
                so_far = self.tokens.setdefault(output.request_id, [])
                assert output.offset == len(so_far)
                so_far.extend(output.new_token_ids)
                if output.finish_reason:
                    assert output.request_id not in self.ends
                    self.ends[output.request_id] = output

    async def failure(self) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            while await self.call.read() is not grpc.aio.EOF:
                pass
            raise AssertionError("the session ended without an error")
        return error.value


@pytest.fixture
def servers() -> Any:
    """Yield a function that starts engine servers. The fixture stops the servers at the end."""
    made: list[EngineServer] = []

    def make(executor: FakeExecutor | None = None, *, load: bool = True, **config: Any) -> EngineServer:
        server = EngineServer(make_config(**config), executor or FakeExecutor())
        made.append(server.start())
        return server.load() if load else server

    yield make
    for server in made:
        server.stop()


Servers = Callable[..., EngineServer]


def endless() -> FakeExecutor:
    """Return an executor whose requests can run longer than any test."""
    return FakeExecutor(model_max_len=100_000, available_memory=2**30, check_kv=False)


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[EngineServer], Client]]:
    channels: list[grpc.aio.Channel] = []

    def open_session(server: EngineServer) -> Client:
        channels.append(make_channel(server.address))
        return Client(channels[-1])

    yield open_session
    for channel in channels:
        await channel.close()


Connect = Callable[[EngineServer], Client]


async def test_ready_comes_first_and_says_what_the_engine_can_hold(servers: Servers, connect: Connect) -> None:
    ready = await connect(servers(num_blocks=64)).hello()
    assert (ready.model, ready.num_kv_blocks, ready.block_size, ready.vocab_size) == ("fake", 64, 4, VOCAB)
    assert ready.max_model_len > 0
    assert ready.engine_id
    assert ready.incarnation
    assert ready.protocol_revision == 1
    assert "generate" in ready.capabilities
    assert "kv_events" not in ready.capabilities
    assert "followed_cache" in ready.capabilities


async def test_ready_says_what_the_tokens_depend_on_which_limits_do_not_change(
    servers: Servers, connect: Connect
) -> None:
    one = await connect(servers(num_blocks=64, block_size=4)).hello()
    other = await connect(servers(num_blocks=32, block_size=8, max_model_len=40, max_num_seqs=2)).hello()
    assert (
        one.config == other.config == {"dtype": "float32", "task": "generate", "eos_token_ids": "[]", "weights": "fake"}
    )
    assert one.config_hash == other.config_hash != ""


async def test_ready_says_whether_the_engine_tells_what_it_caches(servers: Servers, connect: Connect) -> None:
    ready = await connect(servers(enable_kv_events=True)).hello()
    assert {"followed_cache", "kv_events"} <= set(ready.capabilities)


async def test_outputs_arrive_one_frame_per_step_in_order_and_complete(servers: Servers, connect: Connect) -> None:
    count = 1500  # so long that the requests overlap, even if the last one arrives late
    executor = FakeExecutor(model_max_len=2000, available_memory=2**26, check_kv=False)
    client = connect(servers(executor, num_blocks=4000))
    await client.hello()
    for number in range(6):
        await client.add(f"r{number}", seed=number, max_tokens=count)
    await client.until_ended(*(f"r{n}" for n in range(6)))
    assert client.tokens == {f"r{n}": oracle_tokens(n, count, VOCAB) for n in range(6)}
    assert {end.finish_reason for end in client.ends.values()} == {finish_pb2.FINISH_REASON_LENGTH}
    assert client.frames < 6 * count, "requests share the frames of their steps"


async def test_prior_tokens_count_as_output_and_are_not_sent_again(servers: Servers, connect: Connect) -> None:
    client = connect(servers())
    await client.hello()
    whole = oracle_tokens(7, 10, VOCAB)
    client.tokens["r"] = whole[:4]
    await client.add("r", seed=7, max_tokens=10, attempt=1, prior_output_token_ids=whole[:4])
    await client.until_ended("r")
    assert client.tokens["r"] == whole
    assert client.ends["r"].attempt == 1


async def test_an_abort_ends_only_its_request(servers: Servers, connect: Connect) -> None:
    client = connect(servers(endless(), num_blocks=30_000))
    await client.hello()
    await client.add("long", max_tokens=90_000)
    await client.add("short", seed=1, max_tokens=20)
    await client.call.write(pb.SessionRequest(abort=pb.Abort(request_ids=["long", "never-seen"])))
    await client.until_ended("long", "short")
    assert client.ends["long"].finish_reason == finish_pb2.FINISH_REASON_ABORT
    assert client.tokens["short"] == oracle_tokens(1, 20, VOCAB)


async def test_the_end_of_a_session_ends_its_requests_and_frees_their_blocks(
    servers: Servers, connect: Connect
) -> None:
    server = servers(endless(), num_blocks=30_000, max_num_batched_tokens=64)
    going, staying = connect(server), connect(server)
    await going.hello("going")
    await staying.hello("staying")
    await going.add("endless", max_tokens=90_000)
    wait_until(lambda: server.busy_loop.stats().num_running_reqs == 1)
    going.call.cancel()
    wait_until(lambda: server.busy_loop.stats().num_running_reqs == 0)
    await staying.add("r")
    await staying.until_ended("r")
    wait_until(lambda: not server.engine.has_requests)
    assert server.busy_loop.stats().kv_cache_usage == 0.0
    assert staying.tokens == {"r": oracle_tokens(0, 8, VOCAB)}


async def test_the_same_request_id_in_two_sessions_is_two_requests(servers: Servers, connect: Connect) -> None:
    server = servers()
    one, two = connect(server), connect(server)
    await one.hello("same")
    await two.hello("same")
    await one.add("r", seed=1)
    await two.add("r", seed=2)
    await one.until_ended("r")
    await two.until_ended("r")
    assert one.tokens["r"] == oracle_tokens(1, 8, VOCAB)
    assert two.tokens["r"] == oracle_tokens(2, 8, VOCAB)


async def test_a_request_names_an_adapter_and_is_told_what_is_wrong_with_it(servers: Servers, connect: Connect) -> None:
    executor = FakeExecutor()
    digest = bytes(range(1, 17))
    executor.adapters["/a"] = LoadedLora(digest, 8, ("q_proj", "v_proj"), 2**20)
    executor.adapters["/gone"] = Unavailable("nothing is there", reason="LORA_UNAVAILABLE")
    client = connect(servers(executor, lora=LoraConfig(max_loras=2, max_lora_rank=16, cpu_memory=2**21)))
    ready = await client.hello()
    assert "lora" in ready.capabilities
    assert ready.lora == pb.LoraLimits(max_loras=2, max_lora_rank=16, cpu_memory=2**21)
    first = (await client.read()).outputs.scheduler_stats
    assert (first.lora.max_loras, first.lora.num_cached) == (2, 0)
    await client.call.write(
        pb.SessionRequest(
            utility=pb.UtilityCall(
                call_id=1, method="add_lora", arguments=msgspec.msgpack.encode(["a", "/a", b"", True])
            )
        )
    )
    while not (frame := await client.read()).outputs.HasField("utility_output"):
        pass
    held = msgspec.msgpack.decode(frame.outputs.utility_output.result)
    assert held == {
        "digest": digest,
        "rank": 8,
        "modules": ["q_proj", "v_proj"],
        "num_bytes": 2**20,
        "pinned": True,
    }
    await client.add("known", lora=pb.LoraAdapter(name="a", path="/a", digest=digest), seed=3)
    await client.add("by path", lora=pb.LoraAdapter(name="b", path="/a"), seed=3)
    await client.add("base", seed=3)
    await client.add("gone", lora=pb.LoraAdapter(name="c", path="/gone", digest=digest[::-1]))
    await client.add("other", lora=pb.LoraAdapter(name="a", path="/a", digest=digest[::-1]))
    await client.until_ended("known", "by path", "base", "gone", "other")
    expected = oracle_tokens(3 ^ int.from_bytes(digest[:8], "little"), 8, VOCAB)
    assert client.tokens["known"] == client.tokens["by path"] == expected
    assert client.tokens["base"] == oracle_tokens(3, 8, VOCAB)
    reasons = {name: client.ends[name].error.reason for name in ("gone", "other")}
    assert reasons == {"gone": "LORA_UNAVAILABLE", "other": "LORA_CHANGED"}
    assert client.ends["other"].error.code == "FAILED_PRECONDITION"
    assert client.ends["gone"].error.code == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"prompt": 0}, "INVALID_ARGUMENT", "prompt_token_ids"),
        ({"prompt": 100_000}, "INVALID_ARGUMENT", "prompt_token_ids"),
        ({"sampling_params": None}, "INVALID_ARGUMENT", "sampling_params"),
        ({"sampling_params": SamplingParams(temperature=float("nan"), seed=1)}, "INVALID_ARGUMENT", "temperature"),
        ({"sampling_params": SamplingParams(temperature=1.0)}, "INVALID_ARGUMENT", "seed"),
        ({"sampling_params": SamplingParams(seed=1, stop_token_ids=[VOCAB])}, "INVALID_ARGUMENT", "stop_token_ids"),
        ({"sampling_params": SamplingParams(seed=1, logprobs=21)}, "INVALID_ARGUMENT", "logprobs"),
        ({"data_parallel_rank": 0}, "UNIMPLEMENTED", "data_parallel_rank"),
        ({"kv_transfer_params": "{}"}, "UNIMPLEMENTED", "kv_transfer_params"),
        ({"lora": pb.LoraAdapter(name="x")}, "UNIMPLEMENTED", "lora"),
        ({"mm_features": [pb.MultiModalFeature(modality="image")]}, "UNIMPLEMENTED", "mm_features"),
    ],
)
async def test_a_wrong_request_ends_with_its_fields_name_and_the_session_goes_on(
    servers: Servers, connect: Connect, fields: dict[str, Any], code: str, field: str
) -> None:
    client = connect(servers())
    await client.hello()
    await client.add("bad", **fields)
    await client.add("good")
    await client.until_ended("bad", "good")
    assert client.ends["bad"].finish_reason == finish_pb2.FINISH_REASON_ERROR
    assert client.ends["bad"].error.code == code
    assert field in client.ends["bad"].error.field
    assert field in client.ends["bad"].error.message
    assert client.tokens["good"] == oracle_tokens(0, 8, VOCAB)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.SessionRequest(abort=pb.Abort(request_ids=["x"])), "hello"),
        (pb.SessionRequest(hello=pb.Hello(frontend_id="f")), "hello.protocol_revision"),
        (pb.SessionRequest(hello=pb.Hello(protocol_revision=1)), "hello.frontend_id"),
        (pb.SessionRequest(), "hello"),
    ],
)
async def test_a_session_that_does_not_begin_with_hello_is_refused(
    servers: Servers, connect: Connect, message: pb.SessionRequest, field: str
) -> None:
    client = connect(servers())
    await client.call.write(message)
    failed = from_rpc_error(await client.failure())
    assert (failed.code, failed.field) == ("INVALID_ARGUMENT", field)


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        (pb.SessionRequest(), "INVALID_ARGUMENT", "message"),
        (pb.SessionRequest(hello=pb.Hello(protocol_revision=1, frontend_id="f")), "INVALID_ARGUMENT", "hello"),
    ],
)
async def test_a_message_out_of_place_ends_the_session_with_its_name(
    servers: Servers, connect: Connect, message: pb.SessionRequest, code: str, field: str
) -> None:
    server = servers()
    client, neighbour = connect(server), connect(server)
    await client.hello()
    await neighbour.hello()
    await client.call.write(message)
    failed = from_rpc_error(await client.failure())
    assert (failed.code, failed.field) == (code, field)
    await neighbour.add("r")
    await neighbour.until_ended("r")
    assert neighbour.tokens["r"] == oracle_tokens(0, 8, VOCAB)


async def test_a_newer_frontend_speaks_the_engines_revision(servers: Servers, connect: Connect) -> None:
    assert (await connect(servers()).hello(revision=99)).protocol_revision == PROTOCOL_REVISION


async def test_sessions_are_refused_while_the_model_loads(servers: Servers, connect: Connect) -> None:
    server = servers(load=False)
    client = connect(server)
    failed = from_rpc_error(await client.failure())
    assert (failed.code, failed.reason) == ("UNAVAILABLE", "ENGINE_LOADING")
    server.load()
    assert (await connect(server).hello()).model == "fake"


async def test_a_fatal_error_is_the_last_word_of_the_engine(servers: Servers, connect: Connect) -> None:
    server = servers(FakeExecutor(fail_at_step=3))
    client = connect(server)
    await client.hello()
    await client.add("r", max_tokens=50)
    last = None
    while (message := await client.call.read()) is not grpc.aio.EOF:
        last = message
    assert last is not None
    assert last.WhichOneof("message") == "engine_dead"
    assert "RuntimeError" in last.engine_dead.reason
    assert from_rpc_error(await connect(server).failure()).reason == "ENGINE_DEAD"
    server.thread.join(10)
    assert server.failure is not None


@pytest.mark.parametrize("hours", [-1, 1])
async def test_what_is_left_of_a_requests_time_counts_whatever_the_clocks_say(
    servers: Servers, connect: Connect, hours: int
) -> None:
    """Uses a frontend whose clock differs from the engine's clock by an hour or more."""
    client = connect(servers())
    await client.hello()
    now = time.time() + 3600 * hours
    await client.add("in time", deadline=now + 60, time_left=60)
    await client.add("late", deadline=now - 1, time_left=-1)
    await client.until_ended("in time", "late")
    assert client.ends["in time"].finish_reason == finish_pb2.FINISH_REASON_LENGTH
    assert client.ends["late"].error.code == "DEADLINE_EXCEEDED"


async def test_the_deadline_of_an_older_frontend_counts_where_it_does_not_say_what_is_left(
    servers: Servers, connect: Connect
) -> None:
    client = connect(servers())
    await client.hello()
    await client.add("late", deadline=1.0)
    await client.until_ended("late")
    assert client.ends["late"].error.code == "DEADLINE_EXCEEDED"


async def test_a_time_that_is_none_is_refused(servers: Servers, connect: Connect) -> None:
    client = connect(servers())
    await client.hello()
    await client.add("a", time_left=math.nan)
    await client.until_ended("a")
    assert (client.ends["a"].error.code, client.ends["a"].error.field) == ("INVALID_ARGUMENT", "time_left")


async def test_a_stopping_engine_finishes_what_it_has_and_refuses_what_is_new(
    servers: Servers, connect: Connect
) -> None:
    server = servers(max_model_len=200)
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    client = connect(server)
    await client.hello()

    def hold_first_step() -> None:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(20)

    server.executor.on_execute = hold_first_step  # type: ignore[attr-defined]
    await client.add("old", max_tokens=50)
    await asyncio.to_thread(wait_until, lambda: server.engine.has_requests)
    server.busy_loop.request_shutdown()
    await client.add("new")
    gate.set()
    draining = 0
    while not {"old", "new"} <= set(client.ends):
        message = await client.read()
        if message.WhichOneof("message") == "draining":
            draining += 1
            assert message.draining.deadline > 0
            assert 0 < message.draining.time_left <= server.config.drain_timeout
            continue
        for output in message.outputs.outputs:
            client.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason:
                client.ends[output.request_id] = output
    assert draining == 1
    assert client.tokens["old"] == oracle_tokens(0, 50, VOCAB)
    assert client.ends["new"].error.reason == "DRAINING"


async def test_a_registered_method_can_be_called_and_others_can_not(servers: Servers, connect: Connect) -> None:
    client = connect(servers())
    await client.hello()
    calls = [
        pb.UtilityCall(call_id=1, method="reset_prefix_cache", arguments=msgspec.msgpack.encode([])),
        pb.UtilityCall(call_id=2, method="reset_prefix_cach", arguments=msgspec.msgpack.encode([])),
        pb.UtilityCall(call_id=3, method="reset_prefix_cache", arguments=msgspec.msgpack.encode([1])),
        pb.UtilityCall(call_id=4, method="reset_prefix_cache", arguments=b"\xc1"),
        pb.UtilityCall(call_id=5, method="shutdown", arguments=msgspec.msgpack.encode([])),
    ]
    answers: dict[int, pb.UtilityOutput] = {}
    for call in calls:
        await client.call.write(pb.SessionRequest(utility=call))
    while len(answers) < len(calls):
        answer = (await client.read()).outputs.utility_output
        answers[answer.call_id] = answer
    assert msgspec.msgpack.decode(answers[1].result) is True
    assert "did you mean 'reset_prefix_cache'" in answers[2].error.message
    assert {answers[n].WhichOneof("outcome") for n in (2, 3, 4, 5)} == {"error"}


async def test_an_engine_is_ready_only_once_it_can_serve_constraints(servers: Servers) -> None:
    server = servers(load=False)
    grammars = FakeGrammars()
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    grammars.warming = lambda: loop.call_soon_threadsafe(asked.set)
    server.make_grammars = lambda *_args, **_kwargs: grammars
    async with make_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        loading = asyncio.create_task(asyncio.to_thread(server.load))
        await asked.wait()
        assert (
            await health.Check(health_pb2.HealthCheckRequest())
        ).status == health_pb2.HealthCheckResponse.NOT_SERVING
        grammars.warm.set_result(None)
        await loading
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


async def test_engine_info_and_health_follow_the_engines_state(servers: Servers) -> None:
    server = servers(load=False)
    async with make_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def status(name: str) -> int:
            return (await health.Check(health_pb2.HealthCheckRequest(service=name))).status

        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert [await status(n) for n in ("", SERVICE_NAME, LIVENESS)] == [not_serving, not_serving, serving]
        server.load()
        assert [await status(n) for n in ("", SERVICE_NAME, LIVENESS)] == [serving, serving, serving]
        info = await service_pb2_grpc.EngineCoreServiceStub(channel).GetEngineInfo(pb.GetEngineInfoRequest())
        assert info.ready.model == "fake"
        assert info.scheduler_stats.num_running_reqs == 0
