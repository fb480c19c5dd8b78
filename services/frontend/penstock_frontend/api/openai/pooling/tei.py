"""Routes of Hugging Face's text-embeddings-inference (TEI): ``/embed``, ``/embed_all``, ``/embed_sparse``,
``/predict`` and ``/similarity``.
``scoring.py`` serves TEI's form of ``/rerank``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument
from penstock_common.rpc.outputs import floats
from penstock_common.types.request import PoolingParams, PoolingTask, Vectors
from penstock_frontend.api.http.endpoint import Answer, Call
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.openai.body_fields import check_range
from penstock_frontend.api.openai.context import context_of
from penstock_frontend.api.openai.pooling.fields import (
    Input,
    PromptFields,
    TruncationFields,
    num_queries_of,
    pooled,
    prompt_of,
    request_of,
    rows_of,
    truncation_of,
    with_inputs,
    written,
)
from penstock_frontend.call_types import ScoreRequest
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.calls.scoring import ScoringCalls
from penstock_frontend.loop_yield import NUMBERS_PER_TURN, Pace
from penstock_frontend.processing.outputs.pooling import vectors_of

_INT32_MAX = 2**31 - 1


class EmbedAllBody(PromptFields, kw_only=True):
    """Request body of ``/embed_all``. ``inputs`` is a text, token ids, or a list of texts or of lists of token ids."""

    inputs: Input


class EmbedBody(EmbedAllBody, kw_only=True):
    """Request body of ``/embed``. If ``normalize`` is false, vectors keep the length that the model gives them."""

    normalize: bool | None = None
    dimensions: int | None = None


class Embed:
    """Handler of ``/embed``, which answers with one vector for each input."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._pace = Pace(NUMBERS_PER_TURN)

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Compute the embeddings of the inputs. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(EmbedBody)
        check_range("dimensions", body.dimensions, 1, _INT32_MAX)
        params = PoolingParams(
            task=PoolingTask.EMBED, dimensions=body.dimensions, normalize=body.normalize is not False
        )
        return await _vectors(self._llm, self._pace, call, given, body, params, floats)


class EmbedAll:
    """Handler of ``/embed_all``, which answers with one vector for each token of each input."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._pace = Pace(NUMBERS_PER_TURN)

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Compute the embeddings of all tokens. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(EmbedAllBody)
        params = PoolingParams(task=PoolingTask.TOKEN_EMBED, normalize=False)
        return await _vectors(self._llm, self._pace, call, given, body, params, rows_of)


class SparseEntry(msgspec.Struct, frozen=True):
    """Weight of one token in a sparse embedding. ``index`` is the token's id."""

    index: int
    value: float


class EmbedSparse:
    """Handler of ``/embed_sparse``, which answers with the weights of the tokens of each input."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._pace = Pace(NUMBERS_PER_TURN)

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Compute the sparse embeddings of the inputs. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(EmbedAllBody)
        params = PoolingParams(task=PoolingTask.SPARSE_EMBED)
        return await _vectors(self._llm, self._pace, call, given, body, params, _entries)


def _entries(vectors: Vectors) -> list[SparseEntry]:
    numbers, count = floats(vectors), vectors.shape[1]
    return [SparseEntry(int(numbers[i]), numbers[count + i]) for i in range(count)]


async def _vectors(
    llm: AsyncLLM,
    pace: Pace,
    call: Call,
    given: Body,
    body: EmbedAllBody,
    params: PoolingParams,
    numbers: Callable[[Vectors], Any],
) -> list[Any]:
    _, request = request_of(llm, call, "embd", body, params)
    request = with_inputs(llm, request, body.inputs, field="inputs")
    request = msgspec.structs.replace(request, num_queries=num_queries_of(body, len(request.inputs)))
    result, _ = await pooled(llm, request, given)
    return list(await written(result.outputs, pace, numbers, lambda _, vectors: vectors))


# Classes.


class PredictBody(TruncationFields, kw_only=True):
    """Request body of ``/predict``.

    ``inputs`` is a text, a list of one text or of a pair of texts, or a list of such lists. If ``raw_scores`` is true,
    the answer has the scores before the activation.
    """

    inputs: str | list[str | list[str]]
    raw_scores: bool | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Score of one class of an input."""

    score: float
    label: str


class Predict:
    """Handler of ``/predict``, which answers with the classes of each input, highest score first."""

    def __init__(self, llm: AsyncLLM, *, labels: Sequence[str]) -> None:
        self._llm = llm
        self._labels = labels

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Compute the classes of the inputs. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(PredictBody)
        params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=not body.raw_scores)
        _, request = request_of(self._llm, call, "classify", body, params)
        many = not isinstance(body.inputs, str) and bool(body.inputs) and isinstance(body.inputs[0], list)
        entries: Sequence[Any] = body.inputs if many else [body.inputs]
        self._llm.pooling.inputs.check_count(len(entries) if body.inputs else 0, field="inputs")
        fields = [f"inputs[{index}]" if many else "inputs" for index in range(len(entries))]
        texts = [_texts(entry, field) for entry, field in zip(entries, fields, strict=True)]
        if len({len(each) for each in texts}) > 1:
            raise InvalidArgument(
                "inputs has single texts and pairs of texts; send them in different requests", field="inputs"
            )
        request = msgspec.structs.replace(
            request,
            inputs=[each[0] for each in texts],
            seconds=[each[1] for each in texts if len(each) > 1],
            fields=fields,
        )
        result, _ = await pooled(self._llm, request, given)
        classes = [self._classes(floats(vectors_of(output))) for output in result.outputs]
        return list(classes if many else classes[0])

    def _classes(self, scores: Sequence[float]) -> list[Prediction]:
        labels = [label or f"LABEL_{index}" for index, label in enumerate(self._labels)]
        labels += [f"LABEL_{index}" for index in range(len(labels), len(scores))]
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        return [Prediction(score=scores[index], label=labels[index]) for index in order]


def _texts(entry: object, field: str) -> list[str]:
    """Return the text or the pair of texts of an entry of ``inputs``. Raises InvalidArgument."""
    texts = [entry] if isinstance(entry, str) else entry
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument(f"{field} must be a text, or a list of one or two texts", field=field)
    if len(texts) not in (1, 2):
        raise InvalidArgument(f"{field} has {len(texts)} texts; it must have one text or a pair of texts", field=field)
    return texts


# Similarity of sentences.


class SentencesBody(msgspec.Struct, frozen=True):
    """A sentence, and the sentences to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, frozen=True):
    """Options of ``/similarity``, which have the same meaning as the fields of the body with these names."""

    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None


class SimilarityBody(PromptFields, kw_only=True):
    """Request body of ``/similarity``. A prompt is added before all sentences. In TEI, the options are fields of
    ``parameters``, which replace the fields of the body.
    """

    inputs: SentencesBody
    parameters: SimilarityParameters | None = None


class Similarity:
    """Handler of ``/similarity``, which answers with a score for each sentence."""

    def __init__(self, llm: AsyncLLM, scoring: ScoringCalls) -> None:
        self._llm = llm
        self._scoring = scoring

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Compare the sentences. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(SimilarityBody)
        options = {} if body.parameters is None else msgspec.structs.asdict(body.parameters)
        body = msgspec.structs.replace(body, **{name: value for name, value in options.items() if value is not None})
        truncation = truncation_of(body)
        context = context_of(call, "score", body)
        self._llm.inputs.check_model(context.model, context.lora)
        prompt = prompt_of(self._llm, body)
        if prompt is None:
            prompt = self._llm.pooling.inputs.prompts.default_text
        sentences = body.inputs.sentences
        self._llm.pooling.inputs.check_count(len(sentences), field="inputs.sentences")
        request = ScoreRequest(
            queries=[body.inputs.source_sentence],
            query_fields=["inputs.source_sentence"],
            documents=sentences,
            document_fields=[f"inputs.sentences[{index}]" for index in range(len(sentences))],
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation=truncation,
            query_prompt=prompt,
            document_prompt=prompt,
            context=context,
        )
        given.close()  # the call below admits the request before it does any other work
        result = await self._scoring.run(request)
        return list(result.scores)
