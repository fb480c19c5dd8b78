"""The argument parser of the commands, which answers an unknown flag with the nearest known one."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from penstock_common.errors import nearest

Suggest = Callable[[str], str]


class Parser(argparse.ArgumentParser):
    """Refuses unknown flags with the nearest known one. ``suggest``: what else a flag may mean here, as a sentence or ``""``."""

    suggest: Suggest | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's; a command's own parser refuses what is left over, with its own usage."""
        parsed, left = super().parse_known_args(args, namespace)
        if left:
            self.error(self._unknown(left))
        return parsed, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, in the words of settings."""
        if action.choices is not None and value not in action.choices:
            known = [name for name in map(str, action.choices) if name]  # empty: as if it were not given
            raise argparse.ArgumentError(
                action, f"{value!r} is not known; known: {', '.join(known)}{nearest(str(value), known)}"
            )

    def _unknown(self, left: Sequence[str]) -> str:
        flags = [text.partition("=")[0] for text in left if text.startswith("-")]
        hints = (self.suggest(flags[0]) if self.suggest else "") if flags else ""
        if flags and not hints:
            hints = nearest(flags[0], self._option_string_actions)
        return f"unrecognized arguments: {' '.join(left)}{hints}"
