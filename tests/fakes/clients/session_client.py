"""Frontend's end of a session with an engine, controlled by a test in the test's event loop."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from penstock.common.v1 import events_pb2
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import service_pb2_grpc
from penstock_common.rpc.channel import make_channel
from tests.fakes.patience import PATIENCE

TIMEOUT = PATIENCE


class SessionClient:
    """Client of a session, which reads in the background. A gap or repetition of tokens raises AssertionError in the
    reader.

    ``outputs`` has every output of a request, in order. ``tokens``, ``ends`` and ``events`` have the sums of all
    outputs.
    """

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._call = stub.Session()
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[pb.UtilityOutput]] = {}
        self._changed = asyncio.Condition()
        self._sending = asyncio.Lock()
        self._reader: asyncio.Task[None]
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, pb.EngineCoreOutput] = {}
        self.events: dict[str, list[events_pb2.EngineCoreEvent]] = {}
        self.outputs: dict[str, list[pb.EngineCoreOutput]] = {}
        self.kv_events: list[events_pb2.KvCacheEvent] = []

    async def open(self, frontend_id: str, *, follows_cache: bool = False) -> pb.Ready:
        hello = pb.Hello(protocol_revision=1, frontend_id=frontend_id, follows_cache=follows_cache)
        await self._call.write(pb.SessionRequest(hello=hello))
        ready = (await self._call.read()).ready
        self._reader = asyncio.create_task(self._read())
        return ready

    async def close(self) -> None:
        self._reader.cancel()
        results = await asyncio.gather(self._reader, return_exceptions=True)
        self._call.cancel()
        assert not [r for r in results if isinstance(r, AssertionError)], results

    async def add(self, request_id: str, *, prompt: Any = 5, seed: int = 0, max_tokens: int = 8, **fields: Any) -> None:
        prompt = range(prompt) if isinstance(prompt, int) else prompt
        params = SamplingParams(seed=seed, max_tokens=max_tokens)
        request = pb.EngineCoreRequest(
            request_id=request_id, prompt_token_ids=prompt, **({"sampling_params": params} | fields)
        )
        await self._send(pb.SessionRequest(add=request))

    async def abort(self, *request_ids: str) -> None:
        await self._send(pb.SessionRequest(abort=pb.Abort(request_ids=request_ids)))

    async def utility(self, method: str, *arguments: Any) -> Any:
        """Return the result of a utility call. A failed call raises AssertionError with its code and message."""
        call_id = next(self._ids)
        answer = self._answers[call_id] = asyncio.get_running_loop().create_future()
        call = pb.UtilityCall(call_id=call_id, method=method, arguments=msgspec.msgpack.encode(arguments))
        await self._send(pb.SessionRequest(utility=call))
        output = await asyncio.wait_for(answer, TIMEOUT)
        assert not output.HasField("error"), f"{output.error.code}: {output.error.message}"
        return msgspec.msgpack.decode(output.result)

    async def info(self) -> pb.GetEngineInfoResponse:
        response: pb.GetEngineInfoResponse = await self._stub.GetEngineInfo(pb.GetEngineInfoRequest())
        return response

    async def _send(self, message: pb.SessionRequest) -> None:
        async with self._sending:
            await self._call.write(message)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until the condition is true. It is checked after each received message."""
        async with asyncio.timeout(TIMEOUT), self._changed:
            await self._changed.wait_for(lambda: condition() or self._reader.done())
        if self._reader.done():
            self._reader.result()

    async def until_ended(self, *request_ids: str) -> None:
        await self.until(lambda: set(request_ids) <= set(self.ends))

    async def _read(self) -> None:
        while isinstance(message := await self._call.read(), pb.SessionResponse):
            frame = message.outputs
            for output in frame.outputs:
                self._take(output)
            self.kv_events.extend(frame.kv_events)
            if frame.HasField("utility_output"):
                self._answers.pop(frame.utility_output.call_id).set_result(frame.utility_output)
            async with self._changed:
                self._changed.notify_all()

    def _take(self, output: pb.EngineCoreOutput) -> None:
        so_far = self.tokens.setdefault(output.request_id, [])
        assert output.offset == len(so_far)
        so_far.extend(output.new_token_ids)
        self.outputs.setdefault(output.request_id, []).append(output)
        self.events.setdefault(output.request_id, []).extend(output.events)
        if output.finish_reason:
            assert output.request_id not in self.ends
            self.ends[output.request_id] = output


@contextlib.asynccontextmanager
async def connected(
    address: str, frontend_id: str = "f", *, follows_cache: bool = False
) -> AsyncIterator[SessionClient]:
    """Open a session, and close it at the end of the block."""
    async with make_channel(address) as channel:
        client = SessionClient(service_pb2_grpc.EngineCoreServiceStub(channel))
        await client.open(frontend_id, follows_cache=follows_cache)
        try:
            yield client
        finally:
            await client.close()
