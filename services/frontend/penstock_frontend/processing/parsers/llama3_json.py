"""Tool calls of Llama 3.1 to 3.3, which are JSON objects ``{"name": ..., "parameters": ...}``.

A tag may precede the JSON object.
"""

from typing import ClassVar

from penstock_frontend.processing.parsers.base import ToolDelta, ToolForm
from penstock_frontend.processing.parsers.call_scanner import CallScanner, JsonToolParser

_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"
_HEADERS = ("<|start_header_id|>", "<|header_start|>")
"""Marks that Llama 3 and Llama 4 write around the headers of messages."""


class Llama3JsonToolParser(JsonToolParser):
    """Parser for an answer that begins with the JSON object of a tool call.

    Further calls may follow, separated by semicolons.

    Any other text is content up to the end of the answer, even if it contains JSON.
    """

    form: ClassVar = ToolForm('{"name": {name}, "parameters": ', "}", None)
    tags: ClassVar = (_TAG,)

    def __init__(self) -> None:
        super().__init__()
        self._gap = ""  # text before the tool call
        self._is_content = False

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the chat template asks for JSON with ``parameters``, and contains a special token with which
        Llama begins a header.
        """
        return '"parameters": ' in template and any(header in template for header in _HEADERS)

    def push(self, text: str) -> ToolDelta:
        """Parse the next piece of the answer. Text waits until it is certain whether it is a tool call or content."""
        while text:
            if self._is_content:
                self._content.append(text)
                break
            text = self._begin(text) if self._scanner is None else self._scan(self._scanner, text)
        return self._take()

    def finish(self) -> ToolDelta:
        """Return the text that is left at the end. If this text has not become a tool call, it is content."""
        if self._scanner is not None and not self._scanner.started:
            self._give_back(self._scanner)
        if self._num_calls == 0 or self._held.strip(_BETWEEN):
            self._content.append(self._held)
        self._held = ""
        return self._take()

    def _begin(self, text: str) -> str:
        """Check whether a tool call begins here. Return the text that was not consumed."""
        self._held += text
        blanks = _BETWEEN if self._num_calls else None
        start = self._held.lstrip(blanks)
        body = start.removeprefix(_TAG).lstrip()
        if body.startswith("{"):
            self._gap, self._held = self._held[: -len(body)], ""
            self._scanner = CallScanner(need_arguments=True)
            return body
        if body and not _TAG.startswith(start):
            self._is_content = True
            self._content.append(start if self._num_calls else self._held)
            self._held = ""
        return ""

    def _give_back(self, scanner: CallScanner) -> None:
        """Turn the text of a possible call, and all later text, into content, because the text is not a tool call."""
        self._content.append(self._gap.lstrip(_BETWEEN) if self._num_calls else self._gap)
        self._content.append("".join(scanner.raw))
        self._scanner, self._is_content = None, True
