"""Regular expressions out of an adapter's settings, which may be hostile: one that takes long is refused, since no other Python
code runs while it is matched.
"""

import time

import regex

from penstock_enginecore.lora.errors import LoraError, LoraReason

MAX_LENGTH = 4096
"""Characters of an expression."""
_SECONDS = 0.5
"""For all matches of an adapter. Ordinary ones take microseconds each."""
_ORDINARY = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.")


class Patterns:
    """Matches the expressions of one adapter, those in the setting ``key`` of ``file`` as PEFT does. Methods raise LoraError."""

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
        started = time.perf_counter()
        try:
            found = self._compile(key, pattern, whole).fullmatch(name, timeout=max(self._left, 1e-6))
        except TimeoutError:
            raise self._refused(key, "matching it takes too long", pattern, f"at most {_SECONDS} s") from None
        self._left -= time.perf_counter() - started
        return found

    def _compile(self, key: str, pattern: str, whole: str) -> "regex.Pattern[str]":
        if whole not in self._compiled:
            if len(pattern) > MAX_LENGTH:
                raise self._refused(key, "an expression is too long", pattern[:40], f"at most {MAX_LENGTH} characters")
            try:
                self._compiled[whole] = regex.compile(whole)
            except (regex.error, OverflowError, RecursionError) as e:
                raise self._refused(key, f"this is no regular expression, {e}", pattern) from e
        return self._compiled[whole]

    def _refused(self, key: str, what: str, pattern: str, limit: str = "") -> LoraError:
        return LoraError(LoraReason.CONFIG, f"{key}: {what}", self._file, "", repr(pattern), limit)
