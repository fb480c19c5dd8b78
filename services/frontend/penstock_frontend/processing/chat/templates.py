"""Chat templates, which are jinja2 programs. They run in a sandbox, with limits on time and size."""

import datetime as dt
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock_common.errors import ConfigError, InvalidArgument, excerpt
from penstock_common.files import read_input
from penstock_common.observability.logging import get_logger
from penstock_frontend.config import ModelConfig
from penstock_frontend.processing.prompts.tokenizer import read_json, resolve

# The code below analyzes the source of a chat template. The code finds out whether the template reads the content of a
# message as text, or part by part.

_MESSAGES, _CONTENT = "messages", "content"


class ContentFormat(NamedTuple):
    """Form in which a chat template reads the content of messages.

    Attributes:
        reads_parts: Whether the template iterates over the parts of a message content.
        tells_text: Whether the template checks if a message content is a string.
    """

    reads_parts: bool
    tells_text: bool


def content_format(template: nodes.Template) -> ContentFormat:
    """Return the form in which a parsed template reads the content of messages."""
    contents = _Contents(template)
    return ContentFormat(
        reads_parts=any(contents.has(loop.iter) for loop in template.find_all(nodes.For)),
        tells_text=any(test.name == "string" and contents.has(test.node) for test in template.find_all(nodes.Test)),
    )


class _Contents:
    """Finds the expressions in a template that stand for the content of a message.

    The search follows names through assignments, loops and macros. The search ignores scopes, because it assumes that a
    name has the same meaning everywhere in the template.
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
        """Return whether an expression stands for the content of a message, or is derived from it."""
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
    """Yield each variable name and the expression that is bound to it, from assignments and from arguments of macros."""
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            yield assign.target.name, assign.node
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and (macro := macros.get(call.node.name)) is not None:
            for argument, value in zip(macro.args, call.args, strict=False):
                yield argument.name, value


def _base(node: nodes.Node) -> nodes.Node:
    """Return an expression without its filters and slices. For a conditional expression, use its first branch."""
    inner = _inner(node)
    return node if inner is None else _base(inner)


def _inner(node: nodes.Node) -> nodes.Node | None:
    if isinstance(node, nodes.Filter):
        return node.node
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return node.node
    return node.expr1 if isinstance(node, nodes.CondExpr) else None


def _owner_of(node: nodes.Node, name: str) -> nodes.Node | None:
    """Return the object whose attribute ``name`` the expression reads: ``x.name``, ``x['name']`` or ``x.get('name')``."""
    if isinstance(node, nodes.Getattr):
        return node.node if node.attr == name else None
    if isinstance(node, nodes.Getitem):
        return node.node if _is(node.arg, name) else None
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
        return node.node.node if node.args and _is(node.args[0], name) else None
    return None


def _is(node: nodes.Node, text: str) -> bool:
    return isinstance(node, nodes.Const) and node.value == text


# The code below finds the strings for which a chat template searches in its input texts.


def looked_for(template: nodes.Template) -> set[str]:
    """Return the string constants that a template uses in comparisons, or as arguments of methods and filters.

    Examples of such code are ``'</think>' in content``, ``content.split('</think>')``.
    """
    return {
        node.value
        for place in _places(template)
        for node in (place, *place.find_all(nodes.Const))
        if isinstance(node, nodes.Const) and isinstance(node.value, str)
    }


def _places(template: nodes.Template) -> Iterator[nodes.Node]:
    yield from template.find_all(nodes.Compare)
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):  # a method call; a call of a macro only writes the arguments
            yield from call.args
    for filtered in template.find_all(nodes.Filter):
        yield from filtered.args


TIME_LIMIT = 5.0
"""Time limit for rendering one conversation, in seconds."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT, _TOOL_USE = "default", "tool_use"
_MAX_TEMPLATE_BYTES = 4 << 20
"""Maximum size of a template file in bytes. The templates of published models are smaller than 64 KiB."""
_TOOLS = "tools"
"""Name of the template variable that contains the tools."""


class TemplateTraits(NamedTuple):
    """Properties of a chat template that follow from its source, without running the template."""

    form: ContentFormat
    looked_for: set[str]
    """Strings for which the template searches in its input texts."""
    shows_tools: bool


class ChatTemplates:
    """Chat templates of one model, by name. Most models have only the template ``default``.

    ``special_tokens`` are the texts of special tokens by name, such as ``bos_token``. The class is thread-safe, because
    conversations are rendered in the tokenizer's threads.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        subject: str = "messages: the model's chat template",
    ) -> None:
        """Compile the templates of a model or a request. ``subject`` is the beginning of error messages: the name of
        the field and of the template.
        """
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._environment = _Environment()
        self._templates: dict[str, jinja2.Template] = {}
        self._broken: dict[str, str] = {}
        self._showing_tools: set[str] = set()
        self._formats: dict[str, ContentFormat] = {}
        self._subject = subject
        self.looked_for: set[str] = set()
        """Strings for which the templates search in their input texts."""
        for name, source in sources.items():
            try:
                self._templates[name] = self._environment.from_string(source)
                traits = _traits(self._environment, source)
                self._formats[name] = traits.form
                self.looked_for |= traits.looked_for
                if traits.shows_tools:
                    self._showing_tools.add(name)
            except (TemplateError, RecursionError) as e:
                self._broken[name] = _what_is_wrong(e)
                get_logger().warning("chat template cannot be read", template=name, error=_what_is_wrong(e))

    @property
    def source(self) -> str:
        """Sources of all templates, joined. Empty if the model has no template."""
        return "\n".join(self._sources.values())

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of the model's special tokens, by the names that templates use for them."""
        return self._special_tokens

    @property
    def broken(self) -> str:
        """Reason why the template for conversations without tools is not valid.

        Empty if this template is valid or missing.
        """
        return self._broken.get(_DEFAULT, "")

    @property
    def begin(self) -> str:
        """Text of the token that begins a prompt. Empty if the model has no such token."""
        return self._special_tokens.get("bos_token", "")

    @property
    def hides_tools(self) -> bool:
        """Whether the template that is used for conversations with tools does not write the tools into the prompt."""
        name = self._name_of(with_tools=True)
        return name in self._templates and name not in self._showing_tools

    def content_format(self, *, with_tools: bool) -> ContentFormat:
        """Return the form in which the template for conversations with (or without) tools reads the content of
        messages.
        """
        return self._formats.get(self._name_of(with_tools=with_tools), ContentFormat(False, True))

    def render(self, variables: Mapping[str, Any], *, max_chars: int, seconds: float = TIME_LIMIT) -> str:
        """Return the prompt that a conversation is rendered to.

        Raises InvalidArgument if there is no template, or if the template refuses the conversation.
        """
        template = self._pick(with_tools=bool(variables.get("tools")))
        pieces: list[str] = []
        size = 0
        self._environment.begin(seconds)
        try:
            for piece in template.generate({**self._special_tokens, **variables}):
                self._environment.checkpoint()
                size += len(piece)
                if size > max_chars:
                    raise InvalidArgument(
                        f"messages: the rendered prompt has more than {max_chars} characters, which is the limit",
                        field="messages",
                    )
                pieces.append(piece)
        except InvalidArgument:
            raise
        except Exception as e:  # the template is a program, and may raise any error for this conversation
            raise InvalidArgument(f"{self._subject} refuses the messages: {_first_line(e)}", field="messages") from e
        return "".join(pieces)

    def _pick(self, *, with_tools: bool) -> jinja2.Template:
        name = self._name_of(with_tools=with_tools)
        if name in self._broken:
            raise InvalidArgument(f"{self._subject} cannot be read: {self._broken[name]}", field="messages")
        if name not in self._templates:
            raise InvalidArgument(
                "messages: the model has no chat template; render the prompt yourself and use Generate",
                field="messages",
            )
        return self._templates[name]

    def _name_of(self, *, with_tools: bool) -> str:
        return _TOOL_USE if with_tools and _TOOL_USE in self._sources else _DEFAULT


def load_chat_templates(config: ModelConfig) -> ChatTemplates:
    """Load the chat templates of a model from a directory or hub id.

    Templates in files of their own override templates in tokenizer_config.json. Raises ConfigError if a file cannot be
    read or the template is not valid.
    """
    folder = resolve(config)
    if config.chat_template:
        return given_template(
            config.chat_template, _special_tokens(folder, read_json(folder / "tokenizer_config.json"))
        )
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    sources = _listed(tokenizer_config.get("chat_template"), folder)
    if isinstance(single := read_json(folder / "chat_template.json").get("chat_template"), str):
        sources[_DEFAULT] = single
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        sources[file.stem] = _read(file)
    if os.path.lexists(file := folder / "chat_template.jinja"):
        sources[_DEFAULT] = _read(file)
    return ChatTemplates(sources, _special_tokens(folder, tokenizer_config))


def template_traits(source: str) -> TemplateTraits:
    """Return the properties of a template from its source, without running the template.

    Raises:
        ValueError: The template is not valid. The error message has the reason and the line.
    """
    try:
        return _traits(_Environment(), source)
    except (TemplateError, RecursionError) as e:
        raise ValueError(_what_is_wrong(e)) from None


def _traits(environment: jinja2.Environment, source: str) -> TemplateTraits:
    tree = environment.parse(source)
    shows_tools = any(each.name == _TOOLS and each.ctx == "load" for each in tree.find_all(nodes.Name))
    return TemplateTraits(content_format(tree), looked_for(tree), shows_tools)


def given_template(
    path: str, special_tokens: Mapping[str, str], *, setting: str = "model.chat_template"
) -> ChatTemplates:
    """Load the template file that replaces the templates of the model.

    ``setting`` is the name of the setting in error messages. Raises ConfigError if the file cannot be read, is empty,
    or is not a valid template.
    """
    try:
        source = read_input(Path(path), _MAX_TEMPLATE_BYTES).decode()
    except (OSError, ValueError) as e:
        raise ConfigError(f"{setting} is {path!r}, but the file cannot be read: {e}") from None
    if not source.strip():
        raise ConfigError(f"{setting} is {path!r}: the file is empty")
    templates = ChatTemplates({_DEFAULT: source}, special_tokens)
    if templates.broken:
        raise ConfigError(f"{setting} is {path!r}: {templates.broken}")
    return templates


def _special_tokens(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    special = read_json(folder / "special_tokens_map.json") | dict(tokenizer_config)
    return {name: text for name in _SPECIAL_TOKENS if (text := _token_text(special.get(name)))}


def _listed(value: Any, folder: Path) -> dict[str, str]:
    """Return the templates that tokenizer_config.json contains, by name.

    The file has either one template text, or a list of named templates.
    """
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    try:
        return {str(each["name"]): str(each["template"]) for each in value}
    except (TypeError, KeyError):
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither a string nor a list of named templates"
        ) from None


def _token_text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _read(file: Path) -> str:
    try:
        return read_input(file, _MAX_TEMPLATE_BYTES).decode()
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read: {e}") from None


def _what_is_wrong(error: Exception) -> str:
    """Return the line and the cause of a template error."""
    if isinstance(error, TemplateSyntaxError):
        return excerpt(f"line {error.lineno}: {error.message}")
    return "the template is nested too deeply" if isinstance(error, RecursionError) else _first_line(error)


def _first_line(error: Exception) -> str:
    return excerpt(next(iter(str(error).splitlines()), "")) or type(error).__name__


class _Checked(CodeGenerator):
    """Jinja code generator that adds a check of the time limit to the start of every block of code, such as a loop
    body.

    Because of these checks, a template cannot run forever.
    """

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.checkpoint()")
        super().blockvisit(nodes, frame)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Checked
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = _Dict()
        # drop this function, because it creates filler text of any length, which no chat template needs
        del self.globals["lipsum"]
        self._running = threading.local()

    def begin(self, limit: float) -> None:
        """Start the time limit for the template that the current thread renders. ``limit`` is in seconds."""
        self._running.deadline = time.monotonic() + limit

    def checkpoint(self) -> None:
        """Raise SecurityError if the time limit of the current template has passed."""
        if time.monotonic() > getattr(self._running, "deadline", float("inf")):
            raise SecurityError("rendering takes longer than its time limit")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse to multiply long texts, and to compute powers of large numbers.

        The time limit cannot prevent that such operations use too much memory.
        """
        del context
        if operator == "*":
            for repeated, count in ((left, right), (right, left)):
                if isinstance(repeated, (str, list, tuple)) and isinstance(count, int):
                    _check_size(len(repeated) * count)
            return left * right
        _check_size(abs(right) if isinstance(right, int) else 0)
        return left**right


def _check_size(size: int) -> None:
    if size > 1_000_000:
        raise SecurityError("a product or a power in the template needs too much memory")


class _Generation(jinja2.ext.Extension):
    """Jinja extension for the tag ``{% generation %}``, which marks the assistant's output for training. The tag has no
    effect.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Object whose attributes are template variables that keep their values after a loop.

    Names that are internal attributes of Python objects are refused.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"{name} is not a valid variable name")
        super().__setitem__(name, value)


class _Dict:
    """Replacement for ``dict`` in templates.

    Templates can create dicts with it. Templates do not get Python's ``dict`` class, because its methods could modify
    objects that the sandbox protects.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """Return a dict that maps each of these keys to ``value``."""
        return dict.fromkeys(keys, value)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return dt.datetime.now().astimezone().strftime(form)
