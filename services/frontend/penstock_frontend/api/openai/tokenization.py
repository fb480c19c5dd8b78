"""Routes ``/tokenize`` and ``/detokenize``, as in vLLM."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_frontend.api.http.endpoint import Answer, Call
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.openai.conversation import (
    MediaIoBody,
    MessageBody,
    ToolBody,
    messages_of,
    options_of,
    tools_of,
)
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.api.openai.sampling_fields import TokenId
from penstock_frontend.api.tools import ToolChoice
from penstock_frontend.call_types import ChatRequest, GenerateRequest
from penstock_frontend.calls.chat import ChatCalls
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.processing.prompts.tokenizer import Encoded


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Request body of ``/tokenize``, with a ``prompt``, or with the ``messages`` of a conversation with other fields of
    a chat.
    """

    prompt: str | None = None
    messages: list[MessageBody] | None = None
    tools: list[ToolBody] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: MediaIoBody | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/tokenize``. ``max_model_len`` is null while no engine is connected."""

    count: int
    max_model_len: int | None
    tokens: Sequence[int]
    token_strs: Sequence[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Request body of ``/detokenize``."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


class Text(msgspec.Struct, frozen=True):
    """Answer of ``/detokenize``."""

    prompt: str


class Tokenization:
    """Handlers of ``/tokenize`` and ``/detokenize``."""

    def __init__(self, llm: AsyncLLM, chat: ChatCalls) -> None:
        self._llm = llm
        self._chat = chat

    async def tokenize(self, call: Call, given: Body) -> Answer:
        """Return the token ids of a text or of a conversation. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(TokenizeRequest)
        self._llm.inputs.check_model(body.model or "")
        request = await self._request(body)
        if body.add_special_tokens is not None:
            request = msgspec.structs.replace(request, add_special_tokens=body.add_special_tokens)
        encoded = await self._encoded(request, with_tokens=bool(body.return_token_strs))
        limits = self._llm.engines.view.limits
        return Tokens(
            count=len(encoded.ids),
            max_model_len=limits.max_model_len if limits else None,
            tokens=encoded.ids,
            token_strs=encoded.tokens if body.return_token_strs else None,
        )

    async def detokenize(self, call: Call, given: Body) -> Answer:
        """Return the text that token ids stand for. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(DetokenizeRequest)
        self._llm.inputs.check_model(body.model or "")
        try:
            text = await self._llm.decode(body.tokens, skip_special_tokens=body.skip_special_tokens is True)
        except RequestFailed as e:
            raise renamed(e, {"token_ids": "tokens"}) from e
        return Text(text)

    async def _encoded(self, request: GenerateRequest, *, with_tokens: bool) -> Encoded:
        """Return the token ids of a prompt. If ``with_tokens`` is set, also return the text of each id in the
        vocabulary.
        """
        if isinstance(request.prompt, str):
            add = request.add_special_tokens
            try:
                return await self._llm.encode(request.prompt, add_special_tokens=add, with_tokens=with_tokens)
            except RequestFailed as e:
                raise renamed(e, {"text": "prompt"}) from e
        if with_tokens:
            raise Unimplemented(
                "return_token_strs is not supported for prompts with media; leave it out", field="return_token_strs"
            )
        return Encoded(await self._llm.prompt_ids(request))

    async def _request(self, body: TokenizeRequest) -> GenerateRequest:
        """Return the request with the prompt to tokenize. The tokenizer adds no special tokens to a conversation,
        because the chat template writes them.
        """
        if (body.prompt is None) == (body.messages is None):
            raise InvalidArgument("exactly one of prompt and messages must be set", field="prompt")
        if body.messages is None:
            return GenerateRequest(prompt=body.prompt or "")
        request = ChatRequest(
            messages=messages_of(body.messages, options_of(body.mm_processor_kwargs, body.media_io_kwargs)),
            tools=tools_of(body.tools).chosen(ToolChoice("auto")).tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            template=body.chat_template or "",
            template_kwargs=body.chat_template_kwargs or {},
        )
        return await self._chat.renderer.render(request)
