"""An engine without a model: a real ``penstock.enginecore.v1`` server whose output is known in advance.

The token at output index i of a request with seed s is ``token_at(s, i)``, or the token that ``script`` gives for the
request. A step gives every running request ``tokens_per_step`` tokens. Steps run as fast as the loop allows. If
``manual`` is set, each call of ``step`` runs one step.

The log-probability of a token is ``logprob_of(token)``, so the likeliest tokens are 0, 1, ... A position lists the
chosen token, and as many of the likeliest tokens as the request asks for.

With media (``serve_media``), ``media_seed`` is added to the seed when a request arrives. It differs for each list of
features and their bytes.

An engine with ``give_blocks`` hands requests over, after the number of tokens that they ask for or when a session asks
for it. It names a lease but keeps no blocks. ``sources`` lists the KV sources that requests came with.

A request ends with LENGTH at ``max_tokens`` (default ``DEFAULT_MAX_TOKENS``, never more than ``max_model_len``). From
``min_tokens`` on, it ends with STOP at a token of ``stop_token_ids``, or at ``eos_token_id`` if a script produces it.
Prior output counts as output.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import msgspec

from penstock.common.v1 import finish_pb2, kv_pb2, logprobs_pb2, stats_pb2, tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import service_pb2_grpc
from penstock_common.config.sections import ServerConfig, TlsConfig
from penstock_common.errors import RequestFailed, Unimplemented
from penstock_common.rpc.handshake import COLUMNS_SINCE, PROTOCOL_REVISION
from penstock_common.rpc.outputs import fill_columns, take_chunk
from penstock_common.rpc.server import RpcServer
from penstock_common.tensors.chunks import MAX_TENSOR_BYTES, IncomingTensors
from penstock_common.tensors.shared_memory import SegmentReader, shared_memory_id
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.outputs import TokenColumns
from penstock_enginecore.media.core.receiver_cache import ReceiverCache
from penstock_enginecore.rpc.request_tensors import FeatureReader
from tests.fakes.patience import PATIENCE

DEFAULT_MAX_TOKENS = 16
PLAIN = {"request_id", "attempt", "offset", "new_token_ids"}
FLUSH_SECONDS = 1.0
MAX_MEDIA_SEED = 900_000
UTILITIES: dict[str, Any] = {
    "pause": None,
    "resume": None,
    "sleep": None,
    "wake_up": None,
    "is_sleeping": False,
    "reset_prefix_cache": True,
    "reset_mm_cache": None,
    "reset_encoder_cache": None,
    "start_profile": None,
    "stop_profile": ["trace.json"],
    "engine_info": {"state": "serving", "num_kv_blocks": 1024},
    "collective_rpc": ["of worker 0"],
    "drain": 0,
}

Context = grpc.aio.ServicerContext[Any, Any]
Script = Callable[[pb.EngineCoreRequest], Sequence[int] | None]


def token_at(seed: int, index: int, *, vocab_size: int = 256) -> int:
    """Return the token at an output index: the first 8 bytes of SHA-256 of ``"seed:index"``, modulo the vocabulary
    size.
    """
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % vocab_size


def media_seed(features: Sequence[MultiModalFeature]) -> int:
    """Return the number that is added to a request's seed, at most MAX_MEDIA_SEED. It depends on each byte and
    position; 0 without features.
    """
    if not features:
        return 0
    digest = hashlib.sha256()
    for feature in features:
        digest.update(f"{feature.modality} {feature.identifier} {feature.offset} {feature.length}".encode())
        for name, tensor in sorted(feature.data.items()):
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            digest.update(tensor.data)
    return 1 + int.from_bytes(digest.digest()[:8], "big") % MAX_MEDIA_SEED


def logprob_of(token: int) -> float:
    """Return the log-probability of a token, the same at all positions. The token's rank is token + 1."""
    return -token / 1024  # exact as float32


def logprobs_of(tokens: Sequence[int], count: int, listed: Sequence[int] = ()) -> logprobs_pb2.Logprobs:
    """Return one position per token, with the token and the tokens ``listed`` or the ``count`` most likely tokens."""
    message = logprobs_pb2.Logprobs(offsets=[0])
    for token in tokens:
        for entry in (token, *(listed or range(count))):
            message.token_ids.append(entry)
            message.logprobs.append(logprob_of(entry))
            message.ranks.append(entry + 1)
        message.offsets.append(len(message.token_ids))
    return message


def is_plain(output: pb.EngineCoreOutput) -> bool:
    """Return whether an output has only new tokens."""
    return bool(output.new_token_ids) and {field.name for field, _ in output.ListFields()} <= PLAIN


class FakeRequest:
    """A running request, and the number of its tokens that were sent."""

    def __init__(self, message: pb.EngineCoreRequest, session: "FakeSession", script: Sequence[int] | None) -> None:
        self.message = message
        self.session = session
        self.script = script
        self.num_sent = len(message.prior_output_token_ids)

    @property
    def key(self) -> tuple["FakeSession", str]:
        """Key of a request by its session, because two frontends may use the same id."""
        return self.session, self.message.request_id

    def token(self, index: int, vocab_size: int) -> int:
        if self.script is not None:
            return self.script[index]
        return token_at(self.message.sampling_params.seed, index, vocab_size=vocab_size)

    def limit(self, max_model_len: int) -> int:
        """Maximum length of the output in tokens."""
        params = self.message.sampling_params
        room = max_model_len - len(self.message.prompt_token_ids)
        asked = params.max_tokens if params.HasField("max_tokens") else DEFAULT_MAX_TOKENS
        return min(room, asked if self.script is None else min(asked, len(self.script)))

    def end(self, token: int, limit: int, eos_token_id: int) -> pb.EngineCoreOutput | None:
        """Return the end of the output after ``token``, the last token sent. None if the output continues."""
        params = self.message.sampling_params
        stops = self.num_sent >= params.min_tokens
        if stops and token in params.stop_token_ids:
            reason = finish_pb2.StopReason(token_id=token)
            return pb.EngineCoreOutput(finish_reason=finish_pb2.FINISH_REASON_STOP, stop_reason=reason)
        if stops and token == eos_token_id and not params.ignore_eos:
            return pb.EngineCoreOutput(finish_reason=finish_pb2.FINISH_REASON_STOP)
        if self.num_sent >= limit:
            return pb.EngineCoreOutput(finish_reason=finish_pb2.FINISH_REASON_LENGTH)
        return None


class FakeSession:
    """Stream of one frontend. ``None`` in the queue ends it, an exception breaks it. ``join`` waits until all is sent."""

    def __init__(self, hello: pb.Hello) -> None:
        self.hello = hello
        self.queue: asyncio.Queue[pb.SessionResponse | Exception | None] = asyncio.Queue()
        self.numbers: dict[tuple[str, int], int] = {}
        """Request numbers in columns, by request and attempt."""
        self.tensors = IncomingTensors(MAX_TENSOR_BYTES)
        self.features: FeatureReader | None = None

    def send(self, **message: Any) -> None:
        self.queue.put_nowait(pb.SessionResponse(**message))


class FakeEngine(service_pb2_grpc.EngineCoreServiceServicer):
    """Fake engine; see the module. ``until`` waits for a condition on the engine.

    Attributes:
        requests, chunks, aborted: Received messages.
        refusal: Error with which every new request ends.
        mangle: Changes each output before it is sent, or drops it by returning None.
        utilities: Answers of utility calls by method name: an error, a value, or a function of the arguments.
        on_utility: Called before each utility call.
        utility_calls: Utility calls with their arguments.
        step_age: Reported age of the last step, in seconds.
        wedged: Whether the engine reports that it is wedged.
        frozen: Whether the engine does not answer health checks.
    """

    def __init__(
        self,
        engine_id: str = "engine-0",
        *,
        model: str = "model",
        incarnation: str = "1",
        max_model_len: int = 128,
        vocab_size: int = 256,
        rank: int = 0,
        manual: bool = False,
        script: Script = lambda request: None,
        protocol_revision: int = PROTOCOL_REVISION,
        tls: TlsConfig | None = None,
    ) -> None:
        self.ready = pb.Ready(
            engine_id=engine_id,
            incarnation=incarnation,
            max_model_len=max_model_len,
            num_kv_blocks=1024,
            block_size=16,
            model=model,
            vocab_size=vocab_size,
            data_parallel_rank=rank,
            data_parallel_size=1,
            capabilities=["generate"],
            protocol_revision=protocol_revision,
            max_num_seqs=8,
        )
        self.script = script
        self.received: ReceiverCache | None = None
        """Limits of the media cache. None: the engine accepts no media."""
        self.eos_token_id = -1
        self.tokens_per_step = 1
        self.num_cached_tokens = 0
        self.refusal: finish_pb2.RequestError | None = None
        self.mangle: Callable[[pb.EngineCoreOutput], pb.EngineCoreOutput | None] = lambda output: output
        self.utilities: dict[str, Any] = dict(UTILITIES)
        self.on_utility: Callable[[str], object] = lambda method: None
        self.utility_calls: list[tuple[str, list[Any]]] = []
        self.requests: list[pb.EngineCoreRequest] = []
        self.chunks: list[tensor_pb2.TensorChunk] = []
        self.aborted: list[str] = []
        self.handoffs: list[list[str]] = []
        """Handoffs that sessions have asked for."""
        self.num_handed_over = 0
        self.running: dict[tuple[FakeSession, str], FakeRequest] = {}
        self.sessions: list[FakeSession] = []
        self.num_steps = 0
        self.step_age = 0.0
        self.wedged = False
        self.num_asked = 0
        """Number of status requests so far."""
        self.frozen = False
        self._manual = manual
        self._tls = tls or TlsConfig()
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()
        self._server: RpcServer | None = None
        self._steps: asyncio.Task[None] | None = None
        self._notifications: set[asyncio.Task[None]] = set()
        self.port = 0

    def serve_media(self, receiver_cache_bytes: int = 1024 * 1024, *, shared_memory: bool = False) -> "FakeEngine":
        """Accept images in requests, with a media cache of this size for each session."""
        self.received = ReceiverCache(receiver_cache_bytes)
        self.ready.receiver_cache_bytes = receiver_cache_bytes
        self.ready.max_tensor_bytes = MAX_TENSOR_BYTES
        del self.ready.media[:]
        self.ready.media.add(modality="image", max_items=16, max_tokens=1024)
        self.ready.capabilities[:] = sorted({*self.ready.capabilities, "image"})
        if shared_memory:
            self.ready.shared_memory_id = shared_memory_id()
        return self

    def clear_media(self) -> None:
        """Drop all cached media, and notify the sessions."""
        if self.received is not None:
            self.received.clear()
            for session in self.sessions:
                session.send(media_cleared=pb.MediaCleared())

    def give_blocks(self, role: "kv_pb2.EngineRole.ValueType" = kv_pb2.ENGINE_ROLE_BOTH) -> "FakeEngine":
        """Support handoffs of requests to and from other engines."""
        self.ready.role = role
        self.ready.kv_address, self.ready.kv_fingerprint = "127.0.0.1:50054", b"f" * 16
        self.ready.capabilities[:] = sorted({*self.ready.capabilities, "kv_transfer"})
        return self

    @property
    def sources(self) -> list[kv_pb2.KvSource | None]:
        """Return the KV source of each request received."""
        return [request.kv_source if request.HasField("kv_source") else None for request in self.requests]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> "FakeEngine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self, port: int = 0) -> None:
        """Start to serve, on a free port if ``port`` is 0."""
        self._server = RpcServer(
            ServerConfig(host="127.0.0.1", port=port, tls=self._tls),
            service_names=["penstock.enginecore.v1.EngineCoreService"],
        )
        service_pb2_grpc.add_EngineCoreServiceServicer_to_server(self, self._server.server)
        self.port = await self._server.start()
        await self._server.set_serving(True)
        if not self._manual:
            self._steps = asyncio.create_task(self._run())

    async def refuse_by_health(self) -> None:
        """Report through the health service that the engine accepts no new requests."""
        if self._server is not None:
            await self._server.set_serving(False)

    async def handed_over(self) -> None:
        """Wait until gRPC has accepted all messages for the sessions. The wait is limited, because a frontend may have
        stopped reading.
        """
        joins = [asyncio.create_task(session.queue.join()) for session in self.sessions]
        if joins:
            _, late = await asyncio.wait(joins, timeout=FLUSH_SECONDS)
            for task in late:
                task.cancel()

    async def kill(self, grace: float | None = None) -> None:
        """Disappear: close the connection without a final message, once sent messages are out or after ``grace``
        seconds.

        ``start(port)`` brings the engine back.
        """
        if self._steps is not None:
            self._steps.cancel()
            await asyncio.gather(self._steps, return_exceptions=True)
            self._steps = None
        await self.handed_over()
        if self._server is not None:
            await self._server.server.stop(grace)
            self._server = None
        self.running.clear()
        self.sessions.clear()

    def break_streams(self) -> None:
        """End all sessions with an error."""
        for session in self.sessions:
            session.queue.put_nowait(ConnectionResetError("the stream broke"))

    def close_streams(self) -> None:
        """End all sessions without a final message."""
        for session in self.sessions:
            session.queue.put_nowait(None)

    def die(self, reason: str) -> None:
        """Send engine_dead on every session and end the sessions."""
        for session in self.sessions:
            session.send(engine_dead=pb.EngineDead(reason=reason))
            session.queue.put_nowait(None)

    def drain(self, time_left: float = 30.0) -> None:
        """Send draining on every session: the engine accepts no new requests."""
        for session in self.sessions:
            session.send(draining=pb.Draining(time_left=time_left))

    def finish_all(
        self, reason: "finish_pb2.FinishReason.ValueType", error: finish_pb2.RequestError | None = None
    ) -> None:
        """End every running request without more tokens."""
        for request in list(self.running.values()):
            self._send(request, pb.EngineCoreOutput(finish_reason=reason, error=error))

    def take(self, request_id: str) -> FakeRequest:
        """Remove a request of the only frontend from the running requests, and return it."""
        (session,) = self.sessions
        return self.running.pop((session, request_id))

    def step(self) -> None:
        """Run one step: create tokens for every running request, and send one frame per session."""
        self.num_steps += 1
        outputs: dict[FakeSession, list[pb.EngineCoreOutput]] = {}
        for request in list(self.running.values()):
            if (output := self.mangle(self._advance(request))) is not None:
                outputs.setdefault(request.session, []).append(output)
        for session, of_session in outputs.items():
            self._deliver(session, of_session)
        self._notify()

    async def until(self, condition: Callable[["FakeEngine"], object], limit: float = PATIENCE) -> None:
        """Wait until ``condition(engine)`` holds. Raises TimeoutError after ``limit`` seconds."""
        async with asyncio.timeout(limit), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        first = await anext(aiter(request_iterator))
        session = FakeSession(first.hello)
        if self.received is not None:
            segments = SegmentReader(first.hello.incarnation) if self.ready.shared_memory_id else None
            session.features = FeatureReader(session.tensors, self.received.session(), segments)
        self._reached("before_ready")
        self._greet(session)
        self.sessions.append(session)
        reader = asyncio.create_task(self._read(request_iterator, session))
        self._notify()
        try:
            while (message := await session.queue.get()) is not None:
                if isinstance(message, Exception):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, str(message))
                else:
                    yield message
                session.queue.task_done()
                if message.HasField("ready"):
                    self._reached("after_ready")
        finally:
            reader.cancel()
            if session.features is not None:
                session.features.kept.clear()
            if session in self.sessions:
                self.sessions.remove(session)
            self.running = {k: r for k, r in self.running.items() if r.session is not session}
            self._notify()

    async def GetEngineInfo(self, request: pb.GetEngineInfoRequest, context: Context) -> pb.GetEngineInfoResponse:
        self.num_asked += 1
        self._notify()
        if self.frozen:
            await asyncio.Event().wait()  # until the caller gives up
        return pb.GetEngineInfoResponse(ready=self.ready, scheduler_stats=self._stats())

    async def _read(self, requests: AsyncIterator[pb.SessionRequest], session: FakeSession) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "add":
                self._take(message.add, session)
            elif kind == "abort":
                self._reached("on_abort")
                self.aborted.extend(message.abort.request_ids)
                for request_id in message.abort.request_ids:
                    self.running.pop((session, request_id), None)
            elif kind == "handoff":
                self.handoffs.append(list(message.handoff.request_ids))
                self._hand_over(session, message.handoff.request_ids)
            elif kind == "utility":
                self._answer(message.utility, session)
            elif kind == "tensor_chunk":
                self.chunks.append(message.tensor_chunk)
                take_chunk(session.tensors, message.tensor_chunk)
            elif kind == "drop_media" and session.features is not None:
                session.features.kept.drop(message.drop_media.identifiers)
            self._wake.set()
            self._notify()

    def _take(self, message: pb.EngineCoreRequest, session: FakeSession) -> None:
        try:
            if seed := media_seed(_features(message, session)):  # a request to pool has no sampling parameters
                message.sampling_params.seed += seed
        except RequestFailed as e:
            self.requests.append(message)
            error = finish_pb2.RequestError(code=e.code, message=e.message, field=e.field, reason=e.reason)
            self._refuse(FakeRequest(message, session, None), error)
        else:
            self._add(message, session)

    def _add(self, message: pb.EngineCoreRequest, session: FakeSession) -> None:
        self.requests.append(message)
        session.numbers[message.request_id, message.attempt] = message.request_number
        request = FakeRequest(message, session, self.script(message))
        if self.refusal is not None:
            self._refuse(request, self.refusal)
        elif (end := self._end_of_prior(request)) is not None:
            self._send(request, end)
        else:
            self.running[request.key] = request
            self._reached("on_add", request)

    def _end_of_prior(self, request: FakeRequest) -> pb.EngineCoreOutput | None:
        """Return the reason for which the prior output has ended the request already, if any."""
        prior = request.message.prior_output_token_ids
        if not prior:
            return None
        return request.end(prior[-1], request.limit(self.ready.max_model_len), self.eos_token_id)

    def _refuse(self, request: FakeRequest, error: finish_pb2.RequestError) -> None:
        """End a request that was not accepted. As with real engines, the frame does not report the load."""
        message = request.message
        output = pb.EngineCoreOutput(
            request_id=message.request_id,
            attempt=message.attempt,
            offset=request.num_sent,
            finish_reason=finish_pb2.FINISH_REASON_ERROR,
            error=error,
        )
        request.session.send(outputs=pb.EngineCoreOutputs(outputs=[output]))
        self._notify()

    def _answer(self, call: pb.UtilityCall, session: FakeSession) -> None:
        output = pb.UtilityOutput(call_id=call.call_id)
        arguments = msgspec.msgpack.decode(call.arguments)
        self.utility_calls.append((call.method, arguments))
        self.on_utility(call.method)
        if call.method == "reset_mm_cache":
            self.clear_media()
        answer = self.utilities.get(call.method)
        if callable(answer):
            answer = answer(*arguments)
        if isinstance(answer, finish_pb2.RequestError):
            output.error.CopyFrom(answer)
        elif call.method in self.utilities:
            output.result = msgspec.msgpack.encode(answer)
        else:
            output.error.code, output.error.message = "NOT_FOUND", f"no utility {call.method!r}"
        session.send(outputs=pb.EngineCoreOutputs(utility_output=output))

    def _greet(self, session: FakeSession) -> None:
        """Return the first message of a session."""
        session.send(ready=self.ready)

    def _reached(self, point: str, request: FakeRequest | None = None) -> None:
        """Called at points of the protocol. Subclasses fail at such a point."""

    def _deliver(self, session: FakeSession, outputs: Sequence[pb.EngineCoreOutput]) -> None:
        """Send a step's outputs to a frontend."""
        session.send(outputs=self._frame(session, outputs))

    def _frame(self, session: FakeSession, outputs: Sequence[pb.EngineCoreOutput]) -> pb.EngineCoreOutputs:
        """Return the frame of a step. If the frontend reads columns, outputs that fit into columns are in columns."""
        frame = pb.EngineCoreOutputs(scheduler_stats=self._stats())
        columns = TokenColumns()
        for output in outputs:
            number = session.numbers.get((output.request_id, output.attempt), 0)
            if number and self.ready.protocol_revision >= COLUMNS_SINCE and is_plain(output):
                columns.add(number, output.offset, output.new_token_ids)
            else:
                frame.outputs.append(output)
        if len(columns):
            fill_columns(frame.token_columns, columns)
        return frame

    def _send(self, request: FakeRequest, output: pb.EngineCoreOutput) -> None:
        """Send an output of a request."""
        output.request_id, output.attempt = request.message.request_id, request.message.attempt
        output.offset = request.num_sent
        self.running.pop(request.key, None)
        self._deliver(request.session, [output])
        self._notify()

    def _advance(self, request: FakeRequest) -> pb.EngineCoreOutput:
        message, params = request.message, request.message.sampling_params
        output = pb.EngineCoreOutput(request_id=message.request_id, attempt=message.attempt, offset=request.num_sent)
        if request.num_sent == len(message.prior_output_token_ids):
            output.prefill_stats.num_prompt_tokens = len(message.prompt_token_ids)
            output.prefill_stats.num_cached_tokens = self.num_cached_tokens
            if params.HasField("prompt_logprobs"):
                prompt = logprobs_of(message.prompt_token_ids[1:], params.prompt_logprobs)
                output.new_prompt_logprobs.CopyFrom(prompt)
        limit = request.limit(self.ready.max_model_len)
        while len(output.new_token_ids) < self.tokens_per_step and not output.finish_reason:
            token = request.token(request.num_sent, self.ready.vocab_size)
            output.new_token_ids.append(token)
            request.num_sent += 1
            if (end := request.end(token, limit, self.eos_token_id)) is not None:
                output.MergeFrom(end)
        after = message.handoff_after_tokens
        if after and not output.finish_reason and request.num_sent >= after + len(message.prior_output_token_ids):
            output.MergeFrom(self._handoff(request))
        elif message.lease_kv and output.finish_reason:
            output.kv_source.CopyFrom(self._source(request))
        elif message.kv_transfer_params and output.finish_reason:
            output.kv_transfer_params = json.dumps({"kept": json.loads(message.kv_transfer_params)})
        if params.HasField("logprobs") or params.logprob_token_ids:
            scored = logprobs_of(output.new_token_ids, params.logprobs, params.logprob_token_ids)
            output.new_logprobs.CopyFrom(scored)
        if output.finish_reason:
            del self.running[request.key]
        return output

    def _hand_over(self, session: FakeSession, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if (request := self.running.get((session, request_id))) is not None:
                self._send(request, self._handoff(request))

    def _handoff(self, request: FakeRequest) -> pb.EngineCoreOutput:
        """Return the last output of a request that is handed over."""
        self.num_handed_over += 1
        return pb.EngineCoreOutput(finish_reason=finish_pb2.FINISH_REASON_HANDOFF, kv_source=self._source(request))

    def _source(self, request: FakeRequest) -> kv_pb2.KvSource:
        return kv_pb2.KvSource(
            engine_id=self.ready.engine_id,
            incarnation=self.ready.incarnation,
            address=self.ready.kv_address,
            lease_id=self.num_handed_over.to_bytes(16, "big"),
            num_tokens=len(request.message.prompt_token_ids) + request.num_sent,
            fingerprint=self.ready.kv_fingerprint,
        )

    def _stats(self) -> stats_pb2.SchedulerStats:
        return stats_pb2.SchedulerStats(
            num_running_reqs=len(self.running),
            step_counter=self.num_steps,
            seconds_since_last_step=self.step_age,
            wedged=self.wedged,
        )

    def tell(self) -> None:
        """Report the load on every session, without a step."""
        for session in self.sessions:
            session.send(outputs=pb.EngineCoreOutputs(scheduler_stats=self._stats()))

    async def _run(self) -> None:
        while True:
            if not self.running:
                self._wake.clear()
                await self._wake.wait()
            self.step()
            await asyncio.sleep(0)

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.create_task(notify())
        self._notifications.add(task)
        task.add_done_callback(self._notifications.discard)


def _features(message: pb.EngineCoreRequest, session: FakeSession) -> list[MultiModalFeature]:
    """Return the media features of a request. Raises RequestFailed."""
    if session.features is not None:
        return session.features.read(message)
    if message.mm_features:
        raise Unimplemented("this engine takes no media", field="mm_features")
    return []
