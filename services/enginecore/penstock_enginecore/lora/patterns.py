"""Regular expressions out of an adapter's settings, which may be hostile: one that takes long is refused, since no other Python
code runs while it is matched.
"""

import re
import time

import regex

from penstock_enginecore.lora.errors import LoraError, LoraReason

MAX_LENGTH = 4096
"""Characters of an expression."""
_SECONDS = 0.5
"""Of the processor, for all expressions of an adapter. Ordinary ones take microseconds each."""
_ORDINARY = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.")
_READ_DIFFERENTLY = re.compile(r"\[\[|--|&&|~~|\|\||\{[^\d,}]")
"""What Python's expressions and those of the regex package, which can be told to stop, do not both mean the same by."""


class Patterns:
    """Matches expressions of one adapter, in ``file``, as PEFT does. Methods raise LoraError, naming the setting, ``key``."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._compiled: dict[str, regex.Pattern[str]] = {}
        self._plain: dict[str, bool] = {}
        self._left = _SECONDS

    def full(self, key: str, pattern: str, name: str) -> bool:
        """Whether ``pattern`` is the whole of ``name``."""
        return self._run(key, pattern, pattern, name) is not None

    def ends(self, key: str, pattern: str, name: str) -> bool:
        """Whether ``name`` is what ``pattern`` says, from its start or from behind one of its dots."""
        if pattern not in self._plain:
            self._plain[pattern] = _ORDINARY.issuperset(pattern)
        if self._plain[pattern]:  # the usual case, hundreds of names against hundreds of others
            start = len(name) - len(pattern)
            if start < 0 or (start and name[start - 1] != "."):
                return False
            return all(wanted in (".", found) for wanted, found in zip(pattern, name[start:], strict=True))
        return self._run(key, pattern, rf"(.*\.)?({pattern})", name) is not None

    def index(self, key: str, pattern: str, name: str) -> int | None:
        """The number of the layer behind what ``pattern`` says, the first such in ``name``; of any list of layers for ''."""
        around = rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\..*" if pattern else r".*?\.[^.]*\.(?P<index>\d+)\..*"
        found = self._run(key, pattern, around, name)
        return None if found is None else int(found["index"])

    def _run(self, key: str, pattern: str, whole: str, name: str) -> "regex.Match[str] | None":
        started = time.thread_time()
        try:
            found = self._compile(key, pattern, whole).fullmatch(name, timeout=max(self._left, 1e-6))
        except TimeoutError:
            self._left = 0.0  # for whatever comes next, too
            raise self._slow(key, pattern) from None
        self._left -= time.thread_time() - started
        if self._left < 0:
            raise self._slow(key, pattern)
        return found

    def _compile(self, key: str, pattern: str, whole: str) -> "regex.Pattern[str]":
        if whole not in self._compiled:
            if len(pattern) > MAX_LENGTH:
                raise self._refused(key, "an expression is too long", pattern[:40], f"at most {MAX_LENGTH} characters")
            if found := _READ_DIFFERENTLY.search(pattern):
                raise self._refused(key, f"an expression may not have {found[0]!r}", pattern[:100])
            try:
                re.compile(whole)
                self._compiled[whole] = regex.compile(whole)
            except (re.error, regex.error, OverflowError, RecursionError, ValueError) as e:
                raise self._refused(key, f"this is no regular expression, {e}", pattern[:100]) from e
        return self._compiled[whole]

    def _slow(self, key: str, pattern: str) -> LoraError:
        return self._refused(key, "matching it takes too long", pattern[:100], f"at most {_SECONDS} s")

    def _refused(self, key: str, what: str, pattern: str, limit: str = "") -> LoraError:
        return LoraError(LoraReason.CONFIG, f"{key}: {what}", self._file, "", repr(pattern), limit)
