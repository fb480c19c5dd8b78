"""A public API without a model, for tests of clients.

``Generate`` streams the words of the prompt, one message each, so a client that joins the texts gets the prompt back.
With n, every sequence is the prompt, and the sequences take turns word by word. The log-probability of a word is minus
its index.

Some words are special. At HOLD the stream stops until the call ends, and at GONE it breaks. LARGE becomes a text of
more than 4 MiB. A prompt BUSY is refused with a retry delay. The first call with FLAKY in its prompt is UNAVAILABLE.
The temperature is validated as in a real frontend.

``GenerateSession`` does the same for each of its requests, and ends requests by id. ``Chat`` does the same with the
last message of the conversation. The words between two THINK are its reasoning. For ``Tokenize``, each word is a token.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc

from penstock.common.v1 import finish_pb2, stats_pb2
from penstock.inference.v1 import messages_pb2
from penstock_common.config.sections import ServerConfig
from penstock_common.errors import InvalidArgument, RequestFailed, ResourceExhausted, Unavailable
from penstock_common.rpc.server import RpcServer
from tests.fakes.patience import PATIENCE

SERVICE = "penstock.inference.v1.InferenceService"
HOLD = "<hold>"
BUSY = "<busy>"
FLAKY = "<flaky>"
GONE = "<gone>"
LARGE = "<large>"
THINK = "<think>"
LARGE_TEXT = "渡し船" * 600_000
"""Text for LARGE: 5.4 MB."""
MODEL = messages_pb2.Model(name="fake", max_model_len=2048, num_engines=1, vocab_size=1000)
MAX_TEMPERATURE = 100.0
RETRY_AFTER = 2.5

Context = grpc.aio.ServicerContext[Any, Any]


class FakeInference:
    """Server of the fake API on a free loopback port, between ``start`` and ``stop``.

    Attributes:
        address: Address, host:port.
        requests: Received requests, oldest first.
        keys: The ``authorization`` of each request.
        tls: Private key and certificate (PEM) if the server uses TLS.
        abandoned: Set when a stream ends before its last message, because of a cancellation or a deadline.
        chats: Received conversations.
        chat_failure: Error with which Chat fails, if set.
        shuts_down_after: Number of calls of Generate to answer. Later calls are refused.
        capabilities: Capabilities of the model.
    """

    def __init__(
        self,
        *,
        tls: tuple[bytes, bytes] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        max_age: float = 0.0,
    ) -> None:
        """Create the server. ``max_age``: maximum age of connections in seconds; 0: no maximum."""
        self.host = host
        self.address = ""
        self.requests: list[messages_pb2.GenerateRequest] = []
        self.keys: list[str | bytes] = []
        self._tls = tls
        self.chats: list[messages_pb2.ChatRequest] = []
        self.chat_failure: RequestFailed | None = None
        self.abandoned = asyncio.Event()
        self.shuts_down_after: int | None = None
        self.capabilities = ["generate"]
        config = ServerConfig(host=host, port=port, max_connection_age=max_age)
        self._server = RpcServer(config, service_names=[SERVICE])
        self._asked = asyncio.Event()
        generate = grpc.unary_stream_rpc_method_handler(
            self._generate,
            request_deserializer=messages_pb2.GenerateRequest.FromString,
            response_serializer=messages_pb2.GenerateResponse.SerializeToString,
        )
        chat = grpc.unary_stream_rpc_method_handler(
            self._chat,
            request_deserializer=messages_pb2.ChatRequest.FromString,
            response_serializer=messages_pb2.ChatResponse.SerializeToString,
        )
        list_models = grpc.unary_unary_rpc_method_handler(
            self._list_models,
            request_deserializer=messages_pb2.ListModelsRequest.FromString,
            response_serializer=messages_pb2.ListModelsResponse.SerializeToString,
        )
        tokenize = grpc.unary_unary_rpc_method_handler(
            self._tokenize,
            request_deserializer=messages_pb2.TokenizeRequest.FromString,
            response_serializer=messages_pb2.TokenizeResponse.SerializeToString,
        )
        session = grpc.stream_stream_rpc_method_handler(
            self._session,
            request_deserializer=messages_pb2.GenerateSessionRequest.FromString,
            response_serializer=messages_pb2.GenerateSessionResponse.SerializeToString,
        )
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": generate,
            "GenerateSession": session,
            "Chat": chat,
            "Tokenize": tokenize,
            "ListModels": list_models,
        }
        self._server.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start to serve, and set the address."""
        if self._tls is not None:
            encrypted = self._server.server.add_secure_port("localhost:0", grpc.ssl_server_credentials([self._tls]))
        port = await self._server.start()
        self.address = (
            f"{self.host}:{port}" if self._tls is None else f"localhost:{encrypted}"
        )  # the host name in the certificate
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """Stop the server and cancel all calls."""
        await self._server.stop(grace=0)

    async def leave(self) -> None:
        """Stop like a frontend without running calls, after all clients have disconnected."""
        await self._server.stop(grace=PATIENCE)

    async def set_serving(self, serving: bool) -> None:
        """Set the health status."""
        await self._server.set_serving(serving)

    async def asked(self, seconds: float) -> None:
        """Wait for the next request. Raises TimeoutError if no request arrives within ``seconds``."""
        self._asked.clear()
        await asyncio.wait_for(self._asked.wait(), seconds)

    async def _generate(
        self, request: messages_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[messages_pb2.GenerateResponse]:
        self.requests.append(request)
        self._asked.set()
        self.keys.append(dict(context.invocation_metadata() or ()).get("authorization", ""))
        # For a prompt of token ids, the fake returns max_tokens words.
        words = request.text.split() or ["word"] * request.sampling_params.max_tokens
        check(request)
        if self.shuts_down_after is not None and len(self.requests) > self.shuts_down_after:
            raise Unavailable("this frontend is shutting down", reason="SHUTTING_DOWN", retry_after=RETRY_AFTER)
        if FLAKY in words and len(self.requests) == 1:
            raise Unavailable("the engine went away", reason="ENGINE_GONE", retry_after=RETRY_AFTER)
        try:
            for index, word in enumerate(words):
                if word == HOLD:
                    await asyncio.Event().wait()
                if word == GONE:
                    raise Unavailable("the engine went away", reason="ENGINE_GONE")
                for sequence in range(max(request.sampling_params.n, 1)):
                    yield response(request, index, words, sequence)
        except (asyncio.CancelledError, GeneratorExit):  # while it waits, or while a message is being sent
            self.abandoned.set()
            raise

    async def _session(
        self, requests: AsyncIterator[messages_pb2.GenerateSessionRequest], context: Context
    ) -> AsyncIterator[messages_pb2.GenerateSessionResponse]:
        answers: asyncio.Queue[messages_pb2.GenerateSessionResponse | None] = asyncio.Queue()
        running: dict[str, asyncio.Task[None]] = {}

        async def answer(request: messages_pb2.GenerateRequest) -> None:
            said = messages_pb2.GenerateResponse(request_id=request.request_id)
            try:
                async for said in self._generate(request, context):
                    answers.put_nowait(messages_pb2.GenerateSessionResponse(output=said))
            except RequestFailed as e:
                failed = finish_pb2.RequestError(
                    code=e.code, message=e.message, field=e.field, reason=e.reason, retry_after=e.retry_after
                )
                answers.put_nowait(
                    messages_pb2.GenerateSessionResponse(
                        error=messages_pb2.SessionError(request_id=request.request_id, error=failed)
                    )
                )
            except asyncio.CancelledError:
                ended = messages_pb2.GenerateResponse(
                    request_id=request.request_id, finish_reason=finish_pb2.FINISH_REASON_ABORT
                )
                answers.put_nowait(messages_pb2.GenerateSessionResponse(output=ended))

        async def read() -> None:
            async for message in requests:
                if message.HasField("generate"):
                    request = message.generate
                    running[request.request_id] = asyncio.create_task(answer(request))
                else:
                    running[message.abort_request_id].cancel()
            await asyncio.gather(*running.values())
            answers.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (said := await answers.get()) is not None:
                yield said
        except (asyncio.CancelledError, GeneratorExit):
            self.abandoned.set()
            raise
        finally:
            for task in (reading, *running.values()):
                task.cancel()

    async def _chat(
        self, request: messages_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[messages_pb2.ChatResponse]:
        self.chats.append(request)
        if self.chat_failure is not None:
            raise self.chat_failure
        text = request.messages[-1].content
        if text == BUSY:
            raise ResourceExhausted("the queue is full: 8 of 8 requests", retry_after=RETRY_AFTER)
        words = text.split()
        thinks = False
        try:
            for index, word in enumerate(words):
                if word == HOLD:
                    await asyncio.Event().wait()
                thinks ^= word == THINK
                if word != THINK:
                    part = f"{word}{'' if index == len(words) - 1 else ' '}"
                    message = messages_pb2.ChatResponse(token_ids=[index])
                    setattr(message, "reasoning" if thinks else "content", part)
                    yield message
            usage = stats_pb2.Usage(prompt_tokens=len(words), completion_tokens=len(words))
            yield messages_pb2.ChatResponse(finish_reason=finish_pb2.FINISH_REASON_STOP, usage=usage)
        except (asyncio.CancelledError, GeneratorExit):  # while it waits, or while a message is being sent
            self.abandoned.set()
            raise

    async def _tokenize(self, request: messages_pb2.TokenizeRequest, context: Context) -> messages_pb2.TokenizeResponse:
        return messages_pb2.TokenizeResponse(token_ids=range(len(request.text.split())))

    async def _list_models(
        self, request: messages_pb2.ListModelsRequest, context: Context
    ) -> messages_pb2.ListModelsResponse:
        model = messages_pb2.Model(capabilities=self.capabilities)
        model.MergeFrom(MODEL)
        return messages_pb2.ListModelsResponse(models=[model])


def check(request: messages_pb2.GenerateRequest) -> None:
    """Raise the errors that a frontend would raise."""
    temperature = request.sampling_params.temperature
    if not 0 <= temperature <= MAX_TEMPERATURE:
        message = f"sampling_params.temperature is {temperature:g}; it must be from 0 to {MAX_TEMPERATURE:g}"
        raise InvalidArgument(message, field="sampling_params.temperature")
    if request.text == BUSY:
        raise ResourceExhausted("the queue is full: 8 of 8 requests", retry_after=RETRY_AFTER)


def response(
    request: messages_pb2.GenerateRequest, index: int, words: list[str], sequence: int
) -> messages_pb2.GenerateResponse:
    """Return the message for one word. The index of the word is its token id."""
    message = messages_pb2.GenerateResponse(
        request_id=request.request_id or "random",
        index=sequence,
        text=f"{'' if index == 0 else ' '}{LARGE_TEXT if words[index] == LARGE else words[index]}",
        token_ids=[index],
    )
    if request.sampling_params.HasField("logprobs"):
        message.logprobs.offsets.extend([0, 1])
        message.logprobs.token_ids.append(index)
        message.logprobs.logprobs.append(-float(index))
        message.logprobs.ranks.append(1)
        message.logprobs.tokens.append(message.text)
    if index == len(words) - 1:
        message.finish_reason = finish_pb2.FINISH_REASON_STOP
        message.usage.CopyFrom(stats_pb2.Usage(prompt_tokens=len(words), completion_tokens=len(words)))
    return message
