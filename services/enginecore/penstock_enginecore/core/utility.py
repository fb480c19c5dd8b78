"""Utility methods: methods that frontends can call by name.

Only methods marked with ``@utility``, and functions that a plugin registers, can be called. Arguments are a msgpack
array of positional values. The values are converted to the types in the method's signature. If a value has a wrong
type, the error names the argument.
"""

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, nearest, quoted
from penstock_common.nesting_depth import MAX_ARGUMENT_DEPTH, nests_deeper

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__penstock_utility__"


def utility(method: F) -> F:
    """Mark a method so that frontends can call it by name. If the method returns a Future, the result is sent once the
    Future is done.
    """
    setattr(method, _MARK, True)
    return method


class UtilityRegistry:
    """The ``@utility`` methods of an object, and registered functions that take the object as their first argument."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._methods: dict[str, tuple[Callable[..., Any], list[tuple[inspect.Parameter, Any]]]] = {}
        self.include(owner)

    def include(self, owner: object) -> None:
        """Add the ``@utility`` methods of another object. Raises the same errors as ``register``."""
        for name, function in inspect.getmembers(type(owner), inspect.isfunction):
            if getattr(function, _MARK, False):
                self.register(name, function, owner)

    def register(self, name: str, function: Callable[..., Any], owner: object = None) -> None:
        """Make ``function`` callable as ``name``. Calls pass ``owner`` as the first argument. If ``owner`` is None,
        calls pass the registry's own object.

        Raises ValueError if the name is in use or a parameter has no type annotation.
        """
        if name in self._methods:
            raise ValueError(f"utility {name!r} is already registered")
        hints = typing.get_type_hints(function)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        untyped = [p.name for p in parameters if p.name not in hints]
        if untyped:
            raise ValueError(f"utility {name!r}: parameter {untyped[0]!r} has no type annotation")
        method = function.__get__(self._owner if owner is None else owner)
        self._methods[name] = method, [(p, hints[p.name]) for p in parameters]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all callable methods, sorted."""
        return tuple(sorted(self._methods))

    def call(self, name: str, arguments: bytes) -> Any:
        """Call a method with a msgpack array of arguments. Empty bytes mean no arguments. Return the method's result,
        which may be a Future.

        Raises Unimplemented for an unknown name, InvalidArgument for wrong arguments, and the method's own errors.
        """
        self._check(name)
        try:
            values = msgspec.msgpack.decode(arguments, type=list) if arguments else []
        except msgspec.MsgspecError as e:
            raise InvalidArgument(f"{name}: arguments are not a msgpack array: {e}", field="arguments") from None
        except RecursionError:
            raise _too_deep(name) from None
        return self.invoke(name, values)

    def invoke(self, name: str, values: Sequence[Any]) -> Any:
        """Call a method with a list of Python values as arguments. Raises the same errors as ``call``."""
        self._check(name)
        if nests_deeper(list(values), MAX_ARGUMENT_DEPTH):
            raise _too_deep(name)
        method, parameters = self._methods[name]
        return method(*_convert(name, parameters, values))

    def _check(self, name: str) -> None:
        if name not in self._methods:
            raise Unimplemented(
                f"no utility method {quoted(name)}{nearest(name, self._methods)}",
                field="method",
                reason="UNKNOWN_METHOD",
            )


def _too_deep(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name}: arguments are nested more than {MAX_ARGUMENT_DEPTH} levels deep", field="arguments"
    )


def _convert(name: str, parameters: list[tuple[inspect.Parameter, Any]], values: Sequence[Any]) -> list[Any]:
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


Where = Literal["engine", "worker"]

_ADDED: dict[Where, dict[str, Callable[..., Any]]] = {"engine": {}, "worker": {}}


def register_utility(name: str, function: Callable[..., Any], *, where: Where = "engine") -> None:
    """Make ``function`` callable as ``name`` in engines that are created after this call.

    The first argument of each call is the EngineControl or the Worker. Every other parameter must have a type
    annotation, and arguments are converted to these types. The result must be encodable as msgpack. Raises ValueError
    if a plugin has already registered the name.
    """
    if name in _ADDED[where]:
        raise ValueError(f"{where} utility {name!r} is already registered")
    _ADDED[where][name] = function


def extend(registry: UtilityRegistry, where: Where) -> UtilityRegistry:
    """Add the utility methods that plugins registered. Raises ValueError if a name is in use or a parameter has no type
    annotation.
    """
    for name, function in _ADDED[where].items():
        registry.register(name, function)
    return registry
