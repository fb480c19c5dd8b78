"""Parser of the field ``response_format``, in the forms of OpenAI, llama.cpp, Together, Fireworks and TGI."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, quoted
from penstock_common.types.sampling import StructuredOutput
from penstock_frontend.api.openai.body_fields import text_of
from penstock_frontend.api.openai.errors import undecodable

_KNOWN = "text, json_object, json_schema, structural_tag, json, regex, grammar"


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """A JSON schema in OpenAI's form of ``response_format``. The schema is always enforced, even if ``strict`` is
    false.
    """

    schema: msgspec.Raw
    name: str = ""
    strict: bool | None = None


class _Kind(msgspec.Struct, frozen=True):
    type: str


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Format of the output: ``text``, ``json_object``, ``json_schema``, ``regex``, ``grammar``, or ``structural_tag``
    in xgrammar's form.

    ``schema`` or ``value`` can be a schema, as in llama.cpp, Together and TGI. ``pattern`` or ``value`` can be a
    regular expression. ``grammar`` or ``value`` can be a grammar. ``name``, ``description`` and ``strict`` have no
    effect.
    """

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    value: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    pattern: str | None = None
    regex: str | None = None
    grammar: str | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class Constraint(msgspec.Struct, frozen=True):
    """An output constraint that a body contains.

    Attributes:
        field: Path of the constraint's value in the body.
        head: The field of the body that contains the value.
        kind: Name of the field of StructuredOutput for this kind of constraint.
        value: Value for that field of StructuredOutput.
    """

    field: str
    head: str
    kind: str
    value: Any

    @property
    def output(self) -> StructuredOutput:
        """The output constraint as a domain type."""
        return StructuredOutput(**{self.kind: self.value})


def read_format(raw: msgspec.Raw, head: str = "response_format") -> Constraint | None:
    """Return the output constraint of a response format. Return None for ``text`` and null. ``head`` is the field that
    contains the format.

    Raises:
        InvalidArgument: The format has an unknown type or field, or its value is missing.
    """
    text = bytes(raw)
    if text in (b"", b"null"):
        return None
    try:
        kind = msgspec.json.decode(text, type=_Kind).type
        if kind == "structural_tag":
            return Constraint(head, head, "structural_tag", text.decode())
        given = msgspec.json.decode(text, type=ResponseFormat)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise undecodable(e, head, ResponseFormat) from None
    return _read(given, head)


def _read(given: ResponseFormat, head: str) -> Constraint | None:
    values = _values(given, head)
    match given.type:
        case "text":
            _check_fields(given, values, head, ())
            return None
        case "json_object":
            schema = _one(given, values, head, "schema", "value", required=False)
            if schema is None:
                return Constraint(head, head, "json_object", True)
            return Constraint(schema, head, "json_schema", values[schema])
        case "json" | "json_schema" as kind:
            fields = ("schema", "value") if kind == "json" else ("json_schema.schema", "schema", "value")
            schema = _one(given, values, head, *fields)
            return Constraint(schema or head, head, "json_schema", values[schema or head])
        case "regex":
            field = _one(given, values, head, "pattern", "regex", "value")
            return Constraint(field or head, head, "regex", values[field or head])
        case "grammar":
            field = _one(given, values, head, "grammar", "value")
            return Constraint(field or head, head, "grammar", values[field or head])
        case kind:
            raise InvalidArgument(f"{head}.type is {quoted(kind)}; known: {_KNOWN}", field=f"{head}.type")


def _values(given: ResponseFormat, head: str) -> dict[str, str]:
    """Return the values of the format that are set, by their paths in the body."""
    found = {
        f"{head}.schema": text_of(given.schema, f"{head}.schema"),
        f"{head}.value": text_of(given.value, f"{head}.value"),
        f"{head}.pattern": given.pattern,
        f"{head}.regex": given.regex,
        f"{head}.grammar": given.grammar,
    }
    if given.json_schema is not None:
        field = f"{head}.json_schema.schema"
        found[field] = text_of(given.json_schema.schema, field) or ""
    elif given.type == "json_schema" and (wrapped := _wrapped(given.value)) is not None:
        found[f"{head}.value"] = text_of(wrapped, f"{head}.value.schema")
    return {field: value for field, value in found.items() if value is not None}


def _wrapped(value: msgspec.Raw) -> msgspec.Raw | None:
    """Return the schema in ``value`` if it has TGI's form ``{"name": ..., "schema": ...}``. Otherwise return None."""
    try:
        return msgspec.json.decode(value, type=JsonSchemaFormat).schema
    except (msgspec.DecodeError, UnicodeDecodeError):  # the value itself is a schema, or the value is empty
        return None


def _one(given: ResponseFormat, values: dict[str, str], head: str, *names: str, required: bool = True) -> str | None:
    """Return the path of the only value that is set. ``names`` are the fields that the type allows, and the usual field
    comes first.
    """
    fields = [f"{head}.{name}" for name in names]
    _check_fields(given, values, head, fields)
    if len(values) > 1:
        first, second = list(values)[:2]
        raise InvalidArgument(f"{first} and {second} are both set; set only one of them", field=first)
    if values:
        return next(iter(values))
    if required:
        # In OpenAI's form, the missing field is the object that contains the schema.
        field = fields[0].removesuffix(".schema") if names[0] == "json_schema.schema" else fields[0]
        raise InvalidArgument(f"{field} is not set", field=field)
    return None


def _check_fields(given: ResponseFormat, values: dict[str, str], head: str, fields: Sequence[str]) -> None:
    """Check that the type of the format allows all values that are set. Raises InvalidArgument if the type does not
    allow a value.
    """
    for field in values:
        if field not in fields:
            raise InvalidArgument(
                f"{field} is set, but {head}.type {quoted(given.type)} has no such field; change the type, or remove the field",
                field=field,
            )
