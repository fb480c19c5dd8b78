"""Errors that clients get when every engine's queue is full."""

import asyncio
from pathlib import Path

from penstock_common.errors import ResourceExhausted
from tests.fakes.frontends.frontend_server import collect, eventually, failure
from tests.fakes.systems.small_system import MAX_WAITING, started


async def test_a_client_hears_that_two_engines_are_full_and_when_to_come_again(model: Path) -> None:
    async with started(model) as system:
        async with system.paused():
            calls = [
                asyncio.ensure_future(collect(system.generate())) for _ in range(len(system.engines) * MAX_WAITING)
            ]
            await eventually(lambda: system.waiting == len(calls))
            error = await failure(system.generate())
            assert isinstance(error, ResourceExhausted)
            assert error.reason == "QUEUE_FULL"
            assert error.retry_after is not None
            assert 0.1 <= error.retry_after <= 60.0
            assert system.waiting == len(calls)
        for messages in await asyncio.gather(*calls):
            assert messages[-1].usage.completion_tokens == 8
