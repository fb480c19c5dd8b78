"""Terminal output of ``penstock chat``: renders answers as Markdown while the text is received."""

import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from penstock_client import ChatOutput
from penstock_local.console import use_color

_FENCES = ("```", "~~~")


def rendered(text: str) -> RenderableType:
    """Return Markdown as a renderable.

    Addresses of links are shown as text, because some terminals cannot open or copy hidden addresses.
    """
    return Markdown(text, hyperlinks=False)


class MarkdownView:
    """Terminal view of Markdown. Complete blocks stay, and the last block is redrawn for each piece of text.

    Only the last block is redrawn, because lines that have scrolled away cannot be changed.
    """

    def __init__(self, stream: TextIO, *, render: Callable[[str], RenderableType] = rendered) -> None:
        self._console = Console(file=stream)
        self._render = render
        self._block = ""
        self._blocks = 0  # Number of complete blocks.
        self._live: Live | None = None

    def write(self, text: str) -> None:
        """Show the next piece."""
        done, self._block = split_blocks(self._block + text)
        for block in done:
            self._keep(block)
        if self._block.strip():
            if self._live is None:
                self._gap()
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(_Block(self._render(self._block), tail=True), refresh=True)

    def end(self) -> None:
        """Finish the view. An incomplete last block stays."""
        block, self._block = self._block, ""
        if block.strip():
            self._keep(block)

    def _keep(self, blocks: str) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        else:
            self._gap()
        self._console.print(_Block(self._render(blocks)), end="")
        self._blocks += 1

    def _gap(self) -> None:
        """Write the empty line between two blocks."""
        if self._blocks:
            self._console.print()


def dimmed(text: str) -> RenderableType:
    """Return plain text, dimmed."""
    return Text(text, style="dim")


def split_blocks(text: str) -> tuple[list[str], str]:
    """Split text into complete blocks and the rest. A block ends at an empty line outside fenced code."""
    blocks = []
    fence = ""
    start = position = 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        stripped = line.strip()
        if fence:
            fence = "" if stripped == fence else fence
        elif stripped.startswith(_FENCES):
            fence = stripped[:3]
        elif not stripped and line.endswith("\n"):
            if text[start:position].strip():
                blocks.append(text[start:position])
            start = position
    return blocks, text[start:]


class _Block:
    """A renderable without empty lines around it. With ``tail``, only its end is shown, at most one screen."""

    def __init__(self, inner: RenderableType, *, tail: bool = False) -> None:
        self._inner = inner
        self._tail = tail

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._inner, options.update(height=None), pad=False)
        full = [index for index, line in enumerate(lines) if "".join(segment.text for segment in line).strip()]
        shown = lines[full[0] : full[-1] + 1] if full else []
        for line in shown[-max(1, console.height - 1) :] if self._tail else shown:
            yield from _without_margin(line)
            yield Segment.line()


def _without_margin(line: Sequence[Segment]) -> Sequence[Segment]:
    """Remove trailing whitespace from a line. Whitespace with a background color stays because it is visible."""
    kept = list(line)
    while kept and not (kept[-1].style is not None and kept[-1].style.bgcolor) and not kept[-1].text.strip():
        kept.pop()
    if kept and not (kept[-1].style is not None and kept[-1].style.bgcolor):
        kept[-1] = Segment(kept[-1].text.rstrip(), kept[-1].style)
    return kept


class AnswerWriter:
    """Writes an answer to standard output while it is received.

    On a color terminal the answer is rendered as Markdown, after its reasoning, which is dimmed. Without colors, answer
    and reasoning are plain text. In a pipe, the answer is plain text without reasoning.
    """

    def __init__(self) -> None:
        self._rendered = use_color(sys.stdout)
        self._reasoning: MarkdownView | None = None
        self._answer: MarkdownView | None = None
        self._line_open = False
        self._reasoned = False

    def write(self, piece: ChatOutput) -> None:
        """Show the next piece."""
        if piece.reasoning and sys.stdout.isatty():
            self._reason(piece.reasoning)
        if piece.content:
            self._close_reasoning()
            if self._rendered:
                self._answer = self._answer or MarkdownView(sys.stdout)
                self._answer.write(piece.content)
            else:
                self._put(piece.content)
        for call in piece.tool_calls:
            self._end_views()
            self._put(f"[calls {call.name}({call.arguments})]\n")

    def end(self) -> None:
        """End the last line."""
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
