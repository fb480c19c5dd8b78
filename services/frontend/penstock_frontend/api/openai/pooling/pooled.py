"""Routes ``/pooling`` and ``/classify``, as in vLLM: outputs of pooling models, and classes of inputs."""

import time
from collections.abc import Sequence
from typing import Literal, cast

import msgspec

from penstock_common.errors import InvalidArgument
from penstock_common.rpc.outputs import floats
from penstock_common.types.outputs import EngineCoreOutput
from penstock_common.types.request import PoolingParams, PoolingTask
from penstock_frontend.api.http.endpoint import Answer, Call
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.openai.body_fields import check_range, shown
from penstock_frontend.api.openai.pooling.fields import (
    Input,
    PoolingFields,
    PoolingUsage,
    PromptFields,
    in_base64,
    normalize_of,
    num_queries_of,
    pooled,
    request_of,
    rows_of,
    usage_of,
    with_inputs,
    written,
)
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.loop_yield import NUMBERS_PER_TURN, Pace
from penstock_frontend.processing.outputs.pooling import vectors_of
from penstock_frontend.processing.prompts.pooling import check_pools

_INT32_MAX = 2**31 - 1
_UNASKED = (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY, PoolingTask.EMBED, PoolingTask.CLASSIFY)
"""Tasks from which the task is chosen if the body names none, in order of preference. The first task that the model
supports is used.
"""
_VECTORS = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
_OF_NUMBERS = ("dimensions", "normalize")
_OF_VECTORS = (*_OF_NUMBERS, "prompt_name", "input_type")


class PoolingBody(PromptFields, kw_only=True):
    """Request body of ``/pooling``. By default, ``task`` is one embedding for each token, if the model supports this
    task.

    ``dimensions``, ``normalize``, ``prompt_name`` and ``input_type`` apply to embeddings. For embeddings,
    ``use_activation`` means the same as ``normalize``.
    """

    input: Input
    task: Literal["embed", "classify", "token_embed", "token_classify", "sparse_embed"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one input: numbers, a list of numbers for each token, or all numbers as float32 bytes (little-endian)
    in base64. A sparse embedding is a list of token ids and a list of their weights.
    """

    index: int
    object: str = "pooling"
    data: Sequence[float | list[float]] | str


class PooledList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/pooling``, with the results in the order of the inputs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: Sequence[Pooled]
    usage: PoolingUsage


class Pooling:
    """Handler of ``/pooling``."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._pace = Pace(NUMBERS_PER_TURN)

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Compute the results of the inputs. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(PoolingBody)
        check_range("dimensions", body.dimensions, 1, _INT32_MAX)
        model, request = request_of(self._llm, call, "pool", body, PoolingParams(task=PoolingTask.EMBED))
        request = with_inputs(self._llm, request, body.input)
        # Only an engine knows which tasks the model supports.
        await self._llm.engines.wait_until_usable(request.context.deadline, tenant=request.context.tenant)
        request = msgspec.structs.replace(
            request, params=self._params(body), num_queries=num_queries_of(body, len(request.inputs))
        )
        result, request_id = await pooled(self._llm, request, given)
        # The JSON encoder copies a msgspec.Raw without changes.
        numbers = in_base64 if body.encoding_format == "base64" else rows_of
        data = cast(
            Sequence[Pooled],
            await written(
                result.outputs, self._pace, numbers, lambda index, vectors: Pooled(index=index, data=vectors)
            ),
        )
        return PooledList(
            id=request_id,
            created=int(time.time()),
            model=model,
            data=data,
            usage=usage_of(result.prompt_tokens),
        )

    def _params(self, body: PoolingBody) -> PoolingParams:
        served = self._llm.engines.view.capabilities
        if body.task is None:
            check_pools(served)
        unasked = next((task for task in _UNASKED if task.name.lower() in served), PoolingTask.TOKEN_EMBED)
        task = PoolingTask[body.task.upper()] if body.task else unasked
        if task in _VECTORS:
            normalize = normalize_of(body.normalize, body.use_activation)
            return PoolingParams(task=task, dimensions=body.dimensions, normalize=normalize)
        refused = _OF_NUMBERS if task is PoolingTask.SPARSE_EMBED else _OF_VECTORS
        for name in refused:
            if (value := getattr(body, name)) is not None:
                raise InvalidArgument(
                    f"{name} is {shown(value)}, but it has no meaning for {task.name.lower()}; leave it out", field=name
                )
        return PoolingParams(task=task, use_activation=body.use_activation is not False)


# The code below serves ``/classify``.


class ClassificationBody(PoolingFields, kw_only=True):
    """Request body of ``/classify``. ``input`` is a text, token ids, or a list of texts or of lists of token ids."""

    input: Input


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """Classes of one input.

    ``probs`` has the probabilities in the order of the model's labels. ``label`` is the label of the most likely class,
    or null if the model has no labels.
    """

    index: int
    label: str | None
    probs: Sequence[float]
    num_classes: int


class ClassificationList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/classify``, with the classes in the order of the inputs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: Sequence[Classification]
    usage: PoolingUsage


class Classifications:
    """Handler of ``/classify``. ``labels`` are the names of the model's classes, in the order of the class indices."""

    def __init__(self, llm: AsyncLLM, *, labels: Sequence[str]) -> None:
        self._llm = llm
        self._labels = labels

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Compute the classes of the inputs. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(ClassificationBody)
        params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=body.use_activation is not False)
        model, request = request_of(self._llm, call, "classify", body, params)
        request = with_inputs(self._llm, request, body.input)
        result, request_id = await pooled(self._llm, request, given)
        return ClassificationList(
            id=request_id,
            created=int(time.time()),
            model=model,
            data=[self._classified(index, output) for index, output in enumerate(result.outputs)],
            usage=usage_of(result.prompt_tokens),
        )

    def _classified(self, index: int, output: EngineCoreOutput) -> Classification:
        probs = floats(vectors_of(output))
        best = max(range(len(probs)), key=probs.__getitem__)
        label = self._labels[best] if best < len(self._labels) else ""
        return Classification(index=index, label=label or None, probs=probs, num_classes=len(probs))
