"""The argument parser of the commands, which answers an unknown flag with the nearest known one."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from penstock_common.errors import nearest

_MISSING = "the following arguments are required"
Suggest = Callable[[str], str]
SuggestValue = Callable[[str, str], str]


class Parser(argparse.ArgumentParser):
    """Refuses unknown flags with the nearest known one. ``suggest``: what else a flag may mean here, as a sentence or ``""``;
    ``suggest_value``: likewise a value that a flag does not have.
    """

    suggest: Suggest | None = None
    suggest_value: SuggestValue | None = None
    _arguments: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's; a command's own parser refuses what is left over, with its own usage."""
        self._arguments = list(args or ())
        parsed, left = super().parse_known_args(args, namespace)
        if left:
            self.error(self._unknown(left))
        return parsed, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, in the words of settings."""
        if action.choices is not None and value not in action.choices:
            known = [name for name in map(str, action.choices) if name]  # empty: as if it were not given
            flag = action.option_strings[0] if action.option_strings else ""
            hint = self.suggest_value(flag, str(value)) if self.suggest_value is not None else ""
            raise argparse.ArgumentError(
                action, f"{value!r} is not known; known: {', '.join(known)}{hint or nearest(str(value), known)}"
            )

    def error(self, message: str) -> NoReturn:
        """As argparse's. Of a missing argument, say what the unknown flags mean, which may stand for it."""
        if message.startswith(_MISSING) and (unknown := self._unknown_flags(self._arguments)):
            message += f"; {self._unknown(unknown)}"
        super().error(message)

    def _unknown_flags(self, arguments: Sequence[str]) -> list[str]:
        flags = (text.partition("=")[0] for text in arguments if text.startswith("-") and text != "-")
        return [flag for flag in flags if flag not in self._option_string_actions]

    def _unknown(self, left: Sequence[str]) -> str:
        flags = [text.partition("=")[0] for text in left if text.startswith("-")]
        hints = (self.suggest(flags[0]) if self.suggest else "") if flags else ""
        if flags and not hints:
            hints = nearest(flags[0], self._option_string_actions)
        return f"unrecognized arguments: {' '.join(left)}{hints}"
