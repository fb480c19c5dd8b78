"""Tool calls of Gemma 3, which are a Python list of calls, or Python code in a fenced block ``tool_code``."""

from typing import ClassVar

from penstock_frontend.processing.parsers.call_reader import State
from penstock_frontend.processing.parsers.llama4_pythonic import Llama4PythonicToolParser
from penstock_frontend.processing.parsers.pythonic import read_calls

_FENCE, _FENCE_END = "```tool_code\n", "\n```"


class Gemma3ToolParser(Llama4PythonicToolParser):
    """Parser for a list of tool calls at the start of the answer, or for fenced blocks at any position.

    A block has one call per line. The call may be an argument of ``print``. Gemma has no special tokens for tools, so
    messages or a custom template must describe this format to the model.
    """

    tags: ClassVar = ()
    marks: ClassVar = (_FENCE,)
    ends: ClassVar = ()

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the chat template asks for tool calls in this format, and contains Gemma's special token for
        the start of a turn.
        """
        return "<start_of_turn>" in template and ("[func_name" in template or "tool_code" in template)

    def _first(self) -> State | None:
        start = self._text.lstrip()
        if not start:
            return self._outside if self._ended else None
        if start.startswith("["):
            self._drop(len(self._text) - len(start) + 1)
            return self._opened
        return self._outside

    def _rest(self) -> State | None:
        return self._outside()

    def _begin(self) -> State | None:
        """Read a fenced block up to its end."""
        block, end, _ = self._text.partition(_FENCE_END)
        if not end:
            return self._wait()
        self._drop(len(block) + len(end))
        try:
            calls = read_calls(block)
        except ValueError:
            return self._broken()
        for name, arguments in calls:
            self._start(name, arguments=arguments)
        return self._behind
