"""Tool calls written as a Python list: ``[name(key="value"), other(key=[1, 2])]``."""

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any

from penstock_frontend.processing.parsers.call_scanner import whole

_CONSTANTS = {"true": True, "false": False, "null": None}
_PAIRS = {")": "(", "]": "[", "}": "{"}
_MAX_NESTING = 64
_BEGIN = re.compile(r"[A-Za-z_][\w.]*\s*\(")
"""Pattern for the beginning of a tool call."""


class BracketScanner:
    """Tracks a text from its opening bracket to the matching closing bracket.

    Brackets in strings with single or double quotes are ignored.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._quote = ""
        self._escaped = False

    def push(self, text: str) -> tuple[int, bool | None]:
        """Return how many characters belong to the bracketed text, and whether it is complete.

        The second value is None if the brackets do not match.
        """
        for index, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._open.append(char)
                if len(self._open) > _MAX_NESTING:
                    return index, None
            elif char in _PAIRS:
                if self._open.pop() != _PAIRS[char]:
                    return index, None
                if not self._open:
                    return index + 1, True
        return len(text), False


def may_begin_calls(text: str) -> bool | None:
    """Return whether the text after an opening bracket begins with a tool call. Return None if more text is needed to
    decide this.
    """
    if _BEGIN.match(text):
        return True
    return None if re.fullmatch(r"([A-Za-z_][\w.]*\s*)?", text) and len(text) < 256 else False


def read_calls(text: str) -> Sequence[tuple[str, str]]:
    """Return the name and the arguments, as JSON, of each tool call in a text.

    The text must have lists of calls, or one call per line. A call may be an argument of ``print``.

    Raises ValueError for any other text.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ignore Python's warnings about invalid escape sequences
            statements = ast.parse(text.strip()).body
        calls = [_call(node) for statement in statements for node in _nodes(statement)]
    except (SyntaxError, RecursionError, MemoryError) as e:
        raise ValueError("is not valid Python") from e
    if not calls:
        raise ValueError("has no calls")
    return calls


def _nodes(statement: ast.stmt) -> Sequence[ast.expr]:
    match statement:
        case ast.Expr(value=ast.List(elts=nodes)):
            return nodes
        case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=[ast.Call() as printed], keywords=[])):
            return [printed]
        case ast.Expr(value=node):
            return [node]
        case _:
            raise ValueError("is not a call")


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("is not a call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("has an argument without a name")
        arguments[keyword.arg] = _value(keyword.value)
    return _name(node.func), whole(json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _name(node: ast.expr) -> str:
    """Return the name of a function, with the names of its packages in front."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ValueError("has a function without a name")
    return ".".join([node.id, *reversed(names)])


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=values) | ast.Tuple(elts=values):
            return [_value(value) for value in values]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case _:
            raise ValueError("has an argument that is not a literal")


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("has a key that is not a string")
    return node.value
