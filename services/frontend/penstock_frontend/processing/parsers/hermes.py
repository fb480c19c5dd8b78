"""Calls between tags, as Hermes and Qwen models write them: ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``."""

from typing import ClassVar

from penstock_frontend.processing.parsers.base import ToolDelta, ToolForm, partial
from penstock_frontend.processing.parsers.call_scanner import CallScanner, JsonToolParser

_BEGIN, _END = "<tool_call>", "</tool_call>"
_OTHER_FORMS = ("<function=", "<arg_key>")
"""Inside the same tags, other models write calls that are no JSON."""


class HermesToolParser(JsonToolParser):
    """Text beside the tags is content; blanks around them are dropped. What stands between them and is no call is content
    too, tags included. A missing end tag is forgiven.
    """

    form: ClassVar = ToolForm(_BEGIN + '\n{"name": {name}, "arguments": ', "}\n" + _END, "\n")
    tags: ClassVar = (_BEGIN, _END)

    def __init__(self) -> None:
        super().__init__()
        self._gap = ""  # what was held before the call's tag, and the tag
        self._behind = ""  # which tag was the last: _BEGIN when a call has ended, _END when its end tag was there, too

    @classmethod
    def fits(cls, template: str) -> bool:
        """Whether the template writes calls in Hermes' tags, and not in the form that others put between the same tags."""
        return _BEGIN in template and not any(form in template for form in _OTHER_FORMS)

    def push(self, text: str) -> ToolDelta:
        """Take the next piece of the answer. Text that may be the beginning of a tag is held back."""
        while text:
            if self._scanner is not None:
                text = self._scan(self._scanner, text)
            elif self._behind:
                text = self._close(text)
            else:
                text = self._read(text)
        return self._take()

    def finish(self) -> ToolDelta:
        """What was held back: content, if it became no call."""
        if self._scanner is not None and not self._scanner.started:
            self._give_back(self._scanner)
        if not self._behind:
            self._content.append(self._held)
        self._held = ""
        return self._take()

    def _read(self, text: str) -> str:
        """Content up to the next tag; the blanks before it belong to it. Returns what is left to read."""
        text = self._held + text
        index = text.find(_BEGIN)
        upto = len(text) - partial(text, _BEGIN) if index < 0 else index
        content = text[:upto].rstrip()
        self._content.append(content)
        if index < 0:
            self._held = text[len(content) :]
            return ""
        self._held, self._gap = "", text[len(content) : index] + _BEGIN
        self._scanner = CallScanner(need_arguments=False)
        return text[index + len(_BEGIN) :]

    def _ended(self) -> None:
        self._behind = _BEGIN

    def _close(self, text: str) -> str:
        """Behind a call: blanks and the end tag are dropped. Returns what is left to read."""
        text = (self._held + text).lstrip()
        self._held = ""
        if self._behind == _BEGIN:
            if text.startswith(_END):
                self._behind = _END
                return text[len(_END) :]
            if _END.startswith(text):
                self._held = text
                return ""
        if text:
            self._behind = ""
        return text

    def _give_back(self, scanner: CallScanner) -> None:
        """It is no call: what was read of it is content."""
        self.broken += 1
        self._content.append(self._gap + "".join(scanner.raw))
        self._scanner = None
