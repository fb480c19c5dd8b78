"""Tool calls and reasoning of Mistral models, which use the marks ``[TOOL_CALLS]`` and ``[THINK]``."""

import re
import secrets
import string
from typing import ClassVar

from penstock_frontend.processing.parsers.base import ToolForm
from penstock_frontend.processing.parsers.call_reader import CallListReader, State
from penstock_frontend.processing.parsers.reasoning_tags import TagReasoningParser

_CALLS, _ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAMED = re.compile(r"([^\s\[\]]+)\s*(?:\[CALL_ID\]\s*[^\s\[\]]+\s*)?(?:\[ARGS\]\s*)?")
_ID_LENGTH = 9
"""Number of characters of a tool call's id. Mistral's templates refuse conversations with shorter ids, and some also
refuse longer ids.
"""


class MistralToolParser(CallListReader):
    """Parser for the mark ``[TOOL_CALLS]``, after which a JSON list of tool calls follows.

    Models published since 2025 write ``[TOOL_CALLS]name[ARGS]{...}`` for each call.
    """

    form: ClassVar = ToolForm('{"name": {name}, "arguments": ', "}", ", ", _CALLS + " [", "]")
    tags: ClassVar = (_CALLS, _ARGUMENTS, _CALL_ID)
    marks: ClassVar = (_CALLS,)

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template writes tool calls after Mistral's mark."""
        return _CALLS in template

    def _begin(self) -> State | None:
        self._drop_blanks()
        if not self._text:
            return self._wait()
        match self._text[0]:
            case "[":
                return self._list
            case "{":
                return self._call_object()
            case _:
                return self._named

    def _named(self) -> State | None:
        """Read the name of the tool, up to the bracket before the arguments of the call."""
        head = self._head("{", keep_end=True)
        if head is None:
            return self._wait()
        named = _NAMED.fullmatch(head)
        if named is None:
            return self._broken()
        self._start(named[1])
        return self._arguments()

    def _new_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))


class MistralReasoningParser(TagReasoningParser):
    """Parser for the reasoning of Magistral and of later Mistral models."""

    tags: ClassVar = ("[THINK]", "[/THINK]")

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template contains the tag that ends the reasoning."""
        return cls.tags[1] in template
