"""Whether answers are the JSON that their schemas ask for. ``jsonschema`` is imported when there is one to look at."""

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock_local.bench.record import Record

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_LONGEST = 200
"""Characters of a problem that are told: the validator quotes the whole value."""


class JsonAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """How many answers were asked to follow a schema and ended well, how many are JSON, and how many follow it."""

    answers: int
    parse: int
    validate: int


def check_answers(records: Sequence[Record]) -> JsonAnswers | None:
    """Judge the answers, and note of each record what is wrong with its. None where no schema was asked for."""
    asked = [record for record in records if record.schema and record.ok]
    if not any(record.schema for record in records):
        return None
    parse = 0
    for record in asked:
        try:
            value = json.loads(record.text)
        except ValueError as e:
            record.problem = f"it is no JSON: {e}"
            continue
        parse += 1
        error = next(_validator(record.schema).iter_errors(value), None)
        record.problem = f"{error.json_path}: {error.message}"[:_LONGEST] if error is not None else ""
    return JsonAnswers(answers=len(asked), parse=parse, validate=sum(not record.problem for record in asked))


def schema_problem(schema: Any) -> str:
    """What keeps ``schema`` from being a JSON schema; empty: nothing does."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as e:
        return f"{e.json_path}: {e.message}"[:_LONGEST]
    return ""


@functools.cache
def _validator(schema: str) -> "Validator":
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    parsed = json.loads(schema)
    return validator_for(parsed, default=Draft202012Validator)(parsed)
