"""An engine's outputs reach the frontend over a real session."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.common.v1 import control_pb2, sampling_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import service_pb2_grpc
from penstock_common.config.sections import LogConfig
from penstock_common.errors import Internal
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.handshake import PROTOCOL_REVISION
from penstock_common.tensors.chunks import Limits
from penstock_common.types.outputs import EngineCoreOutputs, EventType, TokenColumns
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import CoordinatorClientConfig
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.rpc.frontend_sessions import FrontendSession, Sessions
from tests.fakes.clients.session_pair import paired
from tests.fakes.engines.engine_harness import make_config
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.engines.fake_engine import FakeEngine, token_at
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_tokens
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.systems.cluster_members import Frontend as Watcher
from tests.fakes.systems.cluster_members import address_of, alive, eventually, running

VOCAB = byte_level().get_vocab_size()


class NanExecutor(FakeExecutor):
    """Executor that reports two NaN logits per sampled token once ``sees_nan`` is set, except for first tokens."""

    sees_nan = False

    def _sample(self, step: SchedulerOutput, grammar: GrammarBitmask | None) -> ModelRunnerOutput:
        output = super()._sample(step, grammar)
        later = set(step.cached_requests.request_ids)
        if self.sees_nan:
            output.num_nans_in_logits = {key: 2 for key in output.request_ids if key in later}
        return output


@pytest.fixture
def engine() -> Iterator[EngineServer]:
    server = EngineServer(_config(), NanExecutor(vocab_size=VOCAB)).start().load()
    yield server
    server.stop()


def _config(**changes: Any) -> Any:
    config = make_config()
    model = msgspec.structs.replace(config.model, served_model_name="model")
    return msgspec.structs.replace(config, model=model, **changes)


def _asked(request_id: str, max_tokens: int = 4) -> EngineCoreRequest:
    params = SamplingParams(seed=3, max_tokens=max_tokens)
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=[1, 2, 3], sampling_params=params)


async def test_nan_logits_end_their_call_with_an_incident(engine: EngineServer, model: Path) -> None:
    engine.executor.sees_nan = True  # type: ignore[attr-defined]
    async with FrontendServer(model, engines=[engine.address]) as frontend:
        await frontend.until_health(serving=True)
        with pytest.raises(Internal, match="whose logits are NaN or infinite, failed unexpectedly; .* incident"):
            await frontend.outputs(max_tokens=4, request_id="r1")


async def test_a_preemption_is_told_to_the_frontend(engine: EngineServer) -> None:
    async with paired(engine.address) as pair:
        # Resumes after both requests have arrived. Together, they are larger than the cache.
        await pair.session.call_utility("pause", ["keep"])
        pair.session.add(_asked("a", max_tokens=200))
        pair.session.add(_asked("b", max_tokens=200))
        await pair.session.call_utility("resume")
        await pair.until_ended("a", "b")
    kinds = [[event.type for output in pair.outputs[name] for event in output.events] for name in "ab"]
    first, *later = zip(*[iter(max(kinds, key=len))] * 2, strict=True)
    assert first == (EventType.QUEUED, EventType.SCHEDULED)
    assert later
    assert set(later) == {(EventType.PREEMPTED, EventType.SCHEDULED)}


async def test_the_line_of_a_preempted_request_counts_its_preemptions(engine: EngineServer, model: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with FrontendServer(model, engines=[engine.address], log=LogConfig(requests=True)) as frontend:
            await frontend.until_health(serving=True)
            await frontend.admin.Pause(admin_pb.PauseRequest(mode=control_pb2.PAUSE_MODE_KEEP))
            call = asyncio.create_task(frontend.outputs(n=2, max_tokens=200))
            await eventually(lambda: engine.busy_loop.stats().num_waiting_reqs == 2)
            await frontend.admin.Resume(admin_pb.ResumeRequest())
            await call
    [line] = [line for line in logs if line["event"] == "request finished"]
    assert line["preemptions"] >= 1


async def test_frames_name_the_index_that_the_coordinator_gave_the_engine() -> None:
    async with running() as coordinator:
        watcher = Watcher(address_of(coordinator))
        config = CoordinatorClientConfig(address=address_of(coordinator), stats_interval=0.02)
        servers = [
            EngineServer(_config(coordinator=config, engine_id=name), FakeExecutor(vocab_size=VOCAB)) for name in "ab"
        ]
        try:
            async with alive(watcher):
                servers[0].start().load()
                await watcher.engines("a")
                servers[1].start().load()
                await watcher.engines("a", "b")
                for index, server in enumerate(servers):
                    await eventually(lambda server=server, index=index: server.io.sessions.engine_index == index)
                    async with paired(server.address) as pair:
                        pair.session.add(_asked("r"))
                        await pair.until_ended("r")
                        assert {frame.engine_index for frame in pair.frames} == {index}
        finally:
            for server in servers:
                server.stop()


async def test_new_tokens_of_numbered_requests_come_in_columns(engine: EngineServer) -> None:
    async with paired(engine.address) as pair:
        for name in ("a", "b"):
            pair.add(_asked(name, max_tokens=30))
        await pair.until_ended("a", "b")
    whole = [output for frame in pair.frames for output in frame.outputs]
    rows = sum(len(frame.tokens) for frame in pair.frames if frame.tokens is not None)
    assert [pair.tokens(name) for name in "ab"] == [oracle_tokens(3, 30, VOCAB)] * 2
    assert [[output.offset for output in pair.outputs[name]] for name in "ab"] == [list(range(30))] * 2
    assert (len(whole), rows) == (4, 56)  # the first and the last message of each request are outputs


async def test_a_frontend_of_the_first_revision_gets_every_output_as_a_message(engine: EngineServer) -> None:
    async with make_channel(engine.address) as channel:
        call = service_pb2_grpc.EngineCoreServiceStub(channel).Session()
        await call.write(pb.SessionRequest(hello=pb.Hello(protocol_revision=1, frontend_id="old")))
        assert (await call.read()).ready.protocol_revision == 1
        params = sampling_pb2.SamplingParams(seed=3, max_tokens=30)
        request = pb.EngineCoreRequest(request_id="r", prompt_token_ids=[1, 2], sampling_params=params)
        await call.write(pb.SessionRequest(add=request))
        tokens: list[int] = []
        while len(tokens) < 30:
            message = await call.read()
            assert message.WhichOneof("message") == "outputs"
            assert not message.outputs.HasField("token_columns")
            tokens += [token for output in message.outputs.outputs for token in output.new_token_ids]
        call.cancel()
    assert tokens == oracle_tokens(3, 30, VOCAB)


async def test_an_engine_of_the_first_revision_gets_no_numbers_and_is_understood(model: Path) -> None:
    async with (
        FakeEngine(vocab_size=VOCAB, protocol_revision=1) as old,
        FrontendServer(model, engines=[old.address]) as frontend,
    ):
        outputs = await frontend.outputs(seed=7, max_tokens=20)
    assert [message.request_number for message in old.requests] == [0]
    assert [token for o in outputs for token in o.token_ids] == [token_at(7, i, vocab_size=VOCAB) for i in range(20)]


async def test_inconsistent_columns_end_the_session_and_move_its_requests(model: Path) -> None:
    async with (
        FakeEngine("a", vocab_size=VOCAB, manual=True) as a,
        FakeEngine("b", vocab_size=VOCAB, manual=True) as b,
        FrontendServer(model, engines=[a.address, b.address]) as frontend,
    ):
        call = asyncio.create_task(frontend.outputs(seed=7, max_tokens=3))
        await eventually(lambda: a.running or b.running)
        broken, other = (a, b) if a.running else (b, a)
        columns = pb.TokenColumns(request_numbers=bytes(4), offsets=bytes(8), token_ids=bytes(4))
        broken.sessions[0].send(outputs=pb.EngineCoreOutputs(token_columns=columns))
        await other.until(lambda e: e.running)
        for _ in range(3):
            other.step()
        outputs = await call
    assert [token for o in outputs for token in o.token_ids] == [token_at(7, i, vocab_size=VOCAB) for i in range(3)]


async def test_frames_that_wait_for_the_stream_go_in_one_message_and_in_order() -> None:
    session = FrontendSession("f", Limits(64 * 1024, 0), PROTOCOL_REVISION)
    for step in range(5):
        session.put_outputs(EngineCoreOutputs(timestamp=float(step)))
    session.put(pb.SessionResponse(draining=pb.Draining()))
    session.put_outputs(EngineCoreOutputs(timestamp=5.0))
    batch, draining, alone = await _next(session, 3)
    assert [frame.timestamp for frame in batch.frames.frames] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert draining.HasField("draining")
    assert alone.outputs.timestamp == 5.0


async def test_frames_that_wait_are_messages_of_their_own_for_the_first_revision() -> None:
    session = FrontendSession("f", Limits(64 * 1024, 0), 1)
    for step in range(3):
        session.put_outputs(EngineCoreOutputs(timestamp=float(step)))
    assert [message.outputs.timestamp for message in await _next(session, 3)] == [0.0, 1.0, 2.0]


async def test_a_message_of_several_frames_is_not_larger_than_the_frontend_takes() -> None:
    limit = 8 * 1024
    session = FrontendSession("f", Limits(limit, 0), PROTOCOL_REVISION)
    for step in range(100):
        columns = TokenColumns()
        for number in range(1, 60):
            columns.add(number, step, [2**31])
        session.put_outputs(EngineCoreOutputs(tokens=columns, timestamp=float(step)))
    session.close()
    messages = [message async for message in _messages(session)]
    frames = [frame for m in messages for frame in (m.frames.frames or [m.outputs])]
    assert max(message.ByteSize() for message in messages) <= limit
    assert len(messages) < 50
    assert [frame.timestamp for frame in frames] == list(range(100))


class _FailsOnce:
    """Tracer that raises on its first call."""

    failed = False

    def take(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        if not self.failed:
            self.failed = True
            raise ValueError("a defect")


async def test_what_cannot_be_handed_over_holds_up_nothing_behind_it() -> None:
    traces: Any = _FailsOnce()
    sessions = Sessions(asyncio.get_running_loop(), on_draining=lambda _: None, traces=traces)
    session = sessions.open(pb.Hello(frontend_id="f"), PROTOCOL_REVISION)
    for step in range(3):
        sessions.emit(session.client_id, EngineCoreOutputs(timestamp=float(step)))
    sessions.engine_dead("it is over")
    frames, dead = await _next(session, 2)
    assert [frame.timestamp for frame in frames.frames.frames] == [1.0, 2.0]
    assert dead.engine_dead.reason == "it is over"


async def test_what_threads_emit_comes_whole_and_in_order() -> None:
    sessions = Sessions(asyncio.get_running_loop(), on_draining=lambda _: None)
    session = sessions.open(pb.Hello(frontend_id="f"), PROTOCOL_REVISION)
    emitted = range(2000)

    def emit() -> None:
        for step in emitted:
            sessions.emit(session.client_id, EngineCoreOutputs(timestamp=float(step)))

    emitting = asyncio.create_task(asyncio.to_thread(emit))
    times: list[float] = []
    async with asyncio.timeout(60):
        while len(times) < len(emitted):
            message = await session.next()
            assert message is not None
            times += [frame.timestamp for frame in (message.frames.frames or [message.outputs])]
    await emitting
    assert times == [float(step) for step in emitted]


async def _next(session: FrontendSession, count: int) -> list[pb.SessionResponse]:
    """Return the next ``count`` messages."""
    messages = _messages(session)
    return [await anext(messages) for _ in range(count)]


async def _messages(session: FrontendSession) -> AsyncIterator[pb.SessionResponse]:
    while (message := await session.next()) is not None:
        yield message
