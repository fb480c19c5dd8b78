"""What completions and chat completions have in common: sampling parameters, streaming, ids."""

from collections.abc import Collection, Iterable, Mapping
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
    StructuredOutput,
)
from penstock_frontend.api.openai.body_fields import check_range, refuse_fields, shown, text_of
from penstock_frontend.api.openai.context import GenerationContextFields
from penstock_frontend.api.openai.errors import undecodable
from penstock_frontend.api.openai.prediction import NAMES, PredictionBody
from penstock_frontend.api.openai.response_format import ResponseFormat
from penstock_frontend.call_types import Finish, KvParams
from penstock_frontend.engine.gateway import KvGateway, answer_of

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
"""What the engine's contract can carry; the domain's own limits are narrower."""
_PLAIN = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
    "logit_bias",
    "truncate_prompt_tokens",
    "stream_interval",
    "num_speculative_tokens",
    "thinking_token_budget",
)
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")
_BLANKS = {kind.name.lower(): kind for kind in JsonWhitespace}
_THEIRS = {"json_schema": "json"}
_WITHOUT_JSON = {"regex", "choice", "grammar"}
REFUSED = {
    "use_beam_search": "",
    "lora_request": "lora",
    "prompt_embeds": "",
    "mm_processor_kwargs": "",
    "kv_transfer_params": "",
    "logits_processors": "",
    "logprob_token_ids": "",
    "return_tokens_as_token_ids": "return_token_ids",
    "watermarking": "",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
}


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream says about tokens: in one more chunk at its end, or in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """A constraint in vLLM's form. Exactly one field is set, or none beside another constraint, besides those on blanks in JSON:
    ``json_whitespace`` of our own, and vLLM's ``disable_any_whitespace``, which is the same as ``compact``.
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


class RepetitionFields(msgspec.Struct, frozen=True):
    """Ends an output that repeats a pattern of so many tokens, from the least to the most, ``min_count`` times."""

    max_pattern_size: Annotated[int, msgspec.Meta(ge=0, le=_INT32)]
    min_pattern_size: Annotated[int, msgspec.Meta(ge=0, le=_INT32)] = 1
    min_count: Annotated[int, msgspec.Meta(ge=0, le=_INT32)] = 2


class SamplingFields(GenerationContextFields, kw_only=True):
    """The common fields of both bodies, OpenAI's and vLLM's. Null is unset. ``truncate_prompt_tokens``: the last so many of the
    prompt, -1 as many as leave room for the output. ``num_speculative_tokens`` is our own, and ``prediction`` in completions.
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
    response_format: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
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
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    stream_interval: int | None = None
    num_speculative_tokens: int | None = None
    thinking_token_budget: int | None = None
    prediction: PredictionBody | None = None
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionFields | None = None
    return_token_ids: bool | None = None
    use_beam_search: Any = None
    lora_request: Any = None
    prompt_embeds: Any = None
    mm_processor_kwargs: Any = None
    kv_transfer_params: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    watermarking: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


def check(body: SamplingFields, *, served: Collection[str] = ()) -> None:
    """Raise InvalidArgument or Unimplemented for what can be said of the common fields without the domain. ``served``: those that
    this body has though others refuse them.
    """
    refuse_fields(body, {name: instead for name, instead in REFUSED.items() if name not in served})
    for name, (low, high) in _RANGES.items():
        check_range(name, getattr(body, name), low, high)
    if body.truncation_side not in (None, "left"):
        raise Unimplemented(
            f"truncation_side is {shown(body.truncation_side)}; only 'left' is served", field="truncation_side"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument("stream_options is set; it needs stream", field="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs is set; a stream has none", field="prompt_logprobs")


def kv_params(body: SamplingFields, gateway: KvGateway, *, num_sequences: int, of: str = "n") -> KvParams:
    """What is said of keys and values. ``of``: the field that says how many sequences. Raises Unimplemented, InvalidArgument."""
    return gateway.read(body.kv_transfer_params, n=num_sequences, field="kv_transfer_params", of=of)


def kv_answer(finishes: Iterable[Finish | None]) -> dict[str, Any] | msgspec.UnsetType:
    """The parameters of an answer whose sequences ended so: of the only one that has some."""
    answers = [said for finish in finishes if finish is not None and (said := answer_of(finish)) is not None]
    return answers[0] if len(answers) == 1 else msgspec.UNSET


def values(body: SamplingFields) -> dict[str, Any]:
    """The sampling parameters that are set, under the names of ``SamplingParams``. Raises InvalidArgument."""
    found: dict[str, Any] = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    found |= {name: tuple(value) for name in _LISTS if (value := getattr(body, name)) is not None}
    if found.get("thinking_token_budget") == -1:
        del found["thinking_token_budget"]
    if body.stop is not None:
        found["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if (constraint := _constraint(body)) is not None:
        found["structured_output"] = constraint
    if body.repetition_detection is not None:
        found["repetition_detection"] = RepetitionDetection(**msgspec.structs.asdict(body.repetition_detection))
    found["output_kind"] = OutputKind.DELTA if body.stream else OutputKind.FINAL
    return found


def names(body: SamplingFields) -> Mapping[str, str]:
    """Our names of fields to the client's, for errors that come from behind this API."""
    path = "sampling_params.structured_output"
    if body.structured_outputs is not None:
        return {
            f"{path}.json_schema": "structured_outputs.json",
            **{f"{path}.{name}": f"structured_outputs.{name}" for name in CONSTRAINTS[1:]},
            path: "structured_outputs",
            **NAMES,
        }
    return {
        **NAMES,
        f"{path}.json_schema": "response_format.json_schema.schema",
        f"{path}.structural_tag": "response_format",
        path: "response_format",
    }


def _constraint(body: SamplingFields) -> StructuredOutput | None:
    of_format = _format_constraint(body.response_format)
    given = body.structured_outputs
    if given is None:
        return of_format
    fields: dict[str, Any] = {
        "json_schema": text_of(given.json, "structured_outputs.json"),
        "json_object": given.json_object or None,
        "regex": given.regex,
        "choice": tuple(given.choice) if given.choice is not None else None,
        "grammar": given.grammar,
        "structural_tag": text_of(given.structural_tag, "structured_outputs.structural_tag"),
    }
    constraint = {name: value for name, value in fields.items() if value is not None}
    if len(constraint) > 1:
        path = "structured_outputs"
        known = ", ".join(_THEIRS.get(name, name) for name in CONSTRAINTS)
        what = " and ".join(_THEIRS.get(name, name) for name in constraint)
        raise InvalidArgument(f"{path} has {what}; set one of {known}", field=path)
    blanks = _blanks(given)
    if blanks is not JsonWhitespace.DUMPS and constraint.keys() & _WITHOUT_JSON:
        field = "structured_outputs." + (
            "disable_any_whitespace" if given.json_whitespace is None else "json_whitespace"
        )
        kind = next(iter(constraint))
        raise InvalidArgument(
            f"{field} is set beside structured_outputs.{kind}, which writes no JSON; it goes with json, json_object and "
            "structural_tag",
            field=field,
        )
    if of_format is None:
        return StructuredOutput(**constraint, json_whitespace=blanks)
    if constraint:
        raise InvalidArgument(
            "response_format and structured_outputs both constrain the output; set one", field="structured_outputs"
        )
    return msgspec.structs.replace(of_format, json_whitespace=blanks)


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
        raise InvalidArgument(f"{field} is true, and {path}.json_whitespace is {quoted(name)}; set one", field=field)
    return JsonWhitespace.COMPACT


def _format_constraint(raw: msgspec.Raw) -> StructuredOutput | None:
    text = bytes(raw)
    if text in (b"", b"null"):
        return None
    try:
        given = msgspec.json.decode(text, type=ResponseFormat)
    except msgspec.ValidationError as e:
        raise undecodable(e, "response_format") from None
    match given.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutput(json_object=True)
        case "structural_tag":
            return StructuredOutput(structural_tag=text.decode())
        case "json_schema" if given.json_schema is not None:
            field = "response_format.json_schema.schema"
            return StructuredOutput(json_schema=text_of(given.json_schema.schema, field) or "")
        case "json_schema":
            raise InvalidArgument("response_format.json_schema is not set", field="response_format.json_schema")
        case kind:
            raise InvalidArgument(
                f"response_format.type is {quoted(kind)}; known: text, json_object, json_schema, structural_tag",
                field="response_format.type",
            )
