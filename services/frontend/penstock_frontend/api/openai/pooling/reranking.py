"""``/rerank``, ``/v1/rerank`` and ``/v2/rerank``: documents by how well they fit a query, as Jina and Cohere have it."""

from collections.abc import Sequence

import msgspec

from penstock_frontend.api.openai.bodies import Body
from penstock_frontend.api.openai.body_fields import check_range
from penstock_frontend.api.openai.context import context_of
from penstock_frontend.api.openai.endpoint import Answer, Call
from penstock_frontend.api.openai.pooling.input_fields import PoolingFields, PoolingUsage, usage_of
from penstock_frontend.api.openai.pooling.truncation_fields import truncation_of
from penstock_frontend.call_types import ScoreRequest
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.calls.scoring import ScoringCalls

_INT32_MAX = 2**31 - 1


class DocumentBody(msgspec.Struct, frozen=True):
    """A document as an object. What else it has is not read."""

    text: str


class RerankBody(PoolingFields, kw_only=True):
    """The body. ``documents``: texts, or objects with ``text``. ``top_n``: null or 0 for all of them; ``return_documents`` false
    leaves their texts out of the answer.
    """

    query: str | DocumentBody
    documents: list[str | DocumentBody]
    top_n: int | None = None
    return_documents: bool | None = None


class RankedDocument(msgspec.Struct, frozen=True):
    """A document."""

    text: str


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A document's place in the body, and how well it fits."""

    index: int
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, the best first. Documents that fit alike stay in their order."""

    id: str
    model: str
    usage: PoolingUsage
    results: Sequence[Ranked]


class Reranking:
    """The handler."""

    def __init__(self, llm: AsyncLLM, scoring: ScoringCalls) -> None:
        self._llm = llm
        self._scoring = scoring

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Rank the documents. Raises RequestFailed."""
        body = await given.decode(RerankBody)
        truncation = truncation_of(body)
        check_range("top_n", body.top_n, 0, _INT32_MAX)
        context = context_of(call, "rerank", body)
        model = self._llm.inputs.check_model(context.model, context.lora)
        texts = [_text(document) for document in body.documents]
        self._llm.pooling.inputs.check_count(len(texts), field="documents")
        request = ScoreRequest(
            queries=[_text(body.query)],
            query_fields=["query"],
            documents=texts,
            document_fields=[f"documents[{index}]" for index in range(len(texts))],
            use_activation=body.use_activation is not False,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation=truncation,
            context=context,
        )
        given.close()  # admission is the first thing that happens
        result = await self._scoring.run(request)
        order = sorted(range(len(texts)), key=result.scores.__getitem__, reverse=True)
        shown = body.return_documents is not False
        results = [
            Ranked(
                index=index,
                document=RankedDocument(texts[index]) if shown else msgspec.UNSET,
                relevance_score=result.scores[index],
            )
            for index in order[: body.top_n or None]
        ]
        return Ranking(id=result.request_id, model=model, usage=usage_of(result.prompt_tokens), results=results)


def _text(document: str | DocumentBody) -> str:
    return document if isinstance(document, str) else document.text
