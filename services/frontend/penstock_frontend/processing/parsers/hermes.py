"""Tool calls of Hermes and Qwen models: ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``."""

from typing import ClassVar

from penstock_frontend.processing.parsers.base import ToolDelta, ToolForm, partial
from penstock_frontend.processing.parsers.call_scanner import CallScanner, JsonToolParser

_BEGIN, _END = "<tool_call>", "</tool_call>"
_OTHER_FORMS = ("<function=", "<arg_key>")
"""Marks of other formats that use the same tags. Tool calls in these formats are not JSON."""


class HermesToolParser(JsonToolParser):
    """Parser for tool calls between tags. The text outside of the tags is content, without the whitespace around the
    tags.

    If the text between tags is not a call, the text and the tags become content. The end tag may be missing.
    """

    form: ClassVar = ToolForm(_BEGIN + '\n{"name": {name}, "arguments": ', "}\n" + _END, "\n")
    tags: ClassVar = (_BEGIN, _END)

    def __init__(self) -> None:
        super().__init__()
        self._gap = ""  # whitespace and begin tag before a possible call, until it is certain that the text is a call
        self._behind = ""  # last tag that the parser has read: _BEGIN at the end of a call, and _END after the end tag

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template writes tool calls between the tags of Hermes, and does not use another format
        with these tags.
        """
        return _BEGIN in template and not any(form in template for form in _OTHER_FORMS)

    def push(self, text: str) -> ToolDelta:
        """Parse the next piece of the answer. Text that could be the beginning of a tag waits for the next piece."""
        while text:
            if self._scanner is not None:
                text = self._scan(self._scanner, text)
            elif self._behind:
                text = self._close(text)
            else:
                text = self._read(text)
        return self._take()

    def finish(self) -> ToolDelta:
        """Return the text that is left at the end. If this text has not become a tool call, it is content."""
        if self._scanner is not None and not self._scanner.started:
            self._give_back(self._scanner)
        if not self._behind:
            self._content.append(self._held)
        self._held = ""
        return self._take()

    def _read(self, text: str) -> str:
        """Read content up to the next tag.

        Whitespace before the tag counts as part of the tag. Return the text after the tag.
        """
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
        """Drop the whitespace and the end tag after a tool call. Return the text after the end tag."""
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
        """Turn the text of a possible call into content, because the text is not a tool call."""
        self.broken += 1
        self._content.append(self._gap + "".join(scanner.raw))
        self._scanner = None
