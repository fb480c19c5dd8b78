"""How a chat template reads what a message says: as a text, or part by part. It is seen from what the template does with it."""

from collections.abc import Iterator
from typing import NamedTuple

from jinja2 import nodes

_MESSAGES, _CONTENT = "messages", "content"


class ContentFormat(NamedTuple):
    """``reads_parts``: it goes through the parts of a content; ``tells_text``: it asks whether a content is a text."""

    reads_parts: bool
    tells_text: bool


def content_format(template: nodes.Template) -> ContentFormat:
    """Of a template's tree."""
    contents = _Contents(template)
    return ContentFormat(
        reads_parts=any(contents.has(loop.iter) for loop in template.find_all(nodes.For)),
        tells_text=any(test.name == "string" and contents.has(test.node) for test in template.find_all(nodes.Test)),
    )


class _Contents:
    """Which expressions of a template are a message's content. Names are followed through assignments, loops and macros, wherever
    they stand: a template does not call two things by one name.
    """

    def __init__(self, template: nodes.Template) -> None:
        self._lists, self._messages, self._names = {_MESSAGES}, set[str](), set[str]()
        macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
        known = -1
        while known != (known := len(self._lists) + len(self._messages) + len(self._names)):
            for target, value in _bound(template, macros):
                self._learn(target, value)
            for loop in template.find_all(nodes.For):
                if isinstance(loop.target, nodes.Name) and self._is_list(loop.iter):
                    self._messages.add(loop.target.name)

    def has(self, node: nodes.Node) -> bool:
        """Whether an expression is a content, or made of one."""
        node = _base(node)
        if isinstance(node, nodes.Name):
            return node.name in self._names
        owner = _owner_of(node, _CONTENT)
        return owner is not None and self._is_message(owner)

    def _learn(self, target: str, value: nodes.Node) -> None:
        if self.has(value):
            self._names.add(target)
        elif self._is_list(value):
            self._lists.add(target)
        elif self._is_message(value):
            self._messages.add(target)

    def _is_list(self, node: nodes.Node) -> bool:
        node = _base(node)
        return isinstance(node, nodes.Name) and node.name in self._lists

    def _is_message(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in self._messages
        return isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice) and self._is_list(node.node)


def _bound(template: nodes.Template, macros: dict[str, nodes.Macro]) -> Iterator[tuple[str, nodes.Node]]:
    """Names and what they are given: by assignments, and as arguments of macros."""
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            yield assign.target.name, assign.node
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and (macro := macros.get(call.node.name)) is not None:
            for argument, value in zip(macro.args, call.args, strict=False):
                yield argument.name, value


def _base(node: nodes.Node) -> nodes.Node:
    """An expression without filters and slices, and the first branch of a choice."""
    inner = _inner(node)
    return node if inner is None else _base(inner)


def _inner(node: nodes.Node) -> nodes.Node | None:
    if isinstance(node, nodes.Filter):
        return node.node
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return node.node
    return node.expr1 if isinstance(node, nodes.CondExpr) else None


def _owner_of(node: nodes.Node, name: str) -> nodes.Node | None:
    """What has an attribute of that name which an expression is: ``x.name``, ``x['name']``, ``x.get('name')``."""
    if isinstance(node, nodes.Getattr):
        return node.node if node.attr == name else None
    if isinstance(node, nodes.Getitem):
        return node.node if _is(node.arg, name) else None
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
        return node.node.node if node.args and _is(node.args[0], name) else None
    return None


def _is(node: nodes.Node, text: str) -> bool:
    return isinstance(node, nodes.Const) and node.value == text
