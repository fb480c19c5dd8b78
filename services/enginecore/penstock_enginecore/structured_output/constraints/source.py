"""Checks of the output constraints of requests, and their translation to the input of the grammar compiler."""

import contextlib
import json
from decimal import Decimal
from typing import Any, Literal

import msgspec

from penstock_common.errors import InvalidArgument
from penstock_common.types.sampling import JsonWhitespace, StructuredOutput
from penstock_enginecore.structured_output.constraints.json_grammar import Rules
from penstock_enginecore.structured_output.constraints.json_schema import MAX_WORK, schema_grammar
from penstock_enginecore.structured_output.constraints.regex import RegexError, literal, whole
from penstock_enginecore.structured_output.constraints.schema_document import (
    SchemaError,
    TooMuchWorkError,
    Work,
    parse,
    shown,
)

FIELD = "sampling_params.structured_output"
_MAX_TAG_DEPTH = 64
_MAX_ERROR = 1000
_NAMES_TOKENS = "constraints apply to text, not to tokens"
_REFUSED_FORMATS = {
    "qwen_xml_parameter": "schemas can only describe JSON",
    "token": _NAMES_TOKENS,
    "exclude_token": _NAMES_TOKENS,
    "any_tokens": _NAMES_TOKENS,
    "token_triggered_tags": _NAMES_TOKENS,
    "token_dispatch": _NAMES_TOKENS,
}
MAX_CHOICES = 10_000
"""Maximum number of options in a choice constraint."""


class GrammarSource(msgspec.Struct, frozen=True):
    """Input of the grammar compiler: a grammar with a ``root`` rule, or a structural tag as JSON."""

    kind: Literal["grammar", "structural_tag"]
    text: str


_CHECKED_WORK = 2000
"""Maximum number of steps of a translation in ``check_constraint``. This number of steps takes a few milliseconds."""


def check_constraint(constraint: StructuredOutput, max_bytes: int) -> None:
    """Raise InvalidArgument if a constraint is malformed, has more than ``max_bytes`` bytes of UTF-8, or cannot be
    enforced.

    This function does not check a ``grammar``, the structure of a ``structural_tag``, or a schema that takes too many
    steps. The compiling process checks these constraints.
    """
    with contextlib.suppress(TooMuchWorkError):
        _source(constraint, max_bytes, Work(_CHECKED_WORK))


def check_size(constraint: StructuredOutput, max_bytes: int) -> int:
    """Return the size of the constraint in bytes of UTF-8. Raises InvalidArgument if there is not exactly one
    constraint, or if it has more than ``max_bytes`` bytes.
    """
    try:
        kind, value = constraint.constraint
    except ValueError as e:
        raise InvalidArgument(f"{FIELD}: {e}", field=FIELD) from None
    field = f"{FIELD}.{kind}"
    try:
        size = sum(len(option.encode()) for option in value) if kind == "choice" else len(str(value).encode())
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"{field} contains an unpaired surrogate, which is not a character", field=field
        ) from None
    if size > max_bytes:
        raise InvalidArgument(f"{field} has {size} bytes; the limit is {max_bytes}", field=field)
    return size


def grammar_source(constraint: StructuredOutput, max_bytes: int) -> GrammarSource:
    """Return the input of the grammar compiler for ``constraint``. Raises InvalidArgument if the constraint is
    malformed or cannot be enforced.
    """
    try:
        return _source(constraint, max_bytes, Work(MAX_WORK))
    except TooMuchWorkError as e:
        raise _refused(constraint, _printable(str(e))) from None


def _source(constraint: StructuredOutput, max_bytes: int, work: Work) -> GrammarSource:
    check_size(constraint, max_bytes)
    kind, value = constraint.constraint
    try:
        if kind == "structural_tag":
            return GrammarSource("structural_tag", _structural_tag(value, constraint.json_whitespace, work))
        return GrammarSource("grammar", _GRAMMARS[kind](value, constraint.json_whitespace, work))
    except TooMuchWorkError:
        raise
    except (SchemaError, RegexError) as e:
        raise _refused(constraint, _printable(str(e))) from None
    except RecursionError:
        raise _refused(constraint, "is nested too deep") from None
    except UnicodeEncodeError:
        raise _refused(constraint, "contains an unpaired surrogate, which is not a character") from None


def _refused(constraint: StructuredOutput, why: str) -> InvalidArgument:
    kind, _ = constraint.constraint
    between = " " if why.startswith(("is ", "contains ")) else ": "
    return InvalidArgument(f"{FIELD}.{kind}{between}{why}", field=f"{FIELD}.{kind}")


def _printable(text: str) -> str:
    """Return an error text with a limited length and without unpaired surrogates, because surrogates cannot be sent."""
    return text.encode("utf-8", "backslashreplace").decode()[:_MAX_ERROR]


def _choice(options: tuple[str, ...], _whitespace: JsonWhitespace, _work: Work) -> str:
    if len(options) > MAX_CHOICES:
        raise SchemaError("", f"has {len(options)} options; the limit is {MAX_CHOICES}")
    if "" in options:
        raise SchemaError("", f"option {options.index('')} is empty")
    return "root ::= " + " | ".join(literal(option) for option in dict.fromkeys(options)) + "\n"


def _regex(pattern: str, _whitespace: JsonWhitespace, _work: Work) -> str:
    return _whole(pattern)


def _whole(pattern: str) -> str:
    return f"root ::= {whole(pattern)}\n"


def _json_schema(text: str, whitespace: JsonWhitespace, work: Work) -> str:
    return schema_grammar(parse(text), whitespace, work)


def _json_object(_value: bool, whitespace: JsonWhitespace, _work: Work) -> str:
    return Rules(whitespace).text("object")


def _grammar(text: str, _whitespace: JsonWhitespace, _work: Work) -> str:
    if not text.strip():
        raise SchemaError("", "is empty")
    return text


_GRAMMARS: dict[str, Any] = {
    "choice": _choice,
    "regex": _regex,
    "json_schema": _json_schema,
    "json_object": _json_object,
    "grammar": _grammar,
}


def _structural_tag(text: str, whitespace: JsonWhitespace, work: Work) -> str:
    """Return the structural tag with its JSON schemas and regular expressions replaced by grammars. Schemas and
    expressions then have the same meaning as in other constraints.
    """
    tag = parse(text)
    if not isinstance(tag, dict) or "format" not in tag:
        raise SchemaError("", 'must be a JSON object: {"type": "structural_tag", "format": {...}}')
    return json.dumps(_rewritten(tag, whitespace, work, "#", 0), default=_plain)


def _plain(value: Decimal) -> int | float:
    return int(value) if value == int(value) else float(value)


def _rewritten(part: Any, whitespace: JsonWhitespace, work: Work, path: str, depth: int) -> Any:
    if depth > _MAX_TAG_DEPTH:
        raise SchemaError(path, f"is nested more than {_MAX_TAG_DEPTH} levels deep")
    if isinstance(part, list):
        return [_rewritten(item, whitespace, work, f"{path}/{i}", depth + 1) for i, item in enumerate(part)]
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if "type" in part and not isinstance(kind, str):
        raise SchemaError(f"{path}/type", f"is {shown(kind)}; it must be a string")
    if kind == "json_schema":
        return {"type": "grammar", "grammar": _tag_schema(part, whitespace, work, path)}
    if kind == "regex":
        return {"type": "grammar", "grammar": _tag_regex(part, path)}
    if kind in _REFUSED_FORMATS:
        raise SchemaError(f"{path}/type", f"is {kind!r}, which is not supported: {_REFUSED_FORMATS[kind]}")
    return {key: _rewritten(value, whitespace, work, f"{path}/{key}", depth + 1) for key, value in part.items()}


def _tag_schema(part: dict[str, Any], whitespace: JsonWhitespace, work: Work, path: str) -> str:
    for key, value in part.items():
        if key not in ("type", "json_schema") and (key, value) != ("style", "json"):
            raise SchemaError(f"{path}/{key}", f"is {shown(value)}, which is not supported together with a JSON schema")
    try:
        return schema_grammar(part.get("json_schema"), whitespace, work)
    except SchemaError as e:
        raise type(e)(f"{path}/json_schema{e.path.removeprefix('#')}", e.what) from None


def _tag_regex(part: dict[str, Any], path: str) -> str:
    if not isinstance(part.get("pattern"), str) or set(part) - {"type", "pattern"}:
        raise SchemaError(path, "must have the keys type and pattern (a string), and no other keys")
    try:
        return _whole(part["pattern"])
    except RegexError as e:
        raise SchemaError(f"{path}/pattern", str(e)) from None
