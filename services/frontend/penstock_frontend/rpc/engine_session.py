"""The stream between this frontend and one engine."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import msgspec

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import service_pb2_grpc
from penstock_common.errors import Unavailable
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.credentials import NO_TLS, ClientCredentials
from penstock_common.rpc.status import from_rpc_error
from penstock_common.types.outputs import EngineCoreOutputs, EngineReady, UtilityOutput
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.rpc import convert

PROTOCOL_REVISION = 1
_HANDSHAKE_TIMEOUT = 10.0


class EngineSession:
    """One ``EngineCoreService.Session``: hello up, ready down; then requests, aborts and utility calls up, one frame of
    outputs per step down. The engine says ``draining`` when it takes no new requests and ``engine_dead`` when it failed;
    a broken stream means the same.

    Lifecycle: ``open``, ``run`` until the stream ends, ``close``. Sending never blocks: a queue feeds the stream, and what
    is sent after the end goes nowhere. All callbacks run on the event loop.
    """

    def __init__(
        self,
        address: str,
        *,
        frontend_id: str,
        incarnation: str,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_draining: Callable[[], None],
        credentials: ClientCredentials = NO_TLS,
    ) -> None:
        self.address = address
        hello = pb.Hello(protocol_revision=PROTOCOL_REVISION, frontend_id=frontend_id, incarnation=incarnation)
        self._on_outputs = on_outputs
        self._on_draining = on_draining
        self._channel = make_channel(address, credentials=credentials)
        self._to_send: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._to_send.put_nowait(pb.SessionRequest(hello=hello))
        self._stub: service_pb2_grpc.EngineCoreServiceAsyncStub = service_pb2_grpc.EngineCoreServiceStub(self._channel)
        self._call = self._stub.Session(self._requests())
        self._responses = aiter(self._call)
        self._call_ids = itertools.count(1)
        self._utility_calls: dict[int, asyncio.Future[Any]] = {}

    async def open(self) -> EngineReady:
        """Wait for the engine to greet back. Raises Unavailable when it cannot be reached or speaks another revision."""
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT):
                first = await anext(self._responses, None)
        except TimeoutError:
            raise Unavailable(f"engine at {self.address} did not answer within {_HANDSHAKE_TIMEOUT:g} s") from None
        except grpc.aio.AioRpcError as e:
            raise Unavailable(f"engine at {self.address}: {from_rpc_error(e).message}") from None
        if first is None or not first.HasField("ready"):
            raise Unavailable(f"engine at {self.address} did not begin with ready")
        if first.ready.protocol_revision != PROTOCOL_REVISION:
            raise Unavailable(
                f"engine at {self.address} speaks revision {first.ready.protocol_revision} of the session protocol; "
                f"this frontend speaks {PROTOCOL_REVISION}"
            )
        return convert.engine_ready(first.ready)

    async def run(self) -> str:
        """Hand on what the engine says until it says no more. Returns why the stream ended."""
        try:
            async for response in self._responses:
                kind = response.WhichOneof("message")
                if kind == "outputs":
                    self._take(convert.engine_core_outputs(response.outputs))
                elif kind == "draining":
                    self._on_draining()
                elif kind == "engine_dead":
                    return f"the engine failed: {response.engine_dead.reason}"
        except grpc.aio.AioRpcError as e:
            return f"the connection broke: {e.details() or e.code().name}"
        return "the engine closed the session"

    def add(self, request: EngineCoreRequest) -> None:
        """Start a request."""
        self._to_send.put_nowait(convert.add_request(request))

    def abort(self, request_ids: Sequence[str], reason: str) -> None:
        """End requests."""
        self._to_send.put_nowait(pb.SessionRequest(abort=pb.Abort(request_ids=request_ids, reason=reason)))

    async def call_utility(self, method: str, arguments: Sequence[object] = ()) -> Any:
        """Call a registered method of the engine; returns its result. Raises what it failed with."""
        call_id = next(self._call_ids)
        self._utility_calls[call_id] = asyncio.get_running_loop().create_future()
        call = pb.UtilityCall(call_id=call_id, method=method, arguments=msgspec.msgpack.encode(list(arguments)))
        self._to_send.put_nowait(pb.SessionRequest(utility=call))
        try:
            return await self._utility_calls[call_id]
        finally:
            del self._utility_calls[call_id]

    async def step_age(self, within: float) -> float | None:
        """Seconds since the engine's last step, 0 while it is idle; None when it does not say so ``within`` seconds."""
        try:
            info = await self._stub.GetEngineInfo(pb.GetEngineInfoRequest(), timeout=within)
        except grpc.aio.AioRpcError:
            return None
        return info.scheduler_stats.seconds_since_last_step

    async def close(self, reason: str = "the session was closed") -> None:
        """End the stream and the connection. Utility calls under way fail. Idempotent."""
        for future in self._utility_calls.values():
            if not future.done():
                future.set_exception(Unavailable(f"engine at {self.address}: {reason}", reason="ENGINE_GONE"))
        self._call.cancel()
        self._to_send.put_nowait(
            None
        )  # or the task that feeds the stream would wait until it is collected, and complain
        # gRPC ends that task only with a call that still runs: where none could begin, it would wait for ever.
        feeding: asyncio.Task[None] | None = self._call._async_request_poller  # type: ignore[attr-defined]
        if feeding is not None:
            feeding.cancel()
        await self._channel.close()

    async def _requests(self) -> AsyncIterator[pb.SessionRequest]:
        while (request := await self._to_send.get()) is not None:
            if request.HasField("add") and request.add.HasField("deadline"):
                request.add.time_left = request.add.deadline - time.time()  # the engine's clock may be another
            yield request

    def _take(self, outputs: EngineCoreOutputs) -> None:
        if outputs.utility_output is not None:
            self._answer(outputs.utility_output)
        self._on_outputs(outputs)

    def _answer(self, output: UtilityOutput) -> None:
        future = self._utility_calls.get(output.call_id)
        if future is None or future.done():
            return  # the caller gave up
        if output.error is not None:
            future.set_exception(output.error.to_exception())
            return
        try:
            future.set_result(msgspec.msgpack.decode(output.result) if output.result else None)
        except Exception as e:
            future.set_exception(convert.unreadable(e, f"utility call {output.call_id}"))
