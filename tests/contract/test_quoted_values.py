"""Errors for clients never quote values of any length, because ``quoted`` limits the length."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_common import errors
from penstock_common.errors import RequestFailed

SERVICES = Path(__file__).parents[2] / "services"
FILES = sorted(
    file
    for part in ("common", "frontend", "enginecore", "coordinator")
    for file in SERVICES.glob(f"{part}/penstock_*/**/*.py")
)
ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, RequestFailed)} | {
    "unreadable",
    "too_large",
    "not_allowed",
    "fetch_failed",
}


def raw_quotes(source: str) -> Iterator[tuple[int, str]]:
    """Return lines and expressions that a request error quotes without a length limit.

    Constants of the code are left out, because clients do not set them.
    """
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        for value in (each for argument in call.args for each in ast.walk(argument) if name in ERRORS):
            if isinstance(value, ast.FormattedValue) and value.conversion == ord("r"):
                expression = ast.unparse(value.value)
                if not expression.isupper():
                    yield call.lineno, expression


def test_the_check_finds_a_raw_quote() -> None:
    assert list(raw_quotes("raise InvalidArgument(f'{field} is {value!r}', field=field)")) == [(1, "value")]
    assert not list(raw_quotes("raise InvalidArgument(f'{field} is {quoted(value)} beside {EMBEDS!r}')"))


KNOWN = {"served", "prompt[e.start]"}
"""Quoted expressions that are allowed: words of the code, and a single character."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SERVICES)))
def test_no_error_of_a_request_quotes_a_whole_value(file: Path) -> None:
    assert [each for each in raw_quotes(file.read_text()) if each[1] not in KNOWN] == []
