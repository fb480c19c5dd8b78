"""``/classify``, as vLLM has it: classes of inputs."""

import time
from collections.abc import Sequence

import msgspec

from penstock_common.errors import RequestFailed
from penstock_common.rpc.outputs import floats
from penstock_common.types.outputs import EngineCoreOutput
from penstock_common.types.pooling import PoolingParams, PoolingTask
from penstock_frontend.api.openai.bodies import Body
from penstock_frontend.api.openai.context import context_of
from penstock_frontend.api.openai.endpoint import Answer, Call
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.api.openai.pooling.input_fields import (
    Input,
    PoolingFields,
    PoolingUsage,
    inputs_of,
    usage_of,
)
from penstock_frontend.api.openai.pooling.truncation_fields import truncation_of
from penstock_frontend.call_types import PoolingRequest
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.processing.pooling.outputs import vectors_of


class ClassificationBody(PoolingFields, kw_only=True):
    """The body. ``input``: a text, texts, token ids, or lists of them."""

    input: Input


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """The classes of an input: ``probs`` in the order of the model's labels, and the likeliest of these, null where it has no
    name.
    """

    index: int
    label: str | None
    probs: Sequence[float]
    num_classes: int


class ClassificationList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, in the order of the inputs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: Sequence[Classification]
    usage: PoolingUsage


class Classifications:
    """The handler. ``labels``: names of the model's classes, in order."""

    def __init__(self, llm: AsyncLLM, *, labels: Sequence[str]) -> None:
        self._llm = llm
        self._labels = labels

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Classify the inputs. Raises RequestFailed."""
        body = await given.decode(ClassificationBody)
        truncation = truncation_of(body)
        context = context_of(call, "classify", body)
        model = self._llm.inputs.check_model(context.model, context.lora)
        inputs, fields = inputs_of(body.input)
        self._llm.pooling.inputs.check_count(len(inputs), field="input")
        params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=body.use_activation is not False)
        given.close()  # admission is the first thing that happens
        try:
            result, request_id = await self._llm.run_pooling(
                PoolingRequest(
                    inputs=inputs,
                    fields=fields,
                    params=params,
                    context=context,
                    truncate_prompt_tokens=body.truncate_prompt_tokens,
                    truncation=truncation,
                )
            )
        except RequestFailed as e:
            raise renamed(e, {"pooling_params.": ""}) from e
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
