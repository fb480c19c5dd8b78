"""Route ``/v1/embeddings``, which computes embeddings of inputs."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.rpc.outputs import floats
from penstock_common.types.request import PoolingParams, PoolingTask
from penstock_frontend.api.http.endpoint import Answer, Call
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.openai.body_fields import check_range, shown
from penstock_frontend.api.openai.conversation import MediaIoBody, MessageBody, messages_of, options_of
from penstock_frontend.api.openai.pooling.fields import (
    Input,
    PromptFields,
    in_base64,
    normalize_of,
    pooled,
    request_of,
    with_inputs,
    written,
)
from penstock_frontend.call_types import ChatRequest, PoolingRequest
from penstock_frontend.calls.chat import ChatCalls
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.loop_yield import NUMBERS_PER_TURN, Pace

_INT32 = 2**31
_ENCODINGS = ("float", "base64")


class EmbeddingRequest(PromptFields, kw_only=True):
    """Request body of ``/v1/embeddings``. ``input`` is a text, token ids, or a list of texts or of lists of token ids.

    Most other fields are those of vLLM. ``messages`` is a conversation that is the only input. ``normalize``, also
    called ``use_activation``, defaults to the model's setting. ``embedding_types``, a field of Cohere, is a list with
    one encoding, ``float`` or ``base64``.
    """

    input: Input | None = None
    messages: list[MessageBody] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: MediaIoBody | None = None
    cache_salt: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    embedding_types: list[str] | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding of one input: numbers, or float32 bytes (little-endian) in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/v1/embeddings``, with the embeddings in the order of the inputs."""

    id: str
    object: str = "list"
    data: Sequence[Embedding]
    model: str
    usage: EmbeddingUsage


class Embeddings:
    """Handler of ``/v1/embeddings``."""

    def __init__(self, llm: AsyncLLM, chat: ChatCalls) -> None:
        self._llm = llm
        self._chat = chat
        self._pace = Pace(NUMBERS_PER_TURN)

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Compute the embeddings of the inputs. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(EmbeddingRequest)
        check_range("dimensions", body.dimensions, 1, _INT32 - 1)
        as_text = _encoding_of(body) == "base64"
        normalize = normalize_of(body.normalize, body.use_activation)
        params = PoolingParams(task=PoolingTask.EMBED, dimensions=body.dimensions, normalize=normalize)
        model, request = request_of(self._llm, call, "embd", body, params)
        context = msgspec.structs.replace(request.context, cache_salt=body.cache_salt or "")
        request = msgspec.structs.replace(request, context=context)
        request = await self._with_inputs(request, body, given)
        result, request_id = await pooled(self._llm, request, given)
        usage = EmbeddingUsage(result.prompt_tokens, result.prompt_tokens)
        # The JSON encoder copies a msgspec.Raw without changes.
        data = cast(
            Sequence[Embedding],
            await written(
                result.outputs,
                self._pace,
                in_base64 if as_text else floats,
                lambda index, vector: Embedding(index=index, embedding=vector),
            ),
        )
        return EmbeddingList(id=request_id, data=data, model=model, usage=usage)

    async def _with_inputs(self, request: PoolingRequest, body: EmbeddingRequest, given: Body) -> PoolingRequest:
        if body.messages is None:
            if body.input is None:
                raise InvalidArgument("input is not set", field="input", reason="MISSING_FIELD")
            return with_inputs(self._llm, request, body.input)
        if body.input is not None:
            raise InvalidArgument("messages and input are both set; set only one of them", field="messages")
        if request.prompt is not None:
            name = "prompt_name" if body.input_type is None else "input_type"
            raise InvalidArgument(f"{name} and messages are both set; write the prompt in messages", field=name)
        options = options_of(body.mm_processor_kwargs, body.media_io_kwargs)
        messages = await given.converted(functools.partial(messages_of, body.messages, options))
        rendered = await self._chat.renderer.render(
            ChatRequest(
                messages=messages,
                add_generation_prompt=bool(body.add_generation_prompt),
                continue_final_message=bool(body.continue_final_message),
                template_kwargs=body.chat_template_kwargs or {},
                context=request.context,
            )
        )
        return msgspec.structs.replace(
            request,
            inputs=[rendered.prompt],
            fields=["messages"],
            # the chat template writes the special tokens, so the tokenizer must not add them
            add_special_tokens=bool(body.add_special_tokens),
            prompt="",
        )


def _encoding_of(body: EmbeddingRequest) -> str | None:
    """Return the encoding in which the answer has the embeddings.

    Raises InvalidArgument if two fields set different encodings, and Unimplemented if one field lists several
    encodings.
    """
    types = body.embedding_types
    if not types:
        return body.encoding_format
    if len(types) > 1 or types[0] not in _ENCODINGS:
        raise Unimplemented(
            f'embedding_types is {shown(types)}; it must be ["float"] or ["base64"]', field="embedding_types"
        )
    if body.encoding_format not in (None, types[0]):
        raise InvalidArgument(
            f"encoding_format is {shown(body.encoding_format)} and embedding_types is {shown(types)}; set only one of them",
            field="embedding_types",
        )
    return types[0]
