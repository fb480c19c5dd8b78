"""Rendering of conversations into prompts with the model's chat template. The module also checks conversations and
prompts.
"""

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import tokenizers

from penstock_common.config.settings import Reread
from penstock_common.errors import ConfigError, InvalidArgument, Unimplemented, quoted
from penstock_common.observability.logging import get_logger
from penstock_frontend.call_types import ChatRequest, GenerateRequest, MediaPart, MixedPrompt, Tool
from penstock_frontend.config import LimitsConfig
from penstock_frontend.processing.chat.histories import without_unread
from penstock_frontend.processing.chat.messages import (
    MessageReader,
    Places,
    ShownRoles,
    add_text,
    as_shown,
    changed,
    check_shown,
    media_of,
    openings,
    shown_roles,
    size_of,
    texts_in,
)
from penstock_frontend.processing.chat.template_process import TemplateProcess
from penstock_frontend.processing.chat.templates import ChatTemplates, ContentFormat, template_traits
from penstock_frontend.processing.media.families.base import Family
from penstock_frontend.processing.parsers import registry
from penstock_frontend.processing.prompts.mixed_prompt import check_media
from penstock_frontend.processing.prompts.sampling_params import check_conversation
from penstock_frontend.processing.prompts.tokenizer import GuardedText, Tokenizer

# The code below protects against control tokens in texts from clients. The rendered prompt is tokenized as one text. A
# control token such as ``<|im_end|>`` in a client's text would therefore end a turn. Before the template runs, the code
# inserts a mark after the first character of every control token in texts from clients. All control tokens without a
# mark then come from the template. The mark is a single character that occurs in no text of the client, so templates
# may trim and cut texts.

_MARKS = range(0x20000, 0x2A6D7)
"""Code points of the characters that can serve as the mark. These characters are rare Chinese characters, which have no
upper or lower case and are not whitespace. The characters do not change when a template writes a value as Python or
JSON.
"""

_IN_BRACKETS = re.compile(r"<.+>|\[.+\]")


class ControlTokens:
    """Control tokens of a model, which texts from clients must not produce.

    ``names`` maps the texts of control tokens to the names that ``Tokenizer.guard`` returned.
    """

    def __init__(self, names: Mapping[str, str], *, always: bool = False) -> None:
        """Create the object for the control tokens of a model.

        If ``always`` is True, every conversation gets a mark, even a conversation without control tokens.
        """
        self._names = names
        self._always = always
        self._token = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
        self._opening = openings(names)
        self._firsts = {token[0] for token in names}

    def guarded(self, variables: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Mark the control tokens in the texts of template variables. Return the changed variables, and the mark.

        In the result, no text contains a control token, or ends with the beginning of a control token. If the variables
        contain no control tokens, the variables are unchanged and the mark is empty. Raises InvalidArgument.
        """
        texts = texts_in(variables)
        together = "\n".join(texts)
        if not any(first in together for first in self._firsts) or not any(map(self._opening.search, texts)):
            return variables, ""
        mark = _unused(together)

        def marked(text: str) -> str:
            return self._opening.sub(lambda match: f"{match[0]}{mark}", text)

        return changed(variables, marked), mark

    def text(self, rendered: str, mark: str) -> str:
        """Remove the mark from a rendered text. In the result, only the control tokens that had no mark become tokens."""
        if not mark and not self._always:
            return rendered
        named = self._token.sub(lambda match: self._names[match[0]], rendered)
        return GuardedText(rendered.replace(mark, ""), named.replace(mark, ""))


def find_control_tokens(tokenizer: Tokenizer, templates: ChatTemplates) -> ControlTokens | None:
    """Return the control tokens of a model, or None if its tokenizer has none. Raises ConfigError if the tokenizer
    cannot treat these tokens as plain text.

    After this call, the tokenizer can treat the texts of the control tokens as plain text.
    """
    tokens = [token for token in tokenizer.added_tokens() if _controls(token, templates)]
    if not tokens:
        get_logger().warning(
            "model.special_tokens_in_content has no effect: it is 'text', but the model's tokenizer has no special tokens"
        )
        return None
    try:
        names = tokenizer.guard([token.content for token in tokens])
    except ConfigError as e:
        raise ConfigError(f"model.special_tokens_in_content is 'text': {e}") from e
    # A normalizer may form a control token from other characters. A search in the text cannot find such control tokens.
    return ControlTokens(names, always=tokenizer.normalizes and any(token.normalized for token in tokens))


def _controls(token: tokenizers.AddedToken, templates: ChatTemplates) -> bool:
    """Return whether a token is a control token.

    A special token is a control token. So is a token in brackets that occurs in a template's source.

    The second rule is necessary because some models do not declare all control tokens as special. Tokens that a
    template searches for in messages, such as ``</think>``, are not control tokens.
    """
    text = token.content
    if token.special:
        return bool(text.strip())
    return bool(_IN_BRACKETS.fullmatch(text)) and text in templates.source and text not in templates.looked_for


def _unused(text: str) -> str:
    """Return a mark that does not occur in the text."""
    used = set(text)
    for point in _MARKS:
        if chr(point) not in used:
            return chr(point)
    raise InvalidArgument(
        f"messages have each of the {len(_MARKS)} characters from U+{_MARKS[0]:X} to U+{_MARKS[-1]:X}; remove one of "
        "these characters",
        field="messages",
    )


_NOT_SHOWN = (
    "tools: the model's chat template does not show tools to the model, so the model would ignore them. Remove the tools, "
    "or set tool_choice to 'none'. If your messages describe the tools, calls can be parsed with --set "
    "frontend.model.tool_parser=..., which is one of: "
)
MAX_TEMPLATE = 64 << 10
"""Maximum length of a chat template that a request contains, in characters."""
_HIDES_TOOLS = (
    "tools: the request's chat_template does not show tools to the model. Remove tools, or set tool_choice to 'none'"
)
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")


class _Prepared(NamedTuple):
    """A conversation after its checks, before it is rendered."""

    variables: dict[str, Any]
    form: ContentFormat
    places: Places | None
    mark: str
    """Mark that was added after the last message, if the model must continue this message. Otherwise empty."""
    control_mark: str


class ChatRenderer:
    """Renders conversations into prompts. Every error names the message and the field, and states what is wrong.

    Args:
        templates: Chat templates of the model.
        tokenizer: Tokenizer of the model.
        limits: Limits on the sizes of requests.
        tool_parser: Value of the setting model.tool_parser. If the template does not show tools, requests may have
            tools only if this is the name of a parser, because their messages may then describe the tools.
        family: Media family of the model (the code for its type of media). None if only text is accepted.
        no_media: Reason why this server accepts only text for a multimodal model. The prompts then still have the form
            of a multimodal model. Empty for a text-only model.
        control: Control tokens that texts from clients must not produce. None allows control tokens in texts.
        own_templates: Process that renders chat templates that requests contain. None means that requests may not
            contain templates.
    """

    def __init__(
        self,
        templates: ChatTemplates,
        tokenizer: Tokenizer,
        limits: Reread[LimitsConfig],
        *,
        tool_parser: str = registry.AUTO,
        family: Family | None = None,
        no_media: str = "",
        control: ControlTokens | None = None,
        own_templates: TemplateProcess | None = None,
    ) -> None:
        self.templates = templates
        takes_tools = not templates.hides_tools or tool_parser not in (registry.AUTO, registry.NONE)
        self._why_no_tools = "" if takes_tools else _NOT_SHOWN + ", ".join(registry.tool_parser_names())
        self._tokenizer = tokenizer
        self._limits = limits
        self._family = family
        self._no_media = no_media
        self._multimodal = family is not None or bool(no_media)
        self._control = control
        self._own_templates = own_templates
        self._shown: dict[ContentFormat, ShownRoles] = {}

    @property
    def takes_tools(self) -> bool:
        """Whether requests may have tools, because the model's template or a parser supports tools."""
        return not self._why_no_tools

    async def render(self, request: ChatRequest) -> GenerateRequest:
        """Return the request with its conversation rendered as a prompt. Raises InvalidArgument if the conversation is
        not valid.
        """
        check_conversation(request.messages, request.tools, self._limits.now)
        if request.template:
            prompt = await self._by_own_template(request)
        else:
            if request.may_call and self._why_no_tools:
                raise InvalidArgument(self._why_no_tools, field="tools")
            prompt = await self._tokenizer.in_thread(self._prompt, request)
        return GenerateRequest(
            prompt=prompt,
            add_special_tokens=self._adds_special_tokens(prompt),
            sampling=request.sampling,
            prediction=request.prediction,
            context=request.context,
        )

    async def render_texts(
        self, conversations: Sequence[Sequence[tuple[str, str]]], options: Mapping[str, Any]
    ) -> list[str]:
        """Return the prompts of conversations whose messages are pairs of a role and a text. Roles are not checked.

        ``options`` are additional variables for the template. Raises InvalidArgument if the template refuses a
        conversation.
        """
        return await self._tokenizer.in_thread(self._of_texts, conversations, options)

    def _of_texts(self, conversations: Sequence[Sequence[tuple[str, str]]], options: Mapping[str, Any]) -> list[str]:
        form = self.templates.content_format(with_tools=False)
        reader = MessageReader(form, None, by_parts=self._multimodal)
        prompts = []
        for said in conversations:
            variables: dict[str, Any] = {
                "tools": None,
                "documents": None,
                "add_generation_prompt": False,
                **options,
                "messages": [{"role": role, "content": reader.text_content(text)} for role, text in said],
            }
            control_mark = ""
            if self._control is not None:
                variables, control_mark = self._control.guarded(variables)
            prompt = self.templates.render(variables, max_chars=self._limits.now.max_prompt_length)
            finished = self._finished(_Prepared(variables, form, None, "", control_mark), prompt)
            if not isinstance(finished, str):
                raise RuntimeError("a conversation without media was rendered with media")
            prompts.append(finished)
        return prompts

    async def close(self) -> None:
        """End the process that renders the chat templates that requests contain. Idempotent."""
        if self._own_templates is not None:
            await self._own_templates.close()

    async def _by_own_template(self, request: ChatRequest) -> str | MixedPrompt:
        if self._own_templates is None:
            raise Unimplemented(
                "chat_template is set, but this server accepts no templates from requests; the operator can set "
                "model.request_chat_templates to true",
                field="chat_template",
            )
        if len(request.template) > MAX_TEMPLATE:
            raise InvalidArgument(
                f"chat_template has {len(request.template)} characters; the limit is {MAX_TEMPLATE}",
                field="chat_template",
            )
        prepared = await self._tokenizer.in_thread(self._prepared_for_own, request)
        prompt = await self._own_templates.render(
            request.template,
            self.templates.special_tokens,
            prepared.variables,
            max_chars=self._limits.now.max_prompt_length,
        )
        return await self._tokenizer.in_thread(self._finished, prepared, prompt)

    def _prepared_for_own(self, request: ChatRequest) -> _Prepared:
        try:
            traits = template_traits(request.template)
        except ValueError as e:
            raise InvalidArgument(f"chat_template, {e}", field="chat_template") from None
        if request.may_call and not traits.shows_tools:
            raise InvalidArgument(_HIDES_TOOLS, field="tools")
        # The template of the request is rendered in another process, so this code cannot find the shown roles by trial
        # renderings.
        shown = ShownRoles(developer="developer" in traits.looked_for)
        return self._prepared(request, traits.form, shown)

    def _shown_roles(self, form: ContentFormat) -> ShownRoles:
        if form not in self._shown:
            reader = MessageReader(form, None, by_parts=self._multimodal)
            self._shown[form] = shown_roles(self.templates, reader.text_content)
        return self._shown[form]

    def _adds_special_tokens(self, prompt: str | MixedPrompt) -> bool:
        """Return whether the tokenizer must add special tokens to the rendered prompt.

        Most templates write the special tokens themselves. Some templates of multimodal models do not, because the
        model's processor in transformers adds the special tokens.
        """
        if not self._multimodal:
            return False
        first = prompt if isinstance(prompt, str) else prompt.parts[0]
        return not (self.templates.begin and isinstance(first, str) and first.startswith(self.templates.begin))

    def _prompt(self, request: ChatRequest) -> str | MixedPrompt:
        form = self.templates.content_format(with_tools=request.may_call)
        prepared = self._prepared(request, form, self._shown_roles(form))
        prompt = self.templates.render(prepared.variables, max_chars=self._limits.now.max_prompt_length)
        return self._finished(prepared, prompt)

    def _prepared(self, request: ChatRequest, form: ContentFormat, shown: ShownRoles) -> _Prepared:
        _check_turns(request)
        request = msgspec.structs.replace(request, messages=without_unread(request.messages, self._family))
        media = media_of(request.messages)
        check_media(media, self._family, self._no_media)
        places = Places(self._family, media) if self._family is not None and media else None
        reader = MessageReader(form, places, by_parts=self._multimodal)
        messages = as_shown(self._messages(request, reader, shown), shown)
        # A random mark shows where the template wrote the end of the last message. The space after the mark shows
        # whether the template trims the whitespace of messages.
        mark = uuid.uuid4().hex if request.continue_final_message else ""
        if mark:
            messages[-1]["content"] = add_text(messages[-1]["content"], f"{mark} ")
        variables = {
            **_checked_kwargs(request.template_kwargs),
            "messages": messages,
            "tools": tool_variables(request.tools) if request.may_call else None,
            "documents": request.template_kwargs.get("documents"),
            "add_generation_prompt": request.add_generation_prompt and not request.continue_final_message,
        }
        control_mark = ""
        if self._control is not None:
            variables, control_mark = self._control.guarded(variables)
        if places is not None and form.reads_parts:
            variables = places.guarded(variables)
        return _Prepared(variables, form, places, mark, control_mark)

    def _finished(self, prepared: _Prepared, prompt: str) -> str | MixedPrompt:
        if prepared.mark:
            prompt = _up_to(prepared.mark, prompt)
        if not prompt:
            raise InvalidArgument(
                "messages: the model's chat template renders the messages as an empty prompt", field="messages"
            )
        if not prompt.isascii():
            _check_unicode(prompt)

        def guarded(text: str) -> str:
            return text if self._control is None else self._control.text(text, prepared.control_mark)

        if prepared.places is None:
            return guarded(prompt)
        parts = prepared.places.split(prompt, by_name=not prepared.form.reads_parts)
        return _mixed([guarded(part) if isinstance(part, str) else part for part in parts])

    def _messages(self, request: ChatRequest, reader: MessageReader, shown: ShownRoles) -> list[dict[str, Any]]:
        limit = self._limits.now.max_prompt_length
        size = 0
        messages = []
        for index, message in enumerate(request.messages):
            messages.append(reader.variable(message, f"messages[{index}]"))
            check_shown(message.role, f"messages[{index}]", shown)
            size += size_of(messages[-1]["content"])
            if size > limit:
                field = f"messages[{index}].content"
                raise InvalidArgument(
                    f"{field}: the messages have {size} characters up to here; the limit is {limit}", field=field
                )
        return messages


def tool_variables(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools of a request in the form that chat templates read. Raises InvalidArgument for a missing or
    repeated name.
    """
    variables = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"tools[{index}].name"
        if not tool.name:
            raise InvalidArgument(f"{field} is empty", field=field)
        if tool.name in names:
            raise InvalidArgument(
                f"{field} is {quoted(tool.name)}, which is also the name of another tool; each tool needs its own name",
                field=field,
            )
        names.add(tool.name)
        parameters = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
        function = {"name": tool.name, "description": tool.description, "parameters": parameters}
        variables.append({"type": "function", "function": function})
    return variables


def _mixed(parts: Sequence[str | MediaPart]) -> MixedPrompt:
    return MixedPrompt(tuple(parts), tuple("messages" if isinstance(part, str) else part.field for part in parts))


def _up_to(mark: str, prompt: str) -> str:
    """Return the prompt up to the mark at the end of the last message, without the mark."""
    before, found, after = prompt.rpartition(mark)
    if not found:
        raise InvalidArgument(
            "continue_final_message is set, but the model's chat template does not write the content of the last message",
            field="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def _check_unicode(prompt: str) -> None:
    """Raise InvalidArgument if the prompt contains a lone surrogate (half of a UTF-16 pair).

    JSON can contain lone surrogates, but tokenizers cannot encode them.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as e:
        raise InvalidArgument(
            f"messages or other template variables contain {prompt[e.start]!r}, which is half a character (a lone surrogate)",
            field="messages",
        ) from None


def _check_turns(request: ChatRequest) -> None:
    if not request.messages:
        raise InvalidArgument("messages is empty; it must have at least one message", field="messages")
    if request.continue_final_message and request.messages[-1].role != "assistant":
        index = len(request.messages) - 1
        raise InvalidArgument(
            f"continue_final_message is set, but messages[{index}].role is {quoted(request.messages[-1].role)}, "
            "not 'assistant'",
            field="continue_final_message",
        )


def _checked_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    for name in _OWN_VARIABLES:
        if name in kwargs:
            field = f"chat_template_kwargs.{name}"
            raise InvalidArgument(f"{field} is set; set the request's field {name} instead", field=field)
    return kwargs
