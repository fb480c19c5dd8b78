"""Keeps the text of a conversation from becoming control tokens of the model.

A template's output is tokenized as one text, in which ``<|im_end|>`` ends a turn whoever wrote it. To tell the two apart, a mark
is put behind the first character of every control token in the client's texts, before the template sees them: what the template
then writes without a mark is its own. A mark is one character that no text of the client has, so templates may trim and cut
texts, and no template takes a marked token for one.
"""

import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from penstock_common.errors import ConfigError, InvalidArgument
from penstock_common.observability.logging import get_logger
from penstock_frontend.processing.chat.messages import changed, openings, texts_in
from penstock_frontend.processing.chat.templates import ChatTemplates
from penstock_frontend.processing.prompts.tokenizer import GuardedText, Tokenizer

_MARKS = range(0x20000, 0x2A6D7)
"""Rare Chinese characters: they have no case, are no blanks, and stay what they are in a template that writes the form of a
value in Python or JSON.
"""

_IN_BRACKETS = re.compile(r"<.+>|\[.+\]")


class ControlTokens:
    """The control tokens of a model. ``names``: by their texts, what ``Tokenizer.guard`` calls them."""

    def __init__(self, names: Mapping[str, str], *, always: bool = False) -> None:
        """``always``: guard every conversation, also one without the texts of control tokens."""
        self._names = names
        self._always = always
        self._token = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
        self._opening = openings(names)
        self._firsts = {token[0] for token in names}

    def guarded(self, variables: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """A template's variables, in which no text has a control token, nor the begin of one at its end; and the mark that is in
        them. Without such texts the variables are the same, and the mark is empty. Raises InvalidArgument.
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
        """What a template made of guarded variables, without the mark. Only control tokens without the mark are tokens."""
        if not mark and not self._always:
            return rendered
        named = self._token.sub(lambda match: self._names[match[0]], rendered)
        return GuardedText(rendered.replace(mark, ""), named.replace(mark, ""))


def find_control_tokens(tokenizer: Tokenizer, templates: ChatTemplates) -> ControlTokens | None:
    """The control tokens of a model, None for a model without any. The tokenizer can tell them from their texts from now on.

    Raises ConfigError.
    """
    tokens = [token for token in tokenizer.added_tokens() if _controls(token, templates)]
    if not tokens:
        get_logger().warning("model.special_tokens_in_content is 'text'; the model's tokenizer has no special tokens")
        return None
    try:
        names = tokenizer.guard([token.content for token in tokens])
    except ConfigError as e:
        raise ConfigError(f"model.special_tokens_in_content is 'text': {e}") from e
    # A normalizer may make a token's characters of others, which no search of the text finds.
    return ControlTokens(names, always=tokenizer.normalizes and any(token.normalized for token in tokens))


def _controls(token: tokenizers.AddedToken, templates: ChatTemplates) -> bool:
    """Whether a token is special, or is in brackets and named by a template: not every model calls all of its control tokens
    special. Other tokens are left alone where a template looks for them in messages, as for ``</think>``.
    """
    text = token.content
    if token.special:
        return bool(text.strip())
    return bool(_IN_BRACKETS.fullmatch(text)) and text in templates.source and text not in templates.looked_for


def _unused(text: str) -> str:
    """A character that is not in the text."""
    used = set(text)
    for point in _MARKS:
        if chr(point) not in used:
            return chr(point)
    raise InvalidArgument(
        f"messages have each of the {len(_MARKS)} characters from U+{_MARKS[0]:X} to U+{_MARKS[-1]:X}; leave one out",
        field="messages",
    )
