"""Client for asyncio. ``build_sync_client.py`` generates ``sync_client.py``, the client for threads, from this file."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
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
from penstock_client.messages import build
from penstock_client.requests import (
    CallOptions,
    ChatOptions,
    EmbedOptions,
    GenerateOptions,
    MixedPrompt,
    Prompt,
    ScoreOptions,
    TranscribeOptions,
    chat_request,
    generate_request,
    pooling_input,
    pooling_inputs,
    request_of,
    transcribe_request,
    whole,
)
from penstock_client.results import (
    ChatOutput,
    Classes,
    Embeddings,
    Output,
    Scores,
    Transcript,
    floats,
    read_chat_output,
    read_output,
    read_transcript_item,
    read_usage,
    transcript_of,
)

if TYPE_CHECKING:
    from penstock.inference.v1.service_pb2_grpc import InferenceServiceAsyncStub


Response = TypeVar("Response")
Piece = TypeVar("Piece")


class AsyncStream(AsyncIterator[Piece], Generic[Response, Piece]):
    """Stream of the pieces of an answer. Iterating raises PenstockError if the call fails.

    The call is cancelled if the caller leaves the loop or the ``with`` block. It is also cancelled if the caller
    deletes the stream, or cancels the task that waits for a piece.
    """

    def __init__(self, call: Any, read: Callable[[Response], Piece], address: str = "") -> None:
        self._call = call
        self._address = address
        self._read = read
        self._closed = False

    async def __anext__(self) -> Piece:
        if self._closed:
            raise StopAsyncIteration
        try:
            response: Any = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise of_call(error, self._address) from None
        if response is EOF:
            raise StopAsyncIteration
        return self._read(response)

    def close(self) -> None:
        """Cancel the call if it has not ended. Idempotent."""
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
    """Client of a Penstock server, for many concurrent calls. Use the client as a context manager, or call ``close``.

    ``Client`` is for threads. ``AsyncClient`` has the same methods for asyncio. Create an ``AsyncClient`` in the event
    loop in which its calls run. If the task that waits for a call is cancelled, the engine also aborts the request.

    ``timeout`` is the number of seconds from the start of a call to its deadline. This time includes queueing, all
    retries, and the complete stream. If a call fails with UNAVAILABLE before the first part of its answer, the channel
    retries the call, up to four attempts in total. Every method raises PenstockError if the call fails, and TypeError
    or ValueError for a wrong argument.
    """

    stub: "InferenceServiceAsyncStub"
    """gRPC stub for methods without a wrapper in this class, such as GenerateSession. Pass ``metadata`` to these
    methods.
    """

    def _open(self, channel: Any, address: str, tls: Tls | None, options: Options) -> None:
        if channel is None and tls is None:
            channel = grpc.aio.insecure_channel(address, options)
        elif channel is None and tls is not None:
            channel = grpc.aio.secure_channel(address, tls.credentials(), options)
        self._channel = channel
        self.stub = service_pb2_grpc.InferenceServiceStub(self._channel)

    async def close(self) -> None:
        """Cancel running calls, and close the connections."""
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
        """Continue a prompt of text, token ids, or texts with media. Return the ``n`` complete sequences."""
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
        """Continue a prompt, and stream the pieces of the output. The pieces of the ``n`` sequences are interleaved.

        If the caller leaves the iteration, the request is aborted.
        """
        request = generate_request(prompt, sampling, prediction, options)
        call = self.stub.Generate(request, timeout=self._deadline(timeout), metadata=self.metadata)
        return AsyncStream(call, read_output, self._address)

    async def chat(
        self,
        messages: Iterable[pb.ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        prediction: Prompt | None = None,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[ChatOutput]:
        """Answer a conversation, which is rendered with the model's chat template.

        Return the ``n`` complete answers.
        """
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
        """Answer a conversation, and stream the pieces of the answer.

        If the caller leaves the iteration, the request is aborted.
        """
        request = chat_request(messages, sampling, prediction, options)
        call = self.stub.Chat(request, timeout=self._deadline(timeout), metadata=self.metadata)
        return AsyncStream(call, read_chat_output, self._address)

    async def embed(
        self,
        inputs: Sequence[MixedPrompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Return one embedding for each input.

        ``prompt_name`` or ``input_type`` selects the model's prompt that is added before each text.
        """
        params = build(PoolingParams, {"dimensions": dimensions, "normalize": normalize})
        fields = {"inputs": pooling_inputs(inputs, "inputs"), "pooling_params": params}
        request = request_of(pb.EmbedRequest, EmbedOptions, options, **fields)
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
        """Return the class probabilities of each input."""
        params = build(PoolingParams, {"use_activation": use_activation})
        fields = {"inputs": pooling_inputs(inputs, "inputs"), "pooling_params": params}
        request = request_of(pb.ClassifyRequest, CallOptions, options, **fields)
        response = await self._call(self.stub.Classify, request, timeout)
        return [Classes(list(each.probabilities), each.label) for each in response.scores]

    async def score(
        self,
        query: Prompt,
        documents: Sequence[Prompt],
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Return the score of each document for the query.

        ``prompt_name`` selects the model's prompt that is added before the query.
        """
        fields = {"query": pooling_input(query, "query"), "documents": pooling_inputs(documents, "documents")}
        request = request_of(pb.ScoreRequest, ScoreOptions, options, **fields)
        response = await self._call(self.stub.Score, request, timeout)
        return Scores(list(response.scores), read_usage(response.usage))

    async def transcribe(
        self, audio: bytes | Path, *, timeout: float | None = None, **options: Unpack[TranscribeOptions]
    ) -> Transcript:
        """Return the transcript of an audio file, such as WAV, FLAC, MP3 or Ogg."""
        items = [item async for item in self.stream_transcript(audio, timeout=timeout, **options)]
        return transcript_of(items)

    def stream_transcript(
        self, audio: bytes | Path, *, timeout: float | None = None, **options: Unpack[TranscribeOptions]
    ) -> AsyncStream[pb.TranscribeResponse, str | Transcript]:
        """Transcribe an audio file, and stream the text of each window of at most 30 s. The last item is the Transcript.

        If the caller leaves the iteration, the request is aborted.
        """
        request = transcribe_request(audio, options)
        call = self.stub.Transcribe(request, timeout=self._deadline(timeout), metadata=self.metadata)
        return AsyncStream(call, read_transcript_item, self._address)

    async def tokenize(self, text: str, *, model: str = "", timeout: float | None = None) -> list[int]:
        """Return the token ids of a text, including special tokens."""
        request = build(pb.TokenizeRequest, {"model": model, "text": text})
        return list((await self._call(self.stub.Tokenize, request, timeout)).token_ids)

    async def detokenize(self, token_ids: Iterable[int], *, model: str = "", timeout: float | None = None) -> str:
        """Return the text of token ids, without special tokens."""
        request = build(pb.DetokenizeRequest, {"model": model, "token_ids": token_ids})
        return str((await self._call(self.stub.Detokenize, request, timeout)).text)

    async def models(self, *, timeout: float | None = None) -> list[pb.Model]:
        """Return the models that the server serves."""
        return list((await self._call(self.stub.ListModels, pb.ListModelsRequest(), timeout)).models)

    async def _call(self, method: Callable[..., Any], request: Any, timeout: float | None) -> Any:
        try:
            return await method(request, timeout=self._deadline(timeout), metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise of_call(error, self._address) from None
