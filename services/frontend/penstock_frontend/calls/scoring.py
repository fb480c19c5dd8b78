"""Scoring calls. Their scores are computed by a cross-encoder, or from embeddings: cosine similarities, or the sums of
late-interaction models.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.rpc import outputs as parts
from penstock_common.types.request import PoolingParams, PoolingTask
from penstock_frontend.call_types import PoolingRequest, PoolingResult, Prompt, ScoreRequest, ScoreResult
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.loop_yield import NUMBERS_PER_TURN, PRODUCTS_PER_TURN, Pace
from penstock_frontend.processing.chat.pair_prompts import PairPrompts
from penstock_frontend.processing.outputs.pooling import vectors_of
from penstock_frontend.processing.prompts.late_interaction import matrix
from penstock_frontend.processing.prompts.named_prompts import NamedPrompts, check_texts, with_prompt
from penstock_frontend.processing.prompts.pooling import check_scores


class ScoringCalls:
    """Runs a ScoreRequest as a pooling request on engines, and computes the scores from the results."""

    def __init__(self, llm: AsyncLLM, pairs: PairPrompts | None = None) -> None:
        """Create the component. ``pairs`` renders the prompts of a model that generates, or is None for other models."""
        self._llm = llm
        self._prompts = pairs
        self._pace = Pace(NUMBERS_PER_TURN)
        self._product_pace = Pace(PRODUCTS_PER_TURN)

    async def run(self, request: ScoreRequest) -> ScoreResult:
        """Return the scores of the pairs of query and document.

        If the model is a cross-encoder, engines compute the scores. If the model embeds texts, a score is the cosine of
        the embeddings of query and document. If the model embeds only tokens, a score is the sum, over the tokens of the
        query, of the largest dot product with a token of the document. Raises RequestFailed if the request is refused or fails.
        """
        self._llm.inputs.check_model(request.context.model, request.context.lora)
        reads_pairs = await self._llm.reads_pairs(request.context)
        inputs = self._llm.pooling.inputs
        if (longest := request.max_query_tokens) is not None:
            queries = await inputs.shortened(request.queries, request.query_fields, longest)
            request = msgspec.structs.replace(request, queries=queries)
        if (longest := request.max_document_tokens) is not None:
            documents = await inputs.shortened(request.documents, request.document_fields, longest)
            request = msgspec.structs.replace(request, documents=documents)
        if reads_pairs:
            prompt = inputs.prompts.default_text if request.query_prompt is None else request.query_prompt
            if self._prompts is None:
                pairs = _pairs(request, prompt)
            else:
                pairs = await _rendered(_pairs(request), self._prompts, prompt)
            result, request_id = await self._llm.run_pooling(pairs)
            scores = [parts.floats(vectors_of(output))[0] for output in result.outputs]
        else:
            capabilities = self._llm.engines.view.capabilities
            check_scores(capabilities)
            if not request.use_activation:
                raise InvalidArgument(
                    "use_activation is false, but this model's scores are computed from embeddings, to which no activation "
                    "is applied; remove use_activation",
                    field="use_activation",
                )
            of_tokens = PoolingTask.EMBED.name.lower() not in capabilities
            result, request_id = await self._llm.run_pooling(_similarity(request, inputs.prompts, of_tokens=of_tokens))
            scores = await (self._sums if of_tokens else self._cosines)(result, len(request.queries))
        return ScoreResult(request_id=request_id, scores=scores, prompt_tokens=result.prompt_tokens)

    async def _cosines(self, result: PoolingResult, num_queries: int) -> list[float]:
        """Return, for each document, the cosine of the document's embedding and of its query's embedding.

        In ``result``, the vectors of the queries come first, and all vectors have unit length. The method computes in
        parts, and lets the event loop run other tasks between two parts.
        """
        queries, cosines = result.outputs[:num_queries], []
        query = parts.floats(vectors_of(queries[0]))
        for index, output in enumerate(result.outputs[num_queries:]):
            await self._pace.take(len(query))
            if 0 < index < num_queries:
                query = parts.floats(vectors_of(queries[index]))
            document = parts.floats(vectors_of(output))
            cosines.append(sum(a * b for a, b in zip(query, document, strict=True)))
        return cosines

    async def _sums(self, result: PoolingResult, num_queries: int) -> list[float]:
        """Return the score of a late-interaction model for each document: the sum of the largest dot products of the
        query's tokens with tokens of the document.

        The outputs have the same order as in ``_cosines``. The method computes a few tokens of a document at a time, and
        lets the event loop run other tasks in between.
        """
        queries, scores = [matrix(vectors_of(output)) for output in result.outputs[:num_queries]], []
        for index, output in enumerate(result.outputs[num_queries:]):
            query, document = queries[index if num_queries > 1 else 0], matrix(vectors_of(output))
            size = max(1, PRODUCTS_PER_TURN // query.size)
            largest = np.full(len(query), -np.inf, dtype=np.float32)
            for start in range(0, len(document), size):
                part = document[start : start + size]
                await self._product_pace.take(query.size * len(part))
                largest = np.maximum(largest, (query @ part.T).max(axis=1))
            scores.append(float(largest.sum(dtype=np.float64)))
        return scores


def _pairs(request: ScoreRequest, prompt: str = "") -> PoolingRequest:
    queries = [prompt + query for query in _texts(request.queries, request.query_fields)]
    documents = _texts(request.documents, request.document_fields)
    return PoolingRequest(
        inputs=queries * len(documents) if len(queries) == 1 else queries,
        seconds=documents,
        fields=request.document_fields,
        params=PoolingParams(task=PoolingTask.SCORE, use_activation=request.use_activation),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation=request.truncation,
        context=request.context,
    )


async def _rendered(pairs: PoolingRequest, prompts: PairPrompts, instruction: str) -> PoolingRequest:
    """Return the request with one prompt for each pair, which includes the instruction. Raises InvalidArgument, and
    Unimplemented for truncation, because the end of a prompt asks for the score.
    """
    if pairs.truncate_prompt_tokens is not None or pairs.truncation in ("start", "end"):
        raise Unimplemented(
            "pairs of texts cannot be truncated for a model that generates scores; send shorter texts",
            field="truncate_prompt_tokens",
        )
    texts = [(str(first), second) for first, second in zip(pairs.inputs, pairs.seconds, strict=True)]
    return msgspec.structs.replace(
        pairs, inputs=await prompts.render(texts, instruction), seconds=(), truncation="none", add_special_tokens=False
    )


def _similarity(request: ScoreRequest, named: NamedPrompts, *, of_tokens: bool) -> PoolingRequest:
    """Return the request for the embeddings of all texts, with the model's prompts for queries and documents before the
    texts. Raises InvalidArgument if the client selects a prompt for queries that are token ids.
    """
    if request.query_prompt is not None:
        check_texts(request.queries, request.query_fields)
    query = named.query if request.query_prompt is None else request.query_prompt
    document = named.document if request.document_prompt is None else request.document_prompt
    return PoolingRequest(
        inputs=[
            *(with_prompt(query, text) for text in request.queries),
            *(with_prompt(document, text) for text in request.documents),
        ],
        fields=[*request.query_fields, *request.document_fields],
        params=PoolingParams(task=PoolingTask.TOKEN_EMBED if of_tokens else PoolingTask.EMBED, normalize=True),
        num_queries=len(request.queries) if of_tokens else None,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation=request.truncation,
        prompt="",
        context=request.context,
    )


def _texts(prompts: Sequence[Prompt], fields: Sequence[str]) -> list[str]:
    """Return the prompts as texts for a cross-encoder. Raises InvalidArgument if a prompt is empty or is not a text."""
    texts = []
    for prompt, field in zip(prompts, fields, strict=True):
        if not isinstance(prompt, str):
            raise InvalidArgument(
                f"{field} is set, but this model is a cross-encoder, which scores only texts", field=field
            )
        if not prompt:
            raise InvalidArgument(f"{field} is empty: there is nothing to compute", field=field)
        texts.append(prompt)
    return texts
