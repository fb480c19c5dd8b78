"""``/v1/score`` and ``/score``, as vLLM has them: how well texts fit one another."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.openai.bodies import Body
from penstock_frontend.api.openai.context import context_of
from penstock_frontend.api.openai.endpoint import Answer, Call
from penstock_frontend.api.openai.pooling.input_fields import (
    Input,
    PoolingFields,
    PoolingUsage,
    inputs_of,
    usage_of,
)
from penstock_frontend.api.openai.pooling.truncation_fields import truncation_of
from penstock_frontend.call_types import ScoreRequest
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.calls.scoring import ScoringCalls

_NAMES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
"""What the two sides may be called."""


class ScoreBody(PoolingFields, kw_only=True):
    """The body. One of the pairs ``queries`` and ``documents``, ``queries`` and ``items``, ``text_1`` and ``text_2``, ``data_1``
    and ``data_2``: the first of each is one input, or as many as the second has.
    """

    queries: Input | None = None
    documents: Input | None = None
    items: Input | None = None
    text_1: Input | None = None
    text_2: Input | None = None
    data_1: Input | None = None
    data_2: Input | None = None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How well a pair fits."""

    index: int
    object: str = "score"
    score: float


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, in the order of the pairs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: Sequence[Score]
    usage: PoolingUsage


class Scores:
    """The handler."""

    def __init__(self, llm: AsyncLLM, scoring: ScoringCalls) -> None:
        self._llm = llm
        self._scoring = scoring

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Score the pairs. Raises RequestFailed."""
        body = await given.decode(ScoreBody)
        truncation = truncation_of(body)
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
                f"{first} has {len(queries)} entries, {second} has {len(documents)}; {first} must have 1 or as many",
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
            context=context,
        )
        given.close()  # admission is the first thing that happens
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
    """What is compared, and how the body calls it. Raises InvalidArgument unless that is one of ``_NAMES`` and nothing else."""
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
        f"{' and '.join(given) or 'nothing'} {'are' if len(given) > 1 else 'is'} set; one of these pairs must be: {known}",
        field=field,
    )
