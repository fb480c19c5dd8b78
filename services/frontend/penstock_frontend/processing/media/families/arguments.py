"""Arguments of processors that a request may give: known names alone, and none that asks for more than the checkpoint does."""

from collections.abc import Mapping
from typing import Any


def check_names(kwargs: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ValueError for an argument that is not one of ``known``."""
    for name in kwargs:
        if name not in known:
            takes = f"those it takes are {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"processor_kwargs.{name} is set; {takes}")


def whole_number(kwargs: Mapping[str, Any], name: str, *, least: int = 1, most: int | None = None) -> int | None:
    """An argument within its bounds; None where it is not set. Raises ValueError."""
    value = kwargs.get(name)
    if value is None:
        return None
    return checked(value, f"processor_kwargs.{name}", least=least, most=most)


def checked(value: Any, field: str, *, least: int = 1, most: int | None = None) -> int:
    """``value``, which must be a whole number within bounds. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} is {_shown(value)}; it must be a whole number")
    if value < least or (most is not None and value > most):
        bounds = f"from {least} to {most}" if most is not None else f"at least {least}"
        raise ValueError(f"{field} is {value}; it must be {bounds}")
    return value


def flag(kwargs: Mapping[str, Any], name: str) -> bool | None:
    """A boolean argument; None where it is not set. Raises ValueError."""
    value = kwargs.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"processor_kwargs.{name} is {_shown(value)}; it must be true or false")
    return value


def size(kwargs: Mapping[str, Any], largest: Mapping[str, int], name: str = "size") -> dict[str, int] | None:
    """A size as an object of whole numbers, with none but the names of ``largest``, which bounds each; None where it is not set.
    Raises ValueError.
    """
    value = kwargs.get(name)
    if value is None:
        return None
    field = f"processor_kwargs.{name}"
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"{field} is {_shown(value)}; it must be an object with {' and '.join(largest)}")
    for key, number in value.items():
        if key not in largest:
            raise ValueError(f"{field}.{str(key)[:64]} is set; it has {' and '.join(largest)}")
        checked(number, f"{field}.{key}", most=largest[key])
    return dict(value)


def _shown(value: Any) -> str:
    return repr(value)[:64]
