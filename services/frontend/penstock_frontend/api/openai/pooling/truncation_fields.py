"""Fields that say how inputs of pooling calls that are too long are cut, under the names that servers give them."""

from collections.abc import Mapping
from typing import Any

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.openai.body_fields import check_range, shown
from penstock_frontend.api.openai.context import ContextFields
from penstock_frontend.call_types import Truncation

_MANY = 2**31
_SIDES: Mapping[str, Mapping[str, Truncation]] = {
    "truncation_side": {"right": "end", "left": "start"},
    "truncation_direction": {"right": "end", "left": "start"},
    "truncate": {"end": "end", "start": "start"},
}
"""Fields that name a side, their words in lower case, and the side that is cut off."""

_NO_CUT = ("NONE", "none", "None")


class TruncationFields(ContextFields, kw_only=True):
    """The fields. ``truncate_prompt_tokens`` (vLLM): inputs are cut to so many tokens, -1 to as many as the model reads.

    ``truncation_side`` (vLLM) and ``truncation_direction`` (TEI): the side that is cut, ``right`` by default. ``truncate``: true
    or false (TEI), or ``END``, ``START`` or ``NONE`` (Cohere, NIM). ``truncation``: true or false (Voyage).
    """

    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    truncation_direction: str | None = None
    truncate: bool | str | None = None
    truncation: bool | None = None


def truncation_of(body: TruncationFields) -> Truncation | None:
    """Return where longer inputs are cut, as ``PoolingRequest.truncation`` has it.

    Raises:
        InvalidArgument: A field is out of range, or two fields ask for different things.
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
    return side if side is not None else "end" if is_cut else None


def _side(name: str, value: bool | str | None) -> Truncation | None:
    if value is None or isinstance(value, bool) or (name == "truncate" and value in _NO_CUT):
        return None
    words = _SIDES[name]
    if value.lower() not in words:
        known = ", ".join(("none", *words) if name == "truncate" else words)
        raise InvalidArgument(f"{name} is {shown(value)}; known: {known}", field=name)
    return words[value.lower()]


def _agreed(body: TruncationFields, given: Mapping[str, Any]) -> Any:
    """Return the only value that fields have, None for none. Raises InvalidArgument for two."""
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        first = next(iter(values))
        if value != values[first]:
            raise InvalidArgument(
                f"{first} is {shown(getattr(body, first))} and {name} is {shown(getattr(body, name))}; they ask for different "
                "cuts, so set one",
                field=name,
            )
    return next(iter(values.values()), None)
