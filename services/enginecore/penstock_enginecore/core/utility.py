"""Methods that may be called by name from a frontend.

Only methods marked with ``@utility`` can be called. Arguments travel as a msgpack array of positional values and are
converted against the method's signature, so that a wrong type is an error that names the argument. Nothing else is
reachable.
"""

import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, nearest

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__penstock_utility__"


def utility(method: F) -> F:
    """Let frontends call this method by its name."""
    setattr(method, _MARK, True)
    return method


class UtilityRegistry:
    """The ``@utility`` methods of an object."""

    def __init__(self, owner: object) -> None:
        self._methods: dict[str, tuple[Callable[..., Any], list[tuple[inspect.Parameter, Any]]]] = {}
        for name, function in inspect.getmembers(type(owner), inspect.isfunction):
            if getattr(function, _MARK, False):
                method = getattr(owner, name)
                hints = typing.get_type_hints(function)
                parameters = inspect.signature(method).parameters.values()
                self._methods[name] = method, [(p, hints[p.name]) for p in parameters]

    @property
    def names(self) -> tuple[str, ...]:
        """What can be called, sorted."""
        return tuple(sorted(self._methods))

    def call(self, name: str, arguments: bytes) -> bytes:
        """Call a method with a msgpack array (empty bytes: no arguments). Returns its result in msgpack.

        Raises Unimplemented for an unknown name, InvalidArgument for wrong arguments, and what the method raises.
        """
        if name not in self._methods:
            raise Unimplemented(
                f"no utility method {name!r}{nearest(name, self._methods)}", field="method", reason="UNKNOWN_METHOD"
            )
        method, parameters = self._methods[name]
        return msgspec.msgpack.encode(method(*_convert(name, parameters, arguments)))


def _convert(name: str, parameters: list[tuple[inspect.Parameter, Any]], arguments: bytes) -> list[Any]:
    try:
        values = msgspec.msgpack.decode(arguments, type=list) if arguments else []
    except msgspec.MsgspecError as e:
        raise InvalidArgument(f"{name}: arguments are not a msgpack array: {e}", field="arguments") from None
    if len(values) > len(parameters):
        raise InvalidArgument(f"{name} takes at most {len(parameters)} arguments, got {len(values)}", field="arguments")
    missing = [p.name for p, _ in parameters[len(values) :] if p.default is p.empty]
    if missing:
        raise InvalidArgument(f"{name}: argument '{missing[0]}' is missing", field=f"arguments.{missing[0]}")
    converted = []
    for value, (parameter, hint) in zip(values, parameters, strict=False):
        try:
            converted.append(msgspec.convert(value, hint))
        except msgspec.ValidationError as e:
            message = f"{name}: argument '{parameter.name}' is wrong: {e}"
            raise InvalidArgument(message, field=f"arguments.{parameter.name}") from None
    return converted
