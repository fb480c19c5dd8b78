"""What an engine says of its outputs reaches the frontend, over a real session."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.common.v1 import control_pb2
from penstock_common.config import LogConfig
from penstock_common.types.outputs import EventType
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import CoordinatorClientConfig
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from tests.fakes.cluster_members import Frontend as Watcher
from tests.fakes.cluster_members import address_of, alive, eventually, running
from tests.fakes.engine_harness import make_config
from tests.fakes.engine_server import EngineServer
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.frontend_server import FrontendServer
from tests.fakes.session_pair import paired
from tests.fakes.small_tokenizers import byte_level

VOCAB = byte_level().get_vocab_size()


class NanExecutor(FakeExecutor):
    """Sees two NaN logits whenever it samples a token, but for the first of a request."""

    def _sample(self, step: SchedulerOutput, grammar: GrammarBitmask | None) -> ModelRunnerOutput:
        output = super()._sample(step, grammar)
        later = set(step.cached_requests.request_ids)
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


async def test_nan_logits_of_an_engine_are_counted_and_warned_of_at_the_frontend(
    engine: EngineServer, model: Path
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with FrontendServer(model, engines=[engine.address]) as frontend:
            await frontend.outputs(max_tokens=4, request_id="r1")
            counted = [
                sample.value
                for metric in frontend.frontend._metrics.registry.collect()
                for sample in metric.samples
                if sample.name == "penstock:nan_logits_total"
            ]
    assert counted == [6]
    assert sum("NaN logits" in line["event"] for line in logs) == 1


async def test_a_preemption_is_told_to_the_frontend(engine: EngineServer) -> None:
    async with paired(engine.address) as pair:
        # Until both are there, which together are larger than the cache.
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
