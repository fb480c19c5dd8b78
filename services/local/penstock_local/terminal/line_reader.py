"""What a user types: messages of one line or several, from a terminal or a pipe."""

import contextlib
import io
import sys

from penstock_common.errors import ConfigError
from penstock_local.terminal.console import BOLD, DIM, use_color

_PROMPT, _CONTINUATION = ">>> ", "... "
_QUOTES = '"""'


class LineReader:
    """Reads messages. A line that ends in a backslash goes on in the next one; three quotes begin and end a block of lines.

    On a terminal lines are edited and recalled with readline, and a block pasted into it is one message. What is asked
    for goes to standard output when that is the terminal, else to standard error; a pipe is not asked.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")
        self._edits = self.interactive and sys.stdout.isatty()
        if self._edits:
            with contextlib.suppress(ImportError):  # not every Python has it
                import readline

                readline.parse_and_bind("set enable-bracketed-paste on")

    def read(self) -> str:
        """The next message. Raises EOFError at the end of the input, KeyboardInterrupt, ConfigError when it is not text."""
        try:
            return self._message()
        except UnicodeDecodeError as e:
            raise ConfigError(f"standard input is not UTF-8: {e}") from None

    def _message(self) -> str:
        line = self._line(_PROMPT)
        if line.lstrip().startswith(_QUOTES):
            return self._block(line.lstrip().removeprefix(_QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(_CONTINUATION))
        return "\n".join(lines)

    def _block(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(self._line(_CONTINUATION))
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        if self._edits:
            if not use_color(sys.stdout):
                return input(prompt)
            # Readline must know which of the prompt's characters take no room.
            code = BOLD if prompt == _PROMPT else DIM
            return input(f"\x01\x1b[{code}m\x02{prompt}\x01\x1b[0m\x02")
        if self.interactive:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")
