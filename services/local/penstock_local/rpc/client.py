"""Thin clients of ``penstock.inference.v1``: for commands, for load, and how commands describe its failures."""

import itertools
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import grpc
import msgspec

from penstock.common.v1 import finish_pb2, logprobs_pb2, media_pb2, sampling_pb2
from penstock.inference.v1 import messages_pb2, service_pb2_grpc
from penstock_common.errors import PenstockError, RequestFailed, Unimplemented
from penstock_common.rpc.credentials import is_of_tls
from penstock_common.rpc.outputs import logprobs_from_proto
from penstock_common.rpc.status import DETAILS_KEY, from_rpc_error
from penstock_common.types.outputs import FinishReason, Logprobs
from penstock_local.media_files import MediaFile
from penstock_local.rpc.connect import ADMIN, PUBLIC, connect, is_http_port, mismatch


class ServerUnreachableError(PenstockError):
    """Nothing answers at the address, or the connection broke."""


class WrongAddressError(PenstockError):
    """There is no gRPC API at the address. The message says which address to give."""


class TlsMismatchError(PenstockError):
    """A server is there; one side speaks TLS and the other does not. The message says what to set."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model wants called; ``arguments`` is JSON."""

    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation. ``role``: system, user or assistant."""

    role: str
    content: str
    media: tuple[MediaFile, ...] = ()
    """What stands before the content."""

    def message(self) -> messages_pb2.ChatMessage:
        """As the public API takes it."""
        if not self.media:
            return messages_pb2.ChatMessage(role=self.role, content=self.content)
        parts = [messages_pb2.ContentPart(media=_media(file)) for file in self.media]
        return messages_pb2.ChatMessage(role=self.role, parts=[*parts, messages_pb2.ContentPart(text=self.content)])


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One message of an output stream."""

    text: str
    """New text of one sequence."""
    num_tokens: int
    """New tokens of that sequence."""
    index: int = 0
    """Which of the ``n`` sequences it is."""
    logprobs: Logprobs | None = None
    """As many positions as there are new tokens; None unless they were asked for."""
    finish_reason: FinishReason | None = None
    """Set on the sequence's last piece."""
    stopped_at: str | int | None = None
    """The stop string or stop token id that was met; None at the model's own end of text."""
    usage: Usage | None = None
    """Set on the sequence's last piece."""
    reasoning: str = ""
    """New text of the model's reasoning, in a chat."""
    tool_calls: tuple[ToolCall, ...] = ()
    """New calls of tools, in a chat."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A served model."""

    name: str
    max_model_len: int
    """Longest sequence in tokens; 0 while no engine is up."""
    num_engines: int
    vocab_size: int = 0
    """Number of token ids."""
    capabilities: tuple[str, ...] = ()
    """What its engines serve, as ``generate`` or ``embed``; empty while no engine is up."""

    @property
    def pools(self) -> bool:
        """Whether it makes vectors or scores, and no text."""
        return bool(self.capabilities) and "generate" not in self.capabilities


class InferenceClient:
    """Calls a running server. Use as an async context manager.

    Every method raises RequestFailed for an error of the server, ServerUnreachableError when there is none, and
    TlsMismatchError.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = connect(address)
        self._stub = service_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def generate(
        self,
        prompt: str,
        *,
        model: str = "",
        lora: str = "",
        media: Collection[MediaFile] = (),
        deadline: float | None = None,
        **sampling: Any,
    ) -> AsyncIterator[Piece]:
        """Continue ``prompt``, piece by piece; with ``n`` > 1 the sequences come interleaved.

        ``lora``: an adapter of ``model``; empty: none. ``media``: what stands before the prompt.
        ``sampling``: fields of SamplingParams; what is absent the server decides. ``deadline``: seconds from now.

        Closing the iterator or cancelling its task ends the work in the engine.
        """
        request = messages_pb2.GenerateRequest(
            model=model, lora=lora, sampling_params=sampling_pb2.SamplingParams(**sampling)
        )
        if media:
            request.mixed.parts.extend(messages_pb2.PromptPart(media=_media(file)) for file in media)
            request.mixed.parts.add(text=prompt)
        else:
            request.text = prompt
        call = self._stub.Generate(request, timeout=deadline)
        try:
            async for response in call:
                yield _piece(response, response.text)
        except grpc.aio.AioRpcError as e:
            raise await call_failure(e, self.address) from None
        finally:
            call.cancel()

    async def chat(
        self, messages: Iterable[ChatMessage], *, model: str = "", lora: str = "", sampling: Mapping[str, Any]
    ) -> AsyncIterator[Piece]:
        """The answer to a conversation, piece by piece. ``lora``: as for ``generate``.
        ``sampling``: fields of SamplingParams; the server chooses the others.

        Closing the iterator or cancelling its task ends the work in the engine.
        """
        request = messages_pb2.ChatRequest(
            model=model,
            lora=lora,
            messages=[message.message() for message in messages],
            sampling_params=sampling_pb2.SamplingParams(**sampling),
        )
        call = self._stub.Chat(request)
        try:
            async for response in call:
                calls = tuple(ToolCall(name=c.name, arguments=c.arguments) for c in response.tool_calls)
                yield msgspec.structs.replace(
                    _piece(response, response.content), reasoning=response.reasoning, tool_calls=calls
                )
        except grpc.aio.AioRpcError as e:
            raise await call_failure(e, self.address) from None
        finally:
            call.cancel()

    async def count_tokens(self, text: str, *, model: str = "") -> int:
        """How many tokens ``text`` has as a prompt, special ones included."""
        try:
            response = await self._stub.Tokenize(messages_pb2.TokenizeRequest(model=model, text=text))
        except grpc.aio.AioRpcError as e:
            raise await call_failure(e, self.address) from None
        return len(response.token_ids)

    async def models(self) -> list[ModelInfo]:
        """The models that the server serves."""
        try:
            response = await self._stub.ListModels(messages_pb2.ListModelsRequest())
        except grpc.aio.AioRpcError as e:
            raise await call_failure(e, self.address) from None
        return [
            ModelInfo(
                name=m.name,
                max_model_len=m.max_model_len,
                num_engines=m.num_engines,
                vocab_size=m.vocab_size,
                capabilities=tuple(m.capabilities),
            )
            for m in response.models
        ]


def _takes(address: str, prefix: str) -> str:
    """Which flag takes which address of the same host."""
    host = address.split("://")[-1].split("/")[0].rpartition(":")[0] or "localhost"
    if prefix == ADMIN:
        return f"--admin-address is the operators' gRPC API, {host}:50053 unless --admin-port of penstock serve says another"
    return f"--address is the gRPC API, {host}:50051 unless --grpc-port of penstock serve says another"


async def call_failure(error: grpc.aio.AioRpcError, address: str, *, prefix: str = PUBLIC) -> PenstockError:
    """Errors of a Penstock server carry details; an UNAVAILABLE without them is the connection's, an UNIMPLEMENTED that of a
    server that has no such call.
    """
    has_details = any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    if error.code() is grpc.StatusCode.UNAVAILABLE and not has_details:
        if why := await mismatch(address, prefix=prefix):
            return TlsMismatchError(why)
        if address.startswith(("http://", "https://")):
            return WrongAddressError(f"{address} is a URL; {_takes(address, prefix)}")
        if await is_http_port(address):
            return WrongAddressError(f"{address} is an HTTP port; {_takes(address, prefix)}")
        return ServerUnreachableError(f"no connection to {address}: {error.details()}")
    if error.code() is grpc.StatusCode.UNIMPLEMENTED and not has_details:
        here = "public API listens on --grpc-port" if prefix == PUBLIC else "operators' API listens on --admin-port"
        return Unimplemented(f"{address} does not know this call: the {here} of penstock serve, or the server is older")
    return from_rpc_error(error)


def sampling_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``values`` that are SamplingParams fields and are given."""
    known = sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    return {name: value for name, value in values.items() if name in known and value is not None}


def _media(file: MediaFile) -> media_pb2.Media:
    if file.url:
        return media_pb2.Media(modality=file.modality, url=file.url)
    return media_pb2.Media(modality=file.modality, data=file.data)


def _logprobs(message: logprobs_pb2.Logprobs) -> Logprobs:
    logprobs = logprobs_from_proto(message)
    logprobs.tokens = list(message.tokens)
    return logprobs


def _piece(response: messages_pb2.GenerateResponse | messages_pb2.ChatResponse, text: str) -> Piece:
    finished = response.finish_reason != finish_pb2.FINISH_REASON_UNSPECIFIED
    which = response.stop_reason.WhichOneof("reason")
    usage = Usage(
        prompt_tokens=response.usage.prompt_tokens,
        cached_tokens=response.usage.cached_tokens,
        completion_tokens=response.usage.completion_tokens,
    )
    return Piece(
        text=text,
        num_tokens=len(response.token_ids),
        index=response.index,
        logprobs=_logprobs(response.logprobs) if response.HasField("logprobs") else None,
        finish_reason=FinishReason(response.finish_reason) if finished else None,
        stopped_at=getattr(response.stop_reason, which) if which else None,
        usage=usage if finished else None,
    )


def describe_failure(error: RequestFailed) -> str:
    """The server's message with the field at fault, if one is, and when to try again."""
    field = f" ({error.field})" if error.field and error.field not in error.message else ""
    retry = f"; try again in {error.retry_after:g} s" if error.retry_after is not None else ""
    return f"{error.code}: {error.message}{field}{retry}"


def unreachable(error: ServerUnreachableError) -> str:
    """Why no server answers, and how to start one, unless one has answered and it is TLS that fails."""
    told = str(error)
    return told if is_of_tls(told) else f"{told}\nIs a server running? Start one with: penstock serve MODEL"


def one_line(error: PenstockError) -> str:
    """The same, also of errors that no server has sent."""
    return describe_failure(error) if isinstance(error, RequestFailed) else str(error)


def of_operators_api(error: PenstockError) -> str:
    """The same of a call to the operators' API, with where that listens when nothing answers."""
    if isinstance(error, ServerUnreachableError):
        return (
            f"{one_line(error)}\nIs a frontend running? Its operators' port listens on its own machine alone, as a rule; "
            "--admin-address says where."
        )
    return one_line(error)


class Received(NamedTuple):
    """What a message brought: new text and its number of tokens; on the last one the prompt's tokens and those of it cached, and
    the drafted tokens of the output and those that were in vain.
    """

    text: str
    num_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    ended: bool = False


class LoadClient:
    """Requests go to the connections in turn. Use as an async context manager."""

    def __init__(self, address: str, *, channels: int) -> None:
        self._address = address
        self._channels = [connect(address) for _ in range(channels)]
        self._stubs = itertools.cycle([service_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        images: Sequence[bytes] = (),
        model: str,
        lora: str = "",
        deadline: float | None,
        sampling: Mapping[str, Any],
    ) -> AsyncIterator[Received]:
        """What each message brings. ``images``: files of those before the prompt. ``deadline``: seconds from now. Raises
        RequestFailed, ServerUnreachableError.
        """
        params = sampling_pb2.SamplingParams(**sampling)
        request = messages_pb2.GenerateRequest(model=model, lora=lora, sampling_params=params)
        if images:
            request.mixed.parts.extend(_image(data) for data in images)
            request.mixed.parts.append(_part(prompt))
        elif isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        call = next(self._stubs).Generate(request, timeout=deadline)
        try:
            async for response in call:
                if response.finish_reason == finish_pb2.FINISH_REASON_UNSPECIFIED:
                    yield Received(response.text, len(response.token_ids))
                else:
                    usage = response.usage
                    yield Received(
                        response.text,
                        len(response.token_ids),
                        usage.prompt_tokens,
                        usage.cached_tokens,
                        usage.accepted_draft_tokens,
                        usage.rejected_draft_tokens,
                        ended=True,
                    )
        except grpc.aio.AioRpcError as e:
            raise await call_failure(e, self._address) from None
        finally:
            call.cancel()


def _image(data: bytes) -> messages_pb2.PromptPart:
    return messages_pb2.PromptPart(media=media_pb2.Media(modality="image", data=data))


def _part(prompt: str | Sequence[int]) -> messages_pb2.PromptPart:
    if isinstance(prompt, str):
        return messages_pb2.PromptPart(text=prompt)
    return messages_pb2.PromptPart(token_ids=messages_pb2.TokenIds(ids=prompt))
