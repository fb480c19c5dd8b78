"""After all requests have ended, for any reason, every gauge of every service has its earlier value."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.common.v1 import finish_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import RequestFailed
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, collect, eventually, failure
from tests.fakes.systems.small_system import POISON, VOCAB, Gauges, System, gauges, started


async def outcome(call: Any) -> str:
    """Return the finish reason of a call, or the reason or code of its error."""
    try:
        messages = await collect(call)
    except RequestFailed as e:
        return e.reason or e.code
    return finish_pb2.FinishReason.Name(messages[-1].finish_reason)


async def finished(system: System) -> None:
    assert await outcome(system.generate(n=3)) == "FINISH_REASON_LENGTH"


async def refused_by_the_frontend(system: System) -> None:
    assert (await failure(system.generate(temperature=-1.0))).field == "sampling_params.temperature"


async def refused_by_the_engine(system: System) -> None:
    for n in (1, 3):
        assert (await failure(system.generate(logprobs=1000, n=n))).field == "sampling_params.logprobs"


async def refused_before_it_was_sent(system: System) -> None:
    for connection in system.frontend.frontend._models[0].assembly.engines._pool.connected():
        assert connection.session is not None
        outgoing = connection.session._outgoing
        outgoing._limits = outgoing._limits._replace(max_message_bytes=10)
    assert await outcome(system.generate()) == "MESSAGE_TOO_LARGE"


async def cancelled_before_the_first_token(system: System) -> None:
    with system.held():
        calls = [system.generate(n=2) for _ in range(2)]
        await eventually(lambda: system.busy)
        for call in calls:
            call.cancel()
        await eventually(lambda: system.frontend.frontend._models[0].assembly.llm.num_live == 0)


async def cancelled_after_the_first_token(system: System) -> None:
    call = system.generate(max_tokens=100)
    await call.read()
    call.cancel()


async def late_before_the_first_token(system: System) -> None:
    with system.held():
        assert (await failure(system.generate(n=2, timeout=0.2))).code == "DEADLINE_EXCEEDED"


async def late_after_the_first_token(system: System) -> None:
    with system.held(after=2):
        assert (await failure(system.generate(max_tokens=240, timeout=0.5))).code == "DEADLINE_EXCEEDED"


async def ended_by_a_stop_string(system: System) -> None:
    text = "".join([message.text for message in await collect(system.generate(max_tokens=40, seed=1))])
    assert await outcome(system.generate(max_tokens=40, seed=1, stop=[text[3:5]])) == "FINISH_REASON_STOP"


async def moved(system: System) -> None:
    with system.held():
        calls = [asyncio.ensure_future(outcome(system.generate())) for _ in range(2)]
        await eventually(lambda: system.busy == len(calls))
        system.engines[0].break_sessions()
        await eventually(lambda: len(system.engines[0].io.sessions) == 0)
    assert await asyncio.gather(*calls) == ["FINISH_REASON_LENGTH"] * 2


async def failed_in_a_step(system: System) -> None:
    assert await outcome(system.generate(token_ids=pb.TokenIds(ids=range(POISON)))) == "STEP_FAILED"


async def refused_by_full_engines(system: System) -> None:
    async with system.paused():
        calls = [asyncio.ensure_future(outcome(system.generate())) for _ in range(14)]
        await eventually(lambda: sum(call.done() for call in calls) == 6)
    assert sorted(await asyncio.gather(*calls)) == ["FINISH_REASON_LENGTH"] * 8 + ["QUEUE_FULL"] * 6


async def ended_by_an_operator(system: System) -> None:
    with system.held():
        call = asyncio.ensure_future(outcome(system.generate(max_tokens=240)))
        await eventually(lambda: system.busy)
        engines = system.frontend.frontend._models[0].assembly.engines
        ending = asyncio.ensure_future(engines.call_utility("pause", ["abort", False]))
        await eventually(lambda: any(engine.num_calls for engine in system.engines))
    await ending
    assert await call in ("PAUSED", "FINISH_REASON_ABORT")
    await system.frontend.frontend._models[0].assembly.engines.call_utility("resume")


ENDS: list[Callable[[System], Awaitable[None]]] = [
    finished,
    refused_by_the_frontend,
    refused_by_the_engine,
    refused_before_it_was_sent,
    cancelled_before_the_first_token,
    cancelled_after_the_first_token,
    late_before_the_first_token,
    late_after_the_first_token,
    ended_by_a_stop_string,
    moved,
    failed_in_a_step,
    refused_by_full_engines,
    ended_by_an_operator,
]


async def settled(read: Callable[[], Gauges], before: Gauges) -> None:
    """Wait until the gauges have their earlier values. Raises AssertionError with the differences after a timeout."""
    with contextlib.suppress(TimeoutError):
        await eventually(lambda: read() == before)
    now = read()
    assert {key: (before.get(key), now.get(key)) for key in before.keys() | now.keys()} == {
        key: (value, value) for key, value in before.items()
    }


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_an_idle_system_tells_what_it_told_before(model: Path, end: Callable[[System], Awaitable[None]]) -> None:
    async with started(model) as system:
        await finished(system)
        await eventually(
            lambda: (
                not any(
                    value for (_, name), value in system.gauges.items() if "num_requests" in name or "pool_load" in name
                )
            )
        )
        before = system.gauges
        await end(system)
        await settled(lambda: system.gauges, before)


async def test_inputs_to_pool_that_an_engine_refuses_are_not_waiting_there(model: Path) -> None:
    engine = FakeEngine(vocab_size=VOCAB)
    engine.ready.capabilities[:] = ["embed"]
    engine.refusal = finish_pb2.RequestError(code="INVALID_ARGUMENT", message="no")
    async with engine, FrontendServer(model, engines=[engine.address]) as frontend:
        await frontend.until_health(serving=True)
        registries = [("frontend", frontend.frontend._models[0].assembly.metrics.registry)]
        before = gauges(registries)
        inputs = [pb.PoolingInput(text=text) for text in ("hello", "world")]
        assert (await failure(frontend.stub.Embed(pb.EmbedRequest(inputs=inputs)))).code == "INVALID_ARGUMENT"
        await settled(lambda: gauges(registries), before)
