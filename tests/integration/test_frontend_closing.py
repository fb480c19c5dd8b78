"""Calls from clients without retries, which arrive while a frontend closes its port."""

import asyncio
from collections import Counter
from pathlib import Path

import grpc

from penstock.inference.v1 import service_pb2_grpc
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, make_request
from tests.fakes.patience import PATIENCE

NO_RETRIES = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
ROUNDS = 3


async def call(address: str, ended: Counter[str], over: asyncio.Event) -> None:
    """Make calls one after the other, and count their results in ``ended``."""
    async with grpc.aio.insecure_channel(address, options=NO_RETRIES) as channel:
        stub = service_pb2_grpc.InferenceServiceStub(channel)
        while not over.is_set():
            try:
                async for _ in stub.Generate(make_request(max_tokens=3), timeout=PATIENCE):
                    pass
                ended["OK"] += 1
            except grpc.aio.AioRpcError as e:
                ended[e.code().name] += 1
                await asyncio.sleep(0.001)


async def test_no_call_was_cancelled_that_nobody_has_cancelled(model: Path, engine: FakeEngine) -> None:
    ended: Counter[str] = Counter()
    for _ in range(ROUNDS):
        async with FrontendServer(model, engines=[engine.address], drain_timeout=0.05) as frontend:
            await frontend.until_health(serving=True)
            over = asyncio.Event()
            address = f"127.0.0.1:{frontend.frontend.port}"
            calling = [asyncio.create_task(call(address, ended, over)) for _ in range(8)]
            so_far = ended["OK"]
            async with asyncio.timeout(PATIENCE):
                while ended["OK"] < so_far + 20:
                    await asyncio.sleep(0.01)
            frontend.frontend.stop()
            await frontend.running
            over.set()
            await asyncio.gather(*calling)
    assert set(ended) == {"OK", "UNAVAILABLE"}, ended
