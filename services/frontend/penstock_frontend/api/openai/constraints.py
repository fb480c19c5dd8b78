"""The constraint on the output that a body asks for, under the names that servers give it."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, quoted
from penstock_common.types.sampling import CONSTRAINTS, JsonWhitespace, StructuredOutput
from penstock_frontend.api.openai.body_fields import text_of
from penstock_frontend.api.openai.other_names import OtherNames
from penstock_frontend.api.openai.response_format import Constraint, read_format

_PATH = "sampling_params.structured_output"
_BLANKS = {kind.name.lower(): kind for kind in JsonWhitespace}
_THEIRS = {"json_schema": "json"}
_WITHOUT_JSON = ("regex", "choice", "grammar")


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class ConstraintFields(OtherNames, kw_only=True):
    """The fields of a body that constrain its output. At most one does. ``response_format`` is OpenAI's, ``structured_outputs``
    vLLM's and ``guided_*`` its older form, ``json_schema`` and ``grammar`` are llama.cpp's, ``format`` is Ollama's, ``regex``
    and ``ebnf`` are SGLang's.
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
    """Return the constraint that the body asks for, or None. ``own``: the constraint in the form of the body's own protocol.

    Raises:
        InvalidArgument: A constraint cannot be read, or there are two.
    """
    found = _all(body, own)
    if len(found) > 1:
        first, second = found[0].head, found[1].head
        raise InvalidArgument(f"{first} and {second} both constrain the output; set one", field=second)
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
            f"{field} is set beside {found[0].field}, which writes no JSON; it goes with json, json_object and structural_tag",
            field=field,
        )
    return msgspec.structs.replace(found[0].output, json_whitespace=blanks)


def constraint_names(body: ConstraintFields, own: Constraint | None = None) -> Mapping[str, str]:
    """Return our names of the constraint and its parts to the client's, for errors. Raises what ``constraint_of`` raises."""
    found = _all(body, own)
    if not found:
        return {_PATH: "structured_outputs"}
    return {f"{_PATH}.{found[0].kind}": found[0].field, _PATH: found[0].head}


def _all(body: ConstraintFields, own: Constraint | None) -> Sequence[Constraint]:
    found = [own, read_format(body.response_format), *_of_llama_cpp(body), *_of_others(body), _of_vllm(body)]
    return [each for each in found if each is not None]


def _of_llama_cpp(body: ConstraintFields) -> list[Constraint | None]:
    """The constraints of llama.cpp and of Ollama. A grammar that is an object is a format, as TGI has it."""
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
        raise InvalidArgument(f"{path} has {what}; set one of {known}", field=path)
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
        raise InvalidArgument(f"{field} is true, and {path}.json_whitespace is {quoted(name)}; set one", field=field)
    return JsonWhitespace.COMPACT
