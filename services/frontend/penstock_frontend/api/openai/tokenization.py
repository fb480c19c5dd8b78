"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from collections.abc import Sequence

import msgspec

from penstock_common.errors import RequestFailed
from penstock_frontend.api.openai.body import decode
from penstock_frontend.api.openai.endpoint import Answer, Call
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.api.openai.sampling import TokenId
from penstock_frontend.async_llm import AsyncLLM


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of ``/tokenize``."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/tokenize``. ``max_model_len`` is null while no engine is up."""

    count: int
    max_model_len: int | None
    tokens: Sequence[int]
    token_strs: Sequence[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of ``/detokenize``."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


class Text(msgspec.Struct, frozen=True):
    """The answer of ``/detokenize``."""

    prompt: str


class Tokenization:
    """The handlers."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def tokenize(self, call: Call, raw: bytes) -> Answer:
        """Text to token ids. Raises RequestFailed."""
        body = decode(raw, TokenizeRequest)
        self._llm.inputs.check_model(body.model or "")
        try:
            encoded = await self._llm.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        except RequestFailed as e:
            raise renamed(e, {"text": "prompt"}) from e
        limits = self._llm.engines.limits
        return Tokens(
            count=len(encoded.ids),
            max_model_len=limits.max_model_len if limits else None,
            tokens=encoded.ids,
            token_strs=encoded.tokens if body.return_token_strs else None,
        )

    async def detokenize(self, call: Call, raw: bytes) -> Answer:
        """Token ids to text. Raises RequestFailed."""
        body = decode(raw, DetokenizeRequest)
        self._llm.inputs.check_model(body.model or "")
        try:
            text = await self._llm.decode(body.tokens, skip_special_tokens=body.skip_special_tokens is True)
        except RequestFailed as e:
            raise renamed(e, {"token_ids": "tokens"}) from e
        return Text(text)
