"""Sampling parameters, output constraints (structured outputs), and predicted outputs in request bodies."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_common.types.sampling import (
    CONSTRAINTS,
    MAX_SEED,
    MIN_SEED,
    JsonWhitespace,
    OutputKind,
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
)
from penstock_frontend.api.http.endpoint import Call
from penstock_frontend.api.openai.body_fields import check_range, shown, text_of
from penstock_frontend.api.openai.context import GenerationContextFields
from penstock_frontend.api.openai.response_format import Constraint, read_format
from penstock_frontend.call_types import Finish
from penstock_frontend.call_warnings import WarningKind, warn
from penstock_frontend.dispatch.kv_gateway import KvGateway, answer_of

# The code below handles the names that other servers use for the same sampling parameters.

_INT32_MAX = 2**31 - 1
_NAMES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict"),
    "min_tokens": ("min_new_tokens",),
    "stop": ("stop_sequences",),
    "seed": ("random_seed",),
}
"""Map from Penstock's names of parameters to the names that other servers use."""
_UNLIMITED: Mapping[str, tuple[int, ...]] = {"n_predict": (-1,), "num_predict": (-1, -2)}
"""Values with which llama.cpp and Ollama express that there is no limit."""
_OTHER_RANGES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(_NAMES["max_tokens"], (1, _INT32_MAX)),
    "min_new_tokens": (0, _INT32_MAX),
    "random_seed": (MIN_SEED, MAX_SEED),
}


class OtherNames(GenerationContextFields, kw_only=True):
    """Alternative names of fields in bodies that generate text.

    ``max_completion_tokens`` and ``max_output_tokens`` are OpenAI's, ``n_predict`` is llama.cpp's, ``num_predict``
    Ollama's, ``max_new_tokens`` TGI's and SGLang's, ``min_new_tokens`` SGLang's, ``stop_sequences`` Anthropic's and
    Cohere's, ``random_seed`` Mistral's.
    """

    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    max_new_tokens: int | None = None
    n_predict: int | None = None
    num_predict: int | None = None
    min_new_tokens: int | None = None
    stop_sequences: str | list[str] | None = None
    random_seed: int | None = None


def unify(body: OtherNames) -> None:
    """Copy the values of fields with alternative names to the fields with Penstock's names. ``max_completion_tokens``
    overrides ``max_tokens``.

    Raises:
        InvalidArgument: A value is out of range, or two names of a parameter have different values.
    """
    for name, (low, high) in _OTHER_RANGES.items():
        value = getattr(body, name)
        if value not in _UNLIMITED.get(name, ()):
            check_range(name, value, low, high)
    for ours, others in _NAMES.items():
        given = {name: getattr(body, name) for name in others if _is_given(body, name)}
        if not given:
            continue
        if (value := getattr(body, ours)) is not None and "max_completion_tokens" not in given:
            given = {ours: value, **given}
        _check_same(given)
        setattr(body, ours, next(iter(given.values())))


def other_names(body: OtherNames) -> Mapping[str, str]:
    """Return the map from Penstock's names of parameters to the names that the body uses, for errors."""
    return {
        f"sampling_params.{ours}": name
        for ours, others in _NAMES.items()
        for name in reversed(others)
        if _is_given(body, name)
    }


def _is_given(body: msgspec.Struct, name: str) -> bool:
    value = getattr(body, name)
    return value is not None and value not in _UNLIMITED.get(name, ())


def _check_same(given: Mapping[str, Any]) -> None:
    (first, value), *rest = given.items()
    for name, other in rest:
        if other != value:
            raise InvalidArgument(
                f"{first} is {shown(value)} and {name} is {shown(other)}; they are two names of the same setting, "
                "so set only one of them",
                field=name,
            )


# The code below handles output constraints, under the names of various servers.

_PATH = "sampling_params.structured_output"
_BLANKS = {kind.name.lower(): kind for kind in JsonWhitespace}
_THEIRS = {"json_schema": "json"}
_WITHOUT_JSON = ("regex", "choice", "grammar")


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An output constraint in vLLM's form. At most one of the constraint fields may be set.

    In addition, one field about whitespace in JSON may be set: Penstock's ``json_whitespace``, or vLLM's
    ``disable_any_whitespace``, which means the same as ``compact``.
    """

    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    json_object: bool | None = None
    json_whitespace: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Any = None


class ConstraintFields(OtherNames, kw_only=True):
    """Body fields that constrain the output. At most one of them may be set.

    ``response_format`` is OpenAI's field, ``structured_outputs`` is vLLM's, and ``guided_*`` is vLLM's older form.
    ``json_schema`` and ``grammar`` are llama.cpp's, ``format`` is Ollama's, ``regex`` and ``ebnf`` are SGLang's.
    """

    response_format: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    grammar: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    regex: str | None = None
    ebnf: str | None = None
    format: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


def constraint_of(body: ConstraintFields, own: Constraint | None = None) -> StructuredOutput | None:
    """Return the output constraint of the body, or None. ``own`` is the constraint from the field that the body's own
    protocol has.

    Raises:
        InvalidArgument: A constraint is not valid, or the body has two constraints.
    """
    found = _all(body, own)
    if len(found) > 1:
        first, second = found[0].head, found[1].head
        raise InvalidArgument(f"{first} and {second} both constrain the output; set only one of them", field=second)
    given = body.structured_outputs
    if given is None:
        return found[0].output if found else None
    blanks = _blanks(given)
    if not found:
        return StructuredOutput(json_whitespace=blanks)
    kind = found[0].kind
    if blanks is not JsonWhitespace.DUMPS and kind in _WITHOUT_JSON:
        field = f"structured_outputs.{'disable_any_whitespace' if given.json_whitespace is None else 'json_whitespace'}"
        raise InvalidArgument(
            f"{field} is set, but {found[0].field} does not produce JSON; set it only with json, json_object or "
            "structural_tag",
            field=field,
        )
    return msgspec.structs.replace(found[0].output, json_whitespace=blanks)


def constraint_names(body: ConstraintFields, own: Constraint | None = None) -> Mapping[str, str]:
    """Return the map from Penstock's names of the constraint and its parts to the client's names, for errors.

    Raises the errors of ``constraint_of``.
    """
    found = _all(body, own)
    if not found:
        return {_PATH: "structured_outputs"}
    return {f"{_PATH}.{found[0].kind}": found[0].field, _PATH: found[0].head}


def _all(body: ConstraintFields, own: Constraint | None) -> Sequence[Constraint]:
    found = [own, read_format(body.response_format), *_of_llama_cpp(body), *_of_others(body), _of_vllm(body)]
    return [each for each in found if each is not None]


def _of_llama_cpp(body: ConstraintFields) -> list[Constraint | None]:
    """Return the constraints from the fields of llama.cpp and Ollama. If ``grammar`` is an object, it is a format in
    TGI's form.
    """
    grammar, format_ = bytes(body.grammar), bytes(body.format)
    found: list[Constraint | None] = []
    if grammar.startswith(b"{"):
        found.append(read_format(body.grammar, "grammar"))
    elif text := text_of(body.grammar, "grammar"):
        found.append(Constraint("grammar", "grammar", "grammar", text))
    if format_ == b'"json"':
        found.append(Constraint("format", "format", "json_object", True))
    elif text := text_of(body.format, "format"):
        if not format_.startswith(b"{"):
            raise InvalidArgument(f"format is {quoted(text)}; it must be 'json' or a JSON schema", field="format")
        found.append(Constraint("format", "format", "json_schema", text))
    return found


def _of_others(body: ConstraintFields) -> list[Constraint]:
    schemas: Mapping[str, Any] = {name: text_of(getattr(body, name), name) for name in ("json_schema", "guided_json")}
    grammars: Mapping[str, Any] = {"ebnf": body.ebnf or None, "guided_grammar": body.guided_grammar or None}
    regexes: Mapping[str, Any] = {"regex": body.regex, "guided_regex": body.guided_regex}
    choices: Mapping[str, Any] = {"guided_choice": None if body.guided_choice is None else tuple(body.guided_choice)}
    kinds: Mapping[str, Mapping[str, Any]] = {
        "json_schema": schemas,
        "grammar": grammars,
        "regex": regexes,
        "choice": choices,
    }
    return [
        Constraint(name, name, kind, value)
        for kind, given in kinds.items()
        for name, value in given.items()
        if value is not None
    ]


def _of_vllm(body: ConstraintFields) -> Constraint | None:
    path, given = "structured_outputs", body.structured_outputs
    if given is None:
        return None
    fields: dict[str, Any] = {
        "json_schema": text_of(given.json, f"{path}.json"),
        "json_object": given.json_object or None,
        "regex": given.regex,
        "choice": tuple(given.choice) if given.choice is not None else None,
        "grammar": given.grammar,
        "structural_tag": text_of(given.structural_tag, f"{path}.structural_tag"),
    }
    constraint = {name: value for name, value in fields.items() if value is not None}
    if len(constraint) > 1:
        known = ", ".join(_THEIRS.get(name, name) for name in CONSTRAINTS)
        what = " and ".join(_THEIRS.get(name, name) for name in constraint)
        raise InvalidArgument(f"{path} has {what}; set only one of {known}", field=path)
    if not constraint:
        return None
    kind, value = next(iter(constraint.items()))
    return Constraint(f"{path}.{_THEIRS.get(kind, kind)}", path, kind, value)


def _blanks(given: StructuredOutputs) -> JsonWhitespace:
    path, name = "structured_outputs", given.json_whitespace
    known = ", ".join(_BLANKS)
    if given.whitespace_pattern is not None:
        field = f"{path}.whitespace_pattern"
        raise InvalidArgument(f"{field} is not supported; set {path}.json_whitespace to one of {known}", field=field)
    if name is not None and name not in _BLANKS:
        field = f"{path}.json_whitespace"
        raise InvalidArgument(f"{field} is {quoted(name)}; known: {known}", field=field)
    blanks = JsonWhitespace.DUMPS if name is None else _BLANKS[name]
    if not given.disable_any_whitespace:
        return blanks
    if name is not None and blanks is not JsonWhitespace.COMPACT:
        field = f"{path}.disable_any_whitespace"
        raise InvalidArgument(
            f"{field} is true, and {path}.json_whitespace is {quoted(name)}; set only one of the two fields",
            field=field,
        )
    return JsonWhitespace.COMPACT


# The code below handles predicted outputs, in OpenAI's form.

NAMES: Mapping[str, str] = {"prediction.text": "prediction.content"}
"""Map from Penstock's field names of the prediction to the client's field names."""


class PredictionPart(msgspec.Struct, frozen=True):
    """A part of a predicted output, which must be text."""

    type: str
    text: str = ""


class PredictionBody(msgspec.Struct, frozen=True):
    """Predicted output ``{"type": "content", "content": text}``. If the content is a list of parts, the parts are
    joined.
    """

    type: str
    content: str | list[PredictionPart]


def predicted_text(prediction: PredictionBody | None) -> str | None:
    """Return the predicted text, or None if there is none. Raises InvalidArgument for an unknown type, and
    Unimplemented for a part that is not text.
    """
    if prediction is None:
        return None
    if prediction.type != "content":
        raise InvalidArgument(
            f"prediction.type is {quoted(prediction.type)}; it must be 'content'", field="prediction.type"
        )
    if isinstance(prediction.content, str):
        return prediction.content
    for index, part in enumerate(prediction.content):
        if part.type != "text":
            field = f"prediction.content[{index}].type"
            raise Unimplemented(f"{field} is {quoted(part.type)}; only 'text' is supported", field=field)
    return "".join(part.text for part in prediction.content)


TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]

_INT32 = 2**31
_RANGES: dict[str, tuple[float, float]] = {
    "n": (1, _INT32 - 1),
    "max_tokens": (0, _INT32 - 1),
    "min_tokens": (0, _INT32 - 1),
    "top_k": (-1, _INT32 - 1),
    "seed": (MIN_SEED, MAX_SEED),
    "prompt_logprobs": (-1, _INT32 - 1),
    "truncate_prompt_tokens": (-1, _INT32 - 1),
    "repetition_penalty": (0.0, 1e38),
    "stream_interval": (1, _INT32 - 1),
    "num_speculative_tokens": (0, _INT32 - 1),
    "thinking_token_budget": (-1, _INT32 - 1),
}
"""Ranges of the values that the fields of the protobuf message can contain. The limits of the parameters themselves are
narrower.
"""
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids")


class StreamOptions(msgspec.Struct, frozen=True):
    """Options for the token counts in a stream. The token counts can be in an additional last chunk, or in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionFields(msgspec.Struct, frozen=True):
    """Condition that ends an output: a pattern occurs ``min_count`` times in a row.

    The length of the pattern is from ``min_pattern_size`` to ``max_pattern_size`` tokens.
    """

    max_pattern_size: Annotated[int, msgspec.Meta(ge=0, le=_INT32)]
    min_pattern_size: Annotated[int, msgspec.Meta(ge=0, le=_INT32)] = 1
    min_count: Annotated[int, msgspec.Meta(ge=0, le=_INT32)] = 2


class SamplingFields(ConstraintFields, kw_only=True):
    """Sampling fields that bodies share if they generate text, from OpenAI and vLLM. Null means that the field is not
    set.

    ``truncate_prompt_tokens`` is the number of tokens to keep at the end of the prompt. -1 keeps as many as possible,
    so that the output still fits. ``num_speculative_tokens`` is a field of Penstock, and so is ``prediction`` in
    completions.
    """

    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[TokenId] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    stream_interval: int | None = None
    num_speculative_tokens: int | None = None
    thinking_token_budget: int | None = None
    prediction: PredictionBody | None = None
    repetition_detection: RepetitionFields | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: Any = None


_OTHER_FORMS = (*_LISTS, "stop", "repetition_detection")
_PLAIN = tuple(
    name
    for name in SamplingFields.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in _OTHER_FORMS
)
"""Names of the fields that become sampling parameters without conversion."""


def check(body: SamplingFields) -> None:
    """Check the common fields that the conversion to domain types does not check. Copy values of alternative names to
    Penstock's names.

    Raises InvalidArgument and Unimplemented.
    """
    unify(body)
    for name, (low, high) in _RANGES.items():
        check_range(name, getattr(body, name), low, high)
    if body.truncation_side not in (None, "left"):
        raise Unimplemented(
            f"truncation_side is {shown(body.truncation_side)}; it must be 'left'", field="truncation_side"
        )
    if body.stream_options is not None and not body.stream:
        warn(WarningKind.HINT_IGNORED, "stream_options", "has no effect without stream")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidArgument(
            "prompt_logprobs is set, but a stream does not support it; set stream to false", field="prompt_logprobs"
        )


def num_logprobs(body: SamplingFields, asked: int | None, *, field: str) -> dict[str, int]:
    """Return the sampling parameter ``logprobs`` for a body that asks for ``asked`` most likely tokens per position, or
    for no log-probabilities if ``asked`` is None. ``logprob_token_ids`` replaces the most likely tokens, as in vLLM.

    Raises InvalidArgument if ``logprob_token_ids`` is set, but the body's own field ``field`` asks for no
    log-probabilities.
    """
    if not body.logprob_token_ids:
        return {} if asked is None else {"logprobs": asked}
    if asked is None:
        raise InvalidArgument(
            f"logprob_token_ids is set, but the request does not ask for log-probabilities; set {field}",
            field="logprob_token_ids",
        )
    return {"logprobs": 0}


def num_shown(body: SamplingFields, asked: int | None) -> int | None:
    """Return the number of tokens besides the chosen token to show per position, -1 for all tokens that the engine
    reports, or None for no log-probabilities. ``asked`` has the same meaning as in ``num_logprobs``.
    """
    return -1 if body.logprob_token_ids and asked is not None else asked


def with_kv(call: Call, body: SamplingFields, gateway: KvGateway, *, num_sequences: int, of: str = "n") -> Call:
    """Return the call, to whose context the KV transfer parameters of the body were added. Raises Unimplemented and
    InvalidArgument.

    ``of`` is the name of the field that sets the number of sequences.
    """
    kv = gateway.read(body.kv_transfer_params, n=num_sequences, field="kv_transfer_params", of=of)
    return msgspec.structs.replace(call, context=msgspec.structs.replace(call.context, kv=kv))


def kv_answer(finishes: Iterable[Finish | None]) -> dict[str, Any]:
    """Return the KV transfer parameters for the answer. The result is empty unless exactly one sequence has such
    parameters.
    """
    answers = [said for finish in finishes if finish is not None and (said := answer_of(finish)) is not None]
    return {"kv_transfer_params": answers[0]} if len(answers) == 1 else {}


def values(body: SamplingFields, own: Constraint | None = None) -> dict[str, Any]:
    """Return the sampling parameters of the body that are set, by the names of ``SamplingParams``. Raises
    InvalidArgument.

    ``own`` is the output constraint in the form of the body's own protocol.
    """
    found: dict[str, Any] = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    found |= {name: tuple(value) for name in _LISTS if (value := getattr(body, name)) is not None}
    if found.get("thinking_token_budget") == -1:
        del found["thinking_token_budget"]
    if body.stop is not None:
        found["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if (constraint := constraint_of(body, own)) is not None:
        found["structured_output"] = constraint
    if (detection := body.repetition_detection) is not None:
        found["repetition_detection"] = RepetitionDetection(
            max_pattern_size=detection.max_pattern_size,
            min_pattern_size=detection.min_pattern_size,
            min_count=detection.min_count,
        )
    found["output_kind"] = OutputKind.DELTA if body.stream else OutputKind.FINAL
    return found


def names(body: SamplingFields, own: Constraint | None = None) -> Mapping[str, str]:
    """Return the map from Penstock's field names to the client's field names, for errors after the conversion. ``own``
    has the same meaning as in ``values``.
    """
    return {**NAMES, **other_names(body), **constraint_names(body, own)}
