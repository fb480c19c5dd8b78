"""Large messages of all calls at once are bounded, and counted for as long as a call has them."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from penstock_common.config.sections import ServerConfig
from penstock_common.in_flight import SMALL, BytesInFlight
from penstock_common.rpc.server import RpcServer
from penstock_common.rpc.status import from_rpc_error

LIMIT = 4 * SMALL
LARGE = bytes(3 * SMALL)


class Service:
    """Methods that wait, once they have their message, until ``go_on`` is set."""

    def __init__(self) -> None:
        self.begun = asyncio.Semaphore(0)
        self.go_on = asyncio.Event()

    async def single(self, request: bytes, _: Any) -> bytes:
        self.begun.release()
        await self.go_on.wait()
        return b"%d" % len(request)

    async def stream(self, request: bytes, _: Any) -> AsyncIterator[bytes]:
        self.begun.release()
        await self.go_on.wait()
        yield b"%d" % len(request)

    async def both(self, requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield b"%d" % len(request)


class Served:
    """``async with Served() as served``: a real server around Service."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.in_flight = BytesInFlight(lambda: limit, "limits.of_this")
        self.service = Service()

    async def __aenter__(self) -> "Served":
        self._server = RpcServer(ServerConfig(host="127.0.0.1"), service_names=["t"], in_flight=self.in_flight)
        codecs = {"request_deserializer": bytes, "response_serializer": bytes}
        methods = {
            "Single": grpc.unary_unary_rpc_method_handler(self.service.single, **codecs),
            "Stream": grpc.unary_stream_rpc_method_handler(self.service.stream, **codecs),
            "Both": grpc.stream_stream_rpc_method_handler(self.service.both, **codecs),
        }
        self._server.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t", methods)])
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{await self._server.start()}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self._server.stop(0)

    async def empty(self) -> None:
        """Wait until nothing is counted any more."""
        while self.in_flight.num_bytes:
            gc.collect()
            await asyncio.sleep(0.01)


def run(work: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await work()

    return asyncio.run(bounded())


@pytest.mark.parametrize("method", ["Single", "Stream"])
def test_calls_beyond_the_limit_are_refused_until_others_end(method: str) -> None:
    async def work() -> None:
        async with Served() as served:

            async def call(data: bytes) -> bytes:
                if method == "Single":
                    return await served.channel.unary_unary("/t/Single")(data)
                return b"".join([each async for each in served.channel.unary_stream("/t/Stream")(data)])

            first = asyncio.create_task(call(LARGE))
            await served.service.begun.acquire()
            assert served.in_flight.num_bytes == len(LARGE)
            small = asyncio.create_task(call(b"small"))
            await served.service.begun.acquire()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(LARGE)
            error = from_rpc_error(refused.value)
            assert (error.code, error.reason, error.retry_after) == ("RESOURCE_EXHAUSTED", "MESSAGES_IN_FLIGHT", 1.0)
            assert error.message == f"messages of {2 * len(LARGE)} bytes would be in memory; limits.of_this is {LIMIT}"
            served.service.go_on.set()
            assert (await first, await small) == (b"%d" % len(LARGE), b"5")
            await served.empty()
            assert await call(LARGE) == b"%d" % len(LARGE)

    run(work)


def test_calls_that_were_given_up_are_counted_no_more() -> None:
    async def work() -> None:
        async with Served() as served:
            for method in ("unary_unary", "unary_stream"):
                name = "Single" if method == "unary_unary" else "Stream"
                call = getattr(served.channel, method)(f"/t/{name}")(LARGE)
                await served.service.begun.acquire()
                call.cancel()
                await served.empty()

    run(work)


def test_a_stream_has_the_last_of_its_messages() -> None:
    async def work() -> None:
        async with Served() as served:
            call = served.channel.stream_stream("/t/Both")()
            for _ in range(5):
                await call.write(LARGE)
                assert await call.read() == b"%d" % len(LARGE)
                assert served.in_flight.num_bytes in (0, len(LARGE))
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            await served.empty()

    run(work)


def test_any_one_message_is_taken_when_there_is_no_other() -> None:
    async def work() -> None:
        async with Served(limit=1) as served:
            served.service.go_on.set()
            assert await served.channel.unary_unary("/t/Single")(LARGE) == b"%d" % len(LARGE)

    run(work)
