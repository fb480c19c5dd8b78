"""An answer of ``penstock chat`` on standard output."""

import sys

from penstock_local.rpc.client import Piece
from penstock_local.terminal.console import use_color
from penstock_local.terminal.markdown_view import MarkdownView, dimmed


class AnswerWriter:
    """Puts an answer on standard output as it comes.

    On a terminal with colors it is Markdown, behind its reasoning, which is dimmed; without colors it is text as it stands.
    In a pipe, too, which gets no reasoning.
    """

    def __init__(self) -> None:
        self._rendered = use_color(sys.stdout)
        self._reasoning: MarkdownView | None = None
        self._answer: MarkdownView | None = None
        self._line_open = False
        self._reasoned = False

    def write(self, piece: Piece) -> None:
        """Show the next piece."""
        if piece.reasoning and sys.stdout.isatty():
            self._reason(piece.reasoning)
        if piece.text:
            self._close_reasoning()
            if self._rendered:
                self._answer = self._answer or MarkdownView(sys.stdout)
                self._answer.write(piece.text)
            else:
                self._put(piece.text)
        for call in piece.tool_calls:
            self._end_views()
            self._put(f"[calls {call.name}({call.arguments})]\n")

    def end(self) -> None:
        """Close the last line."""
        self._end_views()
        if self._line_open:
            self._put("\n")

    def _reason(self, text: str) -> None:
        self._reasoned = True
        if self._rendered:
            self._reasoning = self._reasoning or MarkdownView(sys.stdout, render=dimmed)
            self._reasoning.write(text)
        else:
            self._put(text)

    def _close_reasoning(self) -> None:
        if not self._reasoned:
            return
        self._reasoned = False
        self._end_views()
        self._put("\n" if self._rendered else "\n\n")

    def _end_views(self) -> None:
        for view in (self._reasoning, self._answer):
            if view is not None:
                view.end()
        self._reasoning = self._answer = None

    def _put(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._line_open = not text.endswith("\n")
