"""The list of ignored fields equals the table in docs/reference/ignored-fields.md, and code reads every other field."""

import ast
import importlib
import pkgutil
import re
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

import penstock_frontend.api.anthropic
import penstock_frontend.api.openai
from penstock_frontend.api.ignored_fields import IGNORED, ignored_in
from penstock_frontend.api.openai.response_format import ResponseFormat
from tests.documents.field_tables import REFERENCE, updated

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "services/frontend/penstock_frontend"


def test_the_page_is_up_to_date() -> None:
    assert (REFERENCE / "ignored-fields.md").read_text(encoding="utf-8") == updated("ignored-fields.md"), (
        "run make settings"
    )


def test_no_field_is_listed_twice() -> None:
    places = [(field.protocol, field.path) for field in IGNORED]
    assert len(set(places)) == len(places)


@cache
def body_structs() -> dict[str, type[msgspec.Struct]]:
    """Return the structs of request bodies and of their nested objects, by name."""
    modules = [
        importlib.import_module(found.name)
        for package in (penstock_frontend.api.openai, penstock_frontend.api.anthropic)
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    named = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    decoded = {
        name
        for module in modules
        for name in re.findall(r"\.decode(?:_form)?\((\w+)\)", Path(str(module.__file__)).read_text())
    }
    found: dict[str, type[msgspec.Struct]] = {}
    waiting = [named[name] for name in sorted(decoded & named.keys())] + [ResponseFormat]
    while waiting:
        struct = waiting.pop()
        if found.setdefault(struct.__name__, struct) is struct:
            inner = [each for field in msgspec.structs.fields(struct) for each in structs_in(field.type)]
            waiting += [each for each in inner if each.__name__ not in found]
    return found


def structs_in(of: object) -> Iterator[type[msgspec.Struct]]:
    if isinstance(of, type) and issubclass(of, msgspec.Struct):
        yield of
    for each in typing.get_args(of):
        yield from structs_in(each)


@cache
def names_that_are_read() -> frozenset[str]:
    """Return the attributes that the code reads, and string constants that may be names of attributes."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        if path.name == "ignored_fields.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


def unread(structs: dict[str, type[msgspec.Struct]]) -> list[str]:
    return [
        f"{struct}.{field.name}"
        for struct, kind in structs.items()
        for field in msgspec.structs.fields(kind)
        if field.name not in names_that_are_read() and field.name not in ignored_in(struct)
    ]


def test_every_declared_field_is_read_or_listed() -> None:
    assert {"ChatCompletionRequest", "MessagesBody", "ResponseBody", "RerankBody", "BlockBody"} <= body_structs().keys()
    assert unread(body_structs()) == []


def test_a_declared_field_that_nobody_reads_is_found() -> None:
    bad = msgspec.defstruct("Bad", [("nobody" + "_reads_this", int)])
    assert unread({"Bad": bad}) == ["Bad.nobody_reads_this"]


def test_listed_structs_are_those_of_bodies() -> None:
    assert {struct for field in IGNORED for struct in field.structs} <= body_structs().keys()
