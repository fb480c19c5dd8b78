"""Reading the JSON text of a schema, as exactly as it was written and no deeper than can be followed."""

import json
from decimal import Decimal, InvalidOperation
from typing import Any

from penstock_common.nesting import nests_deeper
from penstock_enginecore.structured_output.constraints.json_types import (
    SchemaError,
)

MAX_NESTING = 256
"""How deeply the JSON text of a schema may nest, values of ``const`` and ``enum`` included."""

MAX_EXPONENT = 300
"""Largest power of ten of a number."""


def parse(text: str) -> Any:
    """The JSON value in ``text``, fractions as Decimal. Raises SchemaError."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    try:
        value = json.loads(text, parse_float=_fraction, parse_constant=refuse)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as e:
        raise SchemaError("", f"is not valid JSON: {e}") from None
    if nests_deeper(value, MAX_NESTING):
        raise _too_deep()
    return value


def _too_deep() -> SchemaError:
    return SchemaError("", f"nests more than {MAX_NESTING} deep")


def _fraction(text: str) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation:  # its exponent does not fit
        raise ValueError(f"the number {text[:40]} is out of range") from None
    if abs(value.adjusted()) > MAX_EXPONENT:
        raise ValueError(f"the number {text[:40]} is out of range")
    return value
