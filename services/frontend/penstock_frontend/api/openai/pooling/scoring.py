"""Routes ``/score`` and ``/rerank``: scores of pairs of texts, as in vLLM, Jina and Cohere."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.http.endpoint import Answer, Call
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.openai.body_fields import check_range
from penstock_frontend.api.openai.context import context_of
from penstock_frontend.api.openai.pooling.fields import (
    Input,
    PoolingFields,
    PoolingUsage,
    inputs_of,
    truncation_of,
    usage_of,
)
from penstock_frontend.call_types import ScoreRequest
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.calls.scoring import ScoringCalls

# The code below serves ``/v1/score`` and ``/score``, as in vLLM.

_INT32_MAX = 2**31 - 1
_NAMES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
"""Possible names of the two fields with the first and the second texts of the pairs."""


class PairFields(PoolingFields, kw_only=True):
    """Fields that the bodies of ``/score`` and ``/rerank`` share.

    ``prompt_name`` is the name of the model's prompt for the first texts of the pairs. ``max_tokens_per_query`` and
    ``max_tokens_per_doc`` (Cohere, vLLM) are the numbers of tokens to keep at the start of the first and the second
    texts; null and 0 mean all tokens.
    """

    prompt_name: str | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None

    def check_lengths(self) -> None:
        """Raise InvalidArgument if a number of tokens is out of range."""
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            check_range(name, getattr(self, name), 0, _INT32_MAX)


class ScoreBody(PairFields, kw_only=True):
    """Request body of ``/score``.

    One of these pairs of fields must be set: ``queries`` and ``documents``, ``queries`` and ``items``, ``text_1`` and
    ``text_2``, ``data_1`` and ``data_2``. The first field has one input, or as many inputs as the second field.
    """

    queries: Input | None = None
    documents: Input | None = None
    items: Input | None = None
    text_1: Input | None = None
    text_2: Input | None = None
    data_1: Input | None = None
    data_2: Input | None = None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Score of one pair of texts."""

    index: int
    object: str = "score"
    score: float


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/score``, with the scores in the order of the pairs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: Sequence[Score]
    usage: PoolingUsage


class Scores:
    """Handler of ``/score``."""

    def __init__(self, llm: AsyncLLM, scoring: ScoringCalls) -> None:
        self._llm = llm
        self._scoring = scoring

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Compute the scores of the pairs. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(ScoreBody)
        truncation = truncation_of(body)
        body.check_lengths()
        context = context_of(call, "score", body)
        model = self._llm.inputs.check_model(context.model, context.lora)
        sides = _sides(body)
        queries, query_fields = inputs_of(sides.queries, field=sides.names[0])
        documents, document_fields = inputs_of(sides.documents, field=sides.names[1])
        self._llm.pooling.inputs.check_count(len(queries), field=sides.names[0])
        self._llm.pooling.inputs.check_count(len(documents), field=sides.names[1])
        if len(queries) not in (1, len(documents)):
            first, second = sides.names
            raise InvalidArgument(
                f"{first} has {len(queries)} entries, but {second} has {len(documents)}; {first} must have 1 entry, or the "
                "same number",
                field=first,
            )
        request = ScoreRequest(
            queries=queries,
            query_fields=query_fields,
            documents=documents,
            document_fields=document_fields,
            use_activation=body.use_activation is not False,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation=truncation,
            query_prompt=self._llm.pooling.inputs.prompts.text(body.prompt_name, None),
            max_query_tokens=body.max_tokens_per_query or None,
            max_document_tokens=body.max_tokens_per_doc or None,
            context=context,
        )
        given.close()  # the call below admits the request before it does any other work
        result = await self._scoring.run(request)
        return ScoreList(
            id=result.request_id,
            created=int(time.time()),
            model=model,
            data=[Score(index=index, score=score) for index, score in enumerate(result.scores)],
            usage=usage_of(result.prompt_tokens),
        )


class _Sides(NamedTuple):
    names: tuple[str, str]
    queries: Input
    documents: Input


def _sides(body: ScoreBody) -> _Sides:
    """Return the first and the second texts of the pairs, and the names of their fields in the body.

    Raises InvalidArgument if no pair of ``_NAMES`` is set, or if several fields of different pairs are set.
    """
    given = [name for name in dict.fromkeys(sum(_NAMES, ())) if getattr(body, name) is not None]
    for names in _NAMES:
        if set(given) == set(names):
            return _Sides(names, getattr(body, names[0]), getattr(body, names[1]))
    missing = next((second for first, second in _NAMES if given == [first]), "")
    if missing:
        raise InvalidArgument(f"{missing} is not set", field=missing, reason="MISSING_FIELD")
    known = ", ".join(f"{first} and {second}" for first, second in _NAMES)
    field = given[0] if given else "queries"
    raise InvalidArgument(
        f"{' and '.join(given) or 'nothing'} {'are' if len(given) > 1 else 'is'} set; one of these pairs of fields "
        f"must be set: {known}",
        field=field,
    )


# The code below serves ``/rerank``, ``/v1/rerank`` and ``/v2/rerank``, as in Jina and Cohere.


class DocumentBody(msgspec.Struct, frozen=True):
    """A document in the form of an object with the field ``text``. Other fields of the object are ignored."""

    text: str


class RerankBody(PairFields, kw_only=True):
    """Request body of ``/rerank``.

    ``documents`` are texts, or objects with ``text``. If ``top_n`` is null or 0, the answer has all documents. If
    ``return_documents`` is false, the answer does not have the texts of the documents.

    ``texts``, ``return_text`` and ``raw_scores`` are TEI's names. With ``texts``, the answer has TEI's form.
    """

    query: str | DocumentBody
    documents: list[str | DocumentBody] | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    texts: list[str] | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None


class RankedDocument(msgspec.Struct, frozen=True):
    """Text of a document in the answer."""

    text: str


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """Index of a document in the body, and its score."""

    index: int
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/rerank``, sorted by score, highest first. Documents with equal scores are in the order of the body."""

    id: str
    model: str
    usage: PoolingUsage
    results: Sequence[Ranked]


class RankedText(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of the answer in TEI's form. The answer is a list, sorted by score, highest first."""

    index: int
    text: str | msgspec.UnsetType = msgspec.UNSET
    score: float


class Reranking:
    """Handler of ``/rerank``."""

    def __init__(self, llm: AsyncLLM, scoring: ScoringCalls) -> None:
        self._llm = llm
        self._scoring = scoring

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Rank the documents by their score for the query. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(RerankBody)
        truncation = truncation_of(body)
        check_range("top_n", body.top_n, 0, _INT32_MAX)
        body.check_lengths()
        context = context_of(call, "rerank", body)
        model = self._llm.inputs.check_model(context.model, context.lora)
        name, texts = _documents(body)
        self._llm.pooling.inputs.check_count(len(texts), field=name)
        request = ScoreRequest(
            queries=[_text(body.query)],
            query_fields=["query"],
            documents=texts,
            document_fields=[f"{name}[{index}]" for index in range(len(texts))],
            use_activation=body.use_activation is not False and not body.raw_scores,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation=truncation,
            query_prompt=self._llm.pooling.inputs.prompts.text(body.prompt_name, None),
            max_query_tokens=body.max_tokens_per_query or None,
            max_document_tokens=body.max_tokens_per_doc or None,
            context=context,
        )
        given.close()  # the call below admits the request before it does any other work
        result = await self._scoring.run(request)
        order = sorted(range(len(texts)), key=result.scores.__getitem__, reverse=True)
        if body.texts is not None:
            return [
                RankedText(
                    index=index, text=texts[index] if body.return_text else msgspec.UNSET, score=result.scores[index]
                )
                for index in order[: body.top_n or None]
            ]
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


def _documents(body: RerankBody) -> tuple[str, list[str]]:
    """Return the name of the field with the documents, and their texts. Raises InvalidArgument."""
    if body.texts is not None:
        if body.documents is not None:
            raise InvalidArgument("documents and texts are both set; set only one of them", field="texts")
        return "texts", body.texts
    if body.documents is None:
        raise InvalidArgument("documents is not set", field="documents", reason="MISSING_FIELD")
    return "documents", [_text(document) for document in body.documents]


def _text(document: str | DocumentBody) -> str:
    return document if isinstance(document, str) else document.text
