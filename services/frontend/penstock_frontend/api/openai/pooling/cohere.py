"""Route ``/v2/embed`` of Cohere's API, which computes embeddings of texts. ``scoring.py`` serves Cohere's ``/v2/rerank``."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import msgspec

from penstock_common.errors import Unimplemented
from penstock_common.rpc.outputs import floats
from penstock_common.types.request import PoolingParams, PoolingTask, Vectors
from penstock_frontend.api.http.endpoint import Answer, Call
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.openai.body_fields import check_range, shown
from penstock_frontend.api.openai.pooling.fields import (
    PromptFields,
    in_base64,
    pooled,
    request_of,
    with_inputs,
    written,
)
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.loop_yield import NUMBERS_PER_TURN, Pace

_INT32_MAX = 2**31 - 1
_NUMBERS: dict[str, Callable[[Vectors], Any]] = {"float": floats, "base64": in_base64}
"""Functions that convert vectors, by embedding type."""


class CohereEmbedBody(PromptFields, kw_only=True):
    """Request body of ``/v2/embed``.

    ``embedding_types`` has ``float``, ``base64`` or both; the default is ``float``. ``max_tokens`` is the maximum number
    of tokens of a text, and ``output_dimension`` the number of dimensions. Longer texts are truncated at their end,
    unless ``truncate`` is ``START`` or ``NONE``.
    """

    texts: list[str]
    embedding_types: list[str] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None


class EmbeddingsByType(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings of all texts, in the order of the texts, for each type that the client selects."""

    floats: Sequence[Sequence[float]] | msgspec.UnsetType = msgspec.field(name="float", default=msgspec.UNSET)
    base64: Sequence[str] | msgspec.UnsetType = msgspec.UNSET


class ApiVersion(msgspec.Struct, frozen=True):
    """Version of Cohere's API."""

    version: str = "2"


class BilledUnits(msgspec.Struct, frozen=True):
    """Number of tokens of all texts."""

    input_tokens: int


class EmbedMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Version and token count of an answer."""

    api_version: ApiVersion = ApiVersion()
    billed_units: BilledUnits


class CohereEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/v2/embed``."""

    id: str
    embeddings: EmbeddingsByType
    texts: Sequence[str]
    meta: EmbedMeta
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


class CohereEmbed:
    """Handler of ``/v2/embed``."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._pace = Pace(NUMBERS_PER_TURN)

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Compute the embeddings of the texts. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(CohereEmbedBody)
        check_range("output_dimension", body.output_dimension, 1, _INT32_MAX)
        check_range("max_tokens", body.max_tokens, 1, _INT32_MAX)
        types = dict.fromkeys(body.embedding_types or ["float"])
        if unknown := [name for name in types if name not in _NUMBERS]:
            raise Unimplemented(
                f"embedding_types has {shown(unknown[0])}; supported: {', '.join(_NUMBERS)}", field="embedding_types"
            )
        params = PoolingParams(task=PoolingTask.EMBED, dimensions=body.output_dimension)
        _, request = request_of(self._llm, call, "embd", body, params)
        # Cohere's API truncates texts unless the client says otherwise.
        request = msgspec.structs.replace(
            request,
            truncation=request.truncation or "end",
            truncate_prompt_tokens=request.truncate_prompt_tokens or body.max_tokens,
        )
        request = with_inputs(self._llm, request, cast("list[Any]", body.texts), field="texts")
        result, request_id = await pooled(self._llm, request, given)
        made = {
            # The JSON encoder copies a msgspec.Raw without changes.
            name: cast("Any", await written(result.outputs, self._pace, _NUMBERS[name], lambda _, vector: vector))
            for name in types
        }
        return CohereEmbeddings(
            id=request_id,
            embeddings=EmbeddingsByType(
                floats=made.get("float", msgspec.UNSET), base64=made.get("base64", msgspec.UNSET)
            ),
            texts=body.texts,
            meta=EmbedMeta(billed_units=BilledUnits(result.prompt_tokens)),
        )
