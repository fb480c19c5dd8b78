"""Calls as bare JSON, as Llama 3.1 to 3.3 write them: ``{"name": ..., "parameters": ...}``, perhaps behind a tag."""

from typing import ClassVar

from penstock_frontend.processing.parsers.base import ToolDelta, ToolForm
from penstock_frontend.processing.parsers.call_scanner import CallScanner, JsonToolParser

_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"
_HEADERS = ("<|start_header_id|>", "<|header_start|>")
"""Llama 3's and Llama 4's."""


class Llama3JsonToolParser(JsonToolParser):
    """An answer that begins with such an object is a call, and so are those that follow it, divided by semicolons.

    Anything else is content, JSON that is no call included, up to the end of the answer.
    """

    form: ClassVar = ToolForm('{"name": {name}, "parameters": ', "}", None)
    tags: ClassVar = (_TAG,)

    def __init__(self) -> None:
        super().__init__()
        self._gap = ""  # what stood before the call
        self._is_content = False

    @classmethod
    def fits(cls, template: str) -> bool:
        """Whether the template tells the model to answer with JSON that has ``parameters``, in Llama's headers."""
        return '"parameters": ' in template and any(header in template for header in _HEADERS)

    def push(self, text: str) -> ToolDelta:
        """Take the next piece of the answer. Its beginning says whether it is calls or content, and is held back until then."""
        while text:
            if self._is_content:
                self._content.append(text)
                break
            text = self._begin(text) if self._scanner is None else self._scan(self._scanner, text)
        return self._take()

    def finish(self) -> ToolDelta:
        """What was held back: content, if it became no call."""
        if self._scanner is not None and not self._scanner.started:
            self._give_back(self._scanner)
        if self._num_calls == 0 or self._held.strip(_BETWEEN):
            self._content.append(self._held)
        self._held = ""
        return self._take()

    def _begin(self, text: str) -> str:
        """Before a call: is it one? Returns what is left to read."""
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
        """It is no call: what was read of it is content, and so is what follows."""
        self._content.append(self._gap.lstrip(_BETWEEN) if self._num_calls else self._gap)
        self._content.append("".join(scanner.raw))
        self._scanner, self._is_content = None, True
