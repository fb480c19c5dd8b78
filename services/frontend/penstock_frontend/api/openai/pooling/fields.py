"""Body fields that the pooling routes share: inputs, normalization, and truncation."""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from penstock_common.errors import InvalidArgument, RequestFailed
from penstock_common.rpc.outputs import floats
from penstock_common.types.outputs import EngineCoreOutput
from penstock_common.types.request import PoolingParams, Vectors
from penstock_frontend.api.http.endpoint import Call
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.openai.body_fields import check_range, shown
from penstock_frontend.api.openai.context import ContextFields, context_of
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.api.openai.generation import Given, split
from penstock_frontend.api.openai.sampling_fields import TokenId
from penstock_frontend.call_types import PoolingRequest, PoolingResult, Truncation
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.loop_yield import Pace
from penstock_frontend.processing.outputs.pooling import vectors_of
from penstock_frontend.processing.prompts import named_prompts

# The code below truncates inputs that are too long. The fields about truncation have the names that various servers
# use.

_NUMBER_BYTES = 4
_ENCODER = msgspec.json.Encoder()
_MANY = 2**31
_SIDES: Mapping[str, Mapping[str, Truncation]] = {
    "truncation_side": {"right": "end", "left": "start"},
    "truncation_direction": {"right": "end", "left": "start"},
    "truncate": {"end": "end", "start": "start"},
}
"""Fields that select the side at which inputs are truncated. The values map each word that a field allows, in lower
case, to that side.
"""

_NO_CUT = ("NONE", "none", "None")


class TruncationFields(ContextFields, kw_only=True):
    """Body fields about the truncation of inputs.

    ``truncate_prompt_tokens`` (vLLM): maximum number of tokens of an input; -1 means the model's maximum.
    ``truncation_side`` (vLLM) and ``truncation_direction`` (TEI): the side that is cut off. The default is the
    tokenizer's side for ``truncate_prompt_tokens``, and ``right`` for the other fields.
    ``truncate``: true or false (TEI), or ``END``, ``START`` or ``NONE`` (Cohere, NIM). ``truncation``: true or false
    (Voyage).
    """

    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    truncation_direction: str | None = None
    truncate: bool | str | None = None
    truncation: bool | None = None


def truncation_of(body: TruncationFields) -> Truncation | None:
    """Return the side at which inputs that are too long are truncated, as in ``PoolingRequest.truncation``.

    Raises:
        InvalidArgument: A field is out of range, or two fields contradict each other.
    """
    check_range("truncate_prompt_tokens", body.truncate_prompt_tokens, -1, _MANY - 1)
    sides: dict[str, Any] = {name: _side(name, getattr(body, name)) for name in _SIDES}
    cuts: dict[str, Any] = {
        "truncate_prompt_tokens": None if body.truncate_prompt_tokens is None else True,
        "truncate": None if body.truncate is None else body.truncate not in (False, *_NO_CUT),
        "truncation": body.truncation,
    }
    side, is_cut = _agreed(body, sides), _agreed(body, cuts)
    if is_cut is False:
        return "none"
    # A number of tokens alone does not select a side, so the tokenizer's side applies.
    is_switched_on = bool(body.truncation) or body.truncate not in (None, False)
    return side if side is not None else "end" if is_switched_on else None


def _side(name: str, value: bool | str | None) -> Truncation | None:
    if value is None or isinstance(value, bool) or (name == "truncate" and value in _NO_CUT):
        return None
    words = _SIDES[name]
    if value.lower() not in words:
        known = ", ".join(("none", *words) if name == "truncate" else words)
        raise InvalidArgument(f"{name} is {shown(value)}; known: {known}", field=name)
    return words[value.lower()]


def _agreed(body: TruncationFields, given: Mapping[str, Any]) -> Any:
    """Return the value of the fields that are set, or None if none is set. Raises InvalidArgument if their values
    differ.
    """
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        first = next(iter(values))
        if value != values[first]:
            raise InvalidArgument(
                f"{first} is {shown(getattr(body, first))} and {name} is {shown(getattr(body, name))}, which are "
                "different truncations; set only one of the fields",
                field=name,
            )
    return next(iter(values.values()), None)


Input: TypeAlias = str | list[str | TokenId | list[TokenId]]
"""Type of an input field: a text, token ids, or a list of texts or of lists of token ids."""


class PromptFields(TruncationFields, kw_only=True):
    """Body fields that select one of the model's prompts, which is added before each text.

    ``prompt_name`` (sentence-transformers, TEI): name of the prompt. ``input_type`` (Cohere, Voyage, NIM): kind of the
    inputs, such as ``search_query`` or ``document``.
    """

    prompt_name: str | None = None
    input_type: str | None = None


class PoolingFields(TruncationFields, kw_only=True):
    """Fields that the bodies in vLLM's protocol share. If ``use_activation`` is false, the answer has the raw scores of
    the model.
    """

    use_activation: bool | None = None


class PoolingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


def normalize_of(normalize: bool | None, use_activation: bool | None) -> bool | None:
    """Return whether embeddings are normalized. Return None if the model's setting applies. Raises InvalidArgument if
    both fields are set and differ.

    vLLM has two names for this field.
    """
    if None not in (normalize, use_activation) and normalize != use_activation:
        raise InvalidArgument(
            f"normalize is {shown(normalize)} and use_activation is {shown(use_activation)}; they are two names "
            "of the same setting, so set only one of them",
            field="normalize",
        )
    return use_activation if normalize is None else normalize


def inputs_of(given: Input, *, field: str = "input") -> tuple[Sequence[Given], Sequence[str]]:
    """Return the inputs of a body, and the path of each input. Inputs and paths are empty for an empty list. Raises
    InvalidArgument.
    """
    try:
        inputs = split(given, _MANY) if given else []
    except InvalidArgument as e:
        raise renamed(e, {"prompt": field}) from e
    single = isinstance(given, str) or all(isinstance(each, int) for each in given)
    return inputs, [field] if single else [f"{field}[{index}]" for index in range(len(inputs))]


def usage_of(prompt_tokens: int) -> PoolingUsage:
    """Return the token counts of a result, in the form of the answer."""
    return PoolingUsage(prompt_tokens=prompt_tokens, total_tokens=prompt_tokens)


def request_of(
    llm: AsyncLLM, call: Call, prefix: str, body: TruncationFields, params: PoolingParams
) -> tuple[str, PoolingRequest]:
    """Return the name of the model or adapter that a body selects, and the request of the body, still without inputs.

    ``prefix`` is the prefix of the answer's id. Raises RequestFailed if a field is not valid.
    """
    truncation = truncation_of(body)
    context = context_of(call, prefix, body)
    model = llm.inputs.check_model(context.model, context.lora)
    return model, PoolingRequest(
        inputs=(),
        fields=(),
        params=params,
        context=context,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation=truncation,
        prompt=prompt_of(llm, body) if isinstance(body, PromptFields) else None,
    )


def prompt_of(llm: AsyncLLM, body: PromptFields) -> str | None:
    """Return the text of the prompt that a body selects, or None if it selects none. Raises InvalidArgument."""
    return llm.pooling.inputs.prompts.text(body.prompt_name, body.input_type)


def num_queries_of(body: PromptFields, num_inputs: int) -> int | None:
    """Return how many of the inputs are queries of a late-interaction model, as in ``PoolingRequest.num_queries``."""
    return named_prompts.num_queries_of(body.input_type or body.prompt_name, num_inputs)


def with_inputs(llm: AsyncLLM, request: PoolingRequest, given: Input, *, field: str = "input") -> PoolingRequest:
    """Return the request with the inputs ``given`` of a body. ``field`` is the name of the inputs in the body. Raises
    InvalidArgument if the inputs are not valid, or if there are none or too many.
    """
    inputs, fields = inputs_of(given, field=field)
    llm.pooling.inputs.check_count(len(inputs), field=field)
    return msgspec.structs.replace(request, inputs=inputs, fields=fields)


async def pooled(llm: AsyncLLM, request: PoolingRequest, given: Body) -> tuple[PoolingResult, str]:
    """Return the result of ``request``, and the request's id. Raises RequestFailed, with the field names of the body."""
    given.close()  # the call below admits the request before it does any other work
    try:
        return await llm.run_pooling(request)
    except RequestFailed as e:
        raise renamed(e, {"pooling_params.": ""}) from e


async def written(
    outputs: Sequence[EngineCoreOutput], pace: Pace, numbers: Callable[[Vectors], Any], made: Callable[[int, Any], Any]
) -> list[msgspec.Raw]:
    """Encode the answer's entry for every output as JSON.

    Encoding many numbers is slow, so the work is divided over several iterations of the event loop.

    Args:
        outputs: the engines' outputs, one for each input.
        pace: limits the work in each iteration of the event loop.
        numbers: function that converts the numbers of an output.
        made: function that returns the entry for the index of an output and its converted numbers.
    """
    found = []
    for index, output in enumerate(outputs):
        vectors = vectors_of(output)
        await pace.take(len(vectors.data) // _NUMBER_BYTES)
        found.append(msgspec.Raw(_ENCODER.encode(made(index, numbers(vectors)))))
    return found


def in_base64(vectors: Vectors) -> str:
    """Return float32 numbers as bytes in base64."""
    return base64.b64encode(vectors.data).decode()


def rows_of(vectors: Vectors) -> Sequence[float | list[float]]:
    """Return the numbers of one vector, or a list of numbers for each vector if there are several."""
    numbers = floats(vectors)
    if len(vectors.shape) == 1:
        return numbers
    rows, size = vectors.shape
    return [numbers[row * size : (row + 1) * size] for row in range(rows)]
