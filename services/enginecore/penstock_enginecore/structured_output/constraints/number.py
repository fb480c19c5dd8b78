"""Ranges of numbers as expressions of a grammar: JSON numbers without an exponent, digit by digit.

Every number written under a bound has at most 15 significant digits, so that different texts are different floats and an
exclusive bound stays exclusive after parsing. Bounds are rounded inwards to what can be written.
"""

from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

MAX_INTEGER_DIGITS = 18
"""Digits of an integer without an upper bound: all of them fit 64 bits."""
MAX_SIGNIFICANT = 15
"""Digits of a number with a fraction: different texts are different floats."""
_FRACTION = 6
_SMALL = 10 ** (MAX_SIGNIFICANT - _FRACTION)
_Writer = Callable[[int, int], list[str]]

INTEGER = f'"-"? ("0" | [1-9] [0-9]{{0,{MAX_INTEGER_DIGITS - 1}}})'
NUMBER = f'"-"? ("0" | [1-9] [0-9]{{0,14}}) ("." [0-9]{{1,{MAX_SIGNIFICANT}}})? ([eE] [+\\-]? [0-9]{{1,2}})?'


def integer_range(low: Decimal | None, high: Decimal | None, *, above: bool = False, below: bool = False) -> str:
    """The expression for the integers from ``low`` to ``high``, either of which may be None: no bound.

    ``above`` and ``below`` exclude the bound itself. Raises ValueError when there is no such integer of at most 18 digits.
    """
    limit = 10**MAX_INTEGER_DIGITS - 1
    first, last = -limit if low is None else _lowest(low, above), limit if high is None else _highest(high, below)
    return _signed(max(first, -limit), min(last, limit), _naturals, "18 digits")


def number_range(low: Decimal | None, high: Decimal | None, *, above: bool = False, below: bool = False) -> str:
    """As ``integer_range``, for numbers with a fraction: 6 digits, or none when a bound is 10**9 or more."""
    small = all(bound is None or abs(bound) < _SMALL for bound in (low, high))
    scale = 10**_FRACTION if small else 1
    limit = 10**MAX_SIGNIFICANT - 1
    first = -limit if low is None else _lowest(low * scale, above)
    last = limit if high is None else _highest(high * scale, below)
    write = _decimals if small else _naturals
    return _signed(max(first, -limit), min(last, limit), write, f"{_FRACTION} digits behind the point")


def _lowest(bound: Decimal, exclusive: bool) -> int:
    whole = int(bound.to_integral_value(ROUND_CEILING))
    return whole + 1 if exclusive and whole == bound else whole


def _highest(bound: Decimal, exclusive: bool) -> int:
    whole = int(bound.to_integral_value(ROUND_FLOOR))
    return whole - 1 if exclusive and whole == bound else whole


def _signed(first: int, last: int, write: _Writer, written: str) -> str:
    if first > last:
        raise ValueError(f"no number within {written} lies between the bounds")
    options = []
    if last >= 0:
        options += write(max(first, 0), last)
    if first < 0:
        options.append(f'"-" ({" | ".join(write(max(-last, 1), -first))})')
    return f"({' | '.join(options)})"


def _naturals(first: int, last: int) -> list[str]:
    """Alternatives for ``first`` to ``last`` without leading zeros."""
    options = []
    for length in range(len(str(first)), len(str(last)) + 1):
        smallest = 0 if length == 1 else 10 ** (length - 1)
        low, high = max(first, smallest), min(last, 10**length - 1)
        options.append(_digits(str(low), str(high)))
    return options


def _decimals(first: int, last: int) -> list[str]:
    """Alternatives for ``first`` to ``last`` millionths."""
    (low, low_part), (high, high_part) = divmod(first, 10**_FRACTION), divmod(last, 10**_FRACTION)
    nines = 10**_FRACTION - 1
    if low == high:
        return [f"{_digits(str(low), str(low))} {_fraction(low_part, high_part)}"]
    options = []
    if low_part > 0:
        options.append(f"{_digits(str(low), str(low))} {_fraction(low_part, nines)}")
        low += 1
    if high_part < nines:
        options.append(f"{_digits(str(high), str(high))} {_fraction(0, high_part)}")
        high -= 1
    if low <= high:
        options.append(f"({' | '.join(_naturals(low, high))}) {_fraction(0, nines)}")
    return options


def _fraction(first: int, last: int) -> str:
    """The part behind the integer: ``first`` to ``last`` millionths, with as many digits as are needed or more."""
    if first == 0 and last == 10**_FRACTION - 1:
        return f'("." [0-9]{{1,{_FRACTION}}})?'
    options = ['""'] if first == 0 else []
    for length in range(1, _FRACTION + 1):
        unit = 10 ** (_FRACTION - length)
        low, high = -(-first // unit), last // unit
        if low <= high:
            options.append(f'"." {_digits(str(low).zfill(length), str(high).zfill(length))}')
    return f"({' | '.join(options)})"


def _digits(low: str, high: str) -> str:
    """The digit strings of one length from ``low`` to ``high``."""
    if low == high:
        return f'"{low}"'
    length = len(low)
    if low == "0" * length and high == "9" * length:
        return f"[0-9]{{{length}}}"
    if low[0] == high[0]:
        return f'"{low[0]}" {_digits(low[1:], high[1:])}'
    if length == 1:
        return f"[{low}-{high}]"
    rest = length - 1
    first, last, options = int(low[0]), int(high[0]), []
    if low[1:] != "0" * rest:
        options.append(f'"{first}" {_digits(low[1:], "9" * rest)}')
        first += 1
    if high[1:] != "9" * rest:
        options.append(f'"{last}" {_digits("0" * rest, high[1:])}')
        last -= 1
    if first <= last:
        options.append(f"[{first}-{last}] [0-9]{{{rest}}}")
    return f"({' | '.join(options)})"
