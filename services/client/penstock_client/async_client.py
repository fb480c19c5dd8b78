"""The client for asyncio. ``build_sync_client.py`` makes ``sync_client.py`` of it, the same for threads."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack

import grpc
from grpc.aio import EOF

from penstock.common.v1.pooling_pb2 import PoolingParams
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc
from penstock_client.connection import BaseClient, Options, Tls
from penstock_client.errors import of_call
from penstock_client.requests import (
    CallOptions,
    ChatOptions,
    GenerateOptions,
    MixedPrompt,
    Prompt,
    generate_request,
    pooling_input,
    prediction_of,
    whole,
)
from penstock_client.results import (
    ChatOutput,
    Classes,
    Embeddings,
    Output,
    Scores,
    floats,
    read_chat_output,
    read_output,
    read_usage,
)

if TYPE_CHECKING:
    from penstock.inference.v1.service_pb2_grpc import InferenceServiceAsyncStub


Response = TypeVar("Response")
Piece = TypeVar("Piece")


class AsyncStream(AsyncIterator[Piece], Generic[Response, Piece]):
    """Pieces of an answer. Leaving the loop, or the ``with``, cancels the call; so does letting go of the stream.

    Cancelling the task that waits for a piece cancels the call as well. Raises PenstockError where the call fails.
    """

    def __init__(self, call: Any, read: Callable[[Response], Piece]) -> None:
        self._call = call
        self._read = read
        self._closed = False

    async def __anext__(self) -> Piece:
        if self._closed:
            raise StopAsyncIteration
        try:
            response: Any = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise of_call(error) from None
        if response is EOF:
            raise StopAsyncIteration
        return self._read(response)

    def close(self) -> None:
        """Cancel the call, unless it has ended. Does nothing the second time."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._call.cancel()


class AsyncClient(BaseClient):
    """Calls a Penstock server, many calls at once. Use as a context manager, or ``close`` it.

    ``Client`` is for threads. ``AsyncClient`` has the same methods for asyncio: make it inside the event loop that its calls
    run in; cancelling the task that waits for a call ends the work in the engine.

    ``timeout`` of a call is its deadline, in seconds from its start: it covers the queue, every retry and the whole stream.
    Calls that fail as UNAVAILABLE before anything of their answer came are tried again by the channel, up to four times in all.
    Every call raises PenstockError when it has failed, and ValueError for a timeout that is none.
    """

    stub: "InferenceServiceAsyncStub"
    """For what has no method here, such as GenerateSession; give it ``metadata``."""

    def _open(self, channel: Any, address: str, tls: Tls | None, options: Options) -> None:
        if channel is None and tls is None:
            channel = grpc.aio.insecure_channel(address, options)
        elif channel is None and tls is not None:
            channel = grpc.aio.secure_channel(address, tls.credentials(), options)
        self._channel = channel
        self.stub = service_pb2_grpc.InferenceServiceStub(self._channel)

    async def close(self) -> None:
        """End the connections, and the calls that still run."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: MixedPrompt,
        sampling: SamplingParams | None = None,
        *,
        prediction: Prompt | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Output]:
        """Continue a text, token ids, or texts and media. Returns the ``n`` sequences, each whole."""
        stream = self.stream(prompt, whole(sampling), prediction=prediction, timeout=timeout, **options)
        return sorted([output async for output in stream], key=lambda output: output.index)

    def stream(
        self,
        prompt: MixedPrompt,
        sampling: SamplingParams | None = None,
        *,
        prediction: Prompt | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream[pb.GenerateResponse, Output]:
        """The same, piece by piece; the n sequences interleaved. Leaving the iterator ends the work in the engine."""
        request = generate_request(prompt, sampling, prediction, options)
        call = self.stub.Generate(request, timeout=self._deadline(timeout), metadata=self.metadata)
        return AsyncStream(call, read_output)

    async def chat(
        self,
        messages: Iterable[pb.ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        prediction: Prompt | None = None,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[ChatOutput]:
        """Answer a conversation through the model's chat template. Returns the ``n`` answers, each whole."""
        stream = self.stream_chat(messages, whole(sampling), prediction=prediction, timeout=timeout, **options)
        return sorted([output async for output in stream], key=lambda output: output.index)

    def stream_chat(
        self,
        messages: Iterable[pb.ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        prediction: Prompt | None = None,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream[pb.ChatResponse, ChatOutput]:
        """The same, piece by piece. Leaving the iterator ends the work in the engine."""
        request = pb.ChatRequest(
            messages=messages, sampling_params=sampling, prediction=prediction_of(prediction), **options
        )
        call = self.stub.Chat(request, timeout=self._deadline(timeout), metadata=self.metadata)
        return AsyncStream(call, read_chat_output)

    async def embed(
        self,
        inputs: Sequence[MixedPrompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        timeout: float | None = None,
        **options: Unpack[CallOptions],
    ) -> Embeddings:
        """One vector for each text, or list of token ids."""
        params = PoolingParams(dimensions=dimensions, normalize=normalize)
        request = pb.EmbedRequest(inputs=map(pooling_input, inputs), pooling_params=params, **options)
        response = await self._call(self.stub.Embed, request, timeout)
        return Embeddings([floats(each) for each in response.embeddings], read_usage(response.usage))

    async def classify(
        self,
        inputs: Sequence[MixedPrompt],
        *,
        use_activation: bool | None = None,
        timeout: float | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Classes]:
        """The classes of each input."""
        params = PoolingParams(use_activation=use_activation)
        request = pb.ClassifyRequest(inputs=map(pooling_input, inputs), pooling_params=params, **options)
        response = await self._call(self.stub.Classify, request, timeout)
        return [Classes(list(each.probabilities), each.label) for each in response.scores]

    async def score(
        self,
        query: Prompt,
        documents: Sequence[Prompt],
        *,
        timeout: float | None = None,
        **options: Unpack[CallOptions],
    ) -> Scores:
        """How like the query each document is."""
        request = pb.ScoreRequest(query=pooling_input(query), documents=map(pooling_input, documents), **options)
        response = await self._call(self.stub.Score, request, timeout)
        return Scores(list(response.scores), read_usage(response.usage))

    async def tokenize(self, text: str, *, model: str = "", timeout: float | None = None) -> list[int]:
        """The token ids of a text, special tokens among them."""
        request = pb.TokenizeRequest(model=model, text=text)
        return list((await self._call(self.stub.Tokenize, request, timeout)).token_ids)

    async def detokenize(self, token_ids: Iterable[int], *, model: str = "", timeout: float | None = None) -> str:
        """The text of token ids, without special tokens."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return str((await self._call(self.stub.Detokenize, request, timeout)).text)

    async def models(self, *, timeout: float | None = None) -> list[pb.Model]:
        """The models that are served."""
        return list((await self._call(self.stub.ListModels, pb.ListModelsRequest(), timeout)).models)

    async def _call(self, method: Callable[..., Any], request: Any, timeout: float | None) -> Any:
        try:
            return await method(request, timeout=self._deadline(timeout), metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise of_call(error) from None
