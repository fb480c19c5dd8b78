"""Selection of the layers that a PEFT config targets. As in PEFT, Python's ``re`` matches regular expressions.

Expressions can be hostile, so a separate process matches them (see ``pattern_process``). Only plain names are matched
in this process.
"""

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock_common.process import run_script
from penstock_enginecore.lora import pattern_process
from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.peft_format import CONFIG_FILE, PeftConfig

MAX_LENGTH = 4096
"""Maximum length of an expression, in characters."""
_SECONDS = 0.5
"""Maximum CPU time for all expressions of an adapter, in seconds. A typical expression takes less than a millisecond.
"""
_BYTES = 64 << 20
"""Maximum memory in bytes for the expressions of a setting, in addition to the memory of the interpreter. Typical
expressions need less than 1 MiB.
"""
_PATIENCE = 60.0
"""Timeout for the process in seconds of elapsed time. It applies if other processes use all CPU cores."""
_ORDINARY = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.")
_READ_DIFFERENTLY = re.compile(r"\[\[|--|&&|~~|\|\||\{[^\d,}]")
"""Syntax that Python reads literally, with a warning. In other dialects of regular expressions, it means set operations
and character classes, and the author probably means these.
"""


class _Answer(NamedTuple):
    """Result of matching an expression.

    Attributes:
        asked: Names against which the expression was matched.
        found: Names that the expression matches completely. The value is the text of the expression's group ``index``.
        wrong: Reason why the expression is invalid. Empty if the expression is valid.
    """

    asked: frozenset[str]
    found: Mapping[str, str]
    wrong: str = ""


class Patterns:
    """Matches the regular expressions in the settings of one adapter. All methods raise LoraError if an expression
    cannot be matched. The error names the setting ``key``.
    """

    def __init__(self, file: str, names: Iterable[str] = ()) -> None:
        """Create a matcher. A process starts only when an expression must be matched.

        Args:
            file: Name of the file that has the settings, for error messages.
            names: Names to match with expressions. One process matches all these names with an expression.
        """
        self._file = file
        self._names = frozenset(names)
        self._answers: dict[str, _Answer] = {}
        self._plain: dict[str, bool] = {}
        self._left = _SECONDS

    def full(self, key: str, pattern: str, name: str) -> bool:
        """Return whether ``pattern`` completely matches ``name``."""
        return self._match(key, pattern, name, _alone) is not None

    def ends(self, key: str, pattern: str, name: str, beside: Iterable[str] = ()) -> bool:
        """Return whether ``pattern`` completely matches ``name``, or the part of ``name`` after any of its dots.

        Args:
            key: Name of the setting.
            pattern: The expression.
            name: Name of a layer.
            beside: Other expressions of the setting, which the same process matches.
        """
        if self._is_plain(pattern):  # Plain names are the usual case: hundreds of patterns and hundreds of names.
            start = len(name) - len(pattern)
            if start < 0 or (start and name[start - 1] != "."):
                return False
            return all(wanted in (".", found) for wanted, found in zip(pattern, name[start:], strict=True))
        return self._match(key, pattern, name, _at_end, beside) is not None

    def index(self, key: str, pattern: str, name: str, beside: Iterable[str] = ()) -> int | None:
        """Return the layer number after the first match of ``pattern`` in ``name``, or None without a match.

        Args:
            key: Name of the setting.
            pattern: An expression for the name of a list of layers. If it is empty, any name matches.
            name: Name of a layer.
            beside: Other expressions of the setting, which the same process matches.
        """
        found = self._match(key, pattern, name, _in_front_of_index, beside)
        return None if found is None else int(found)

    def _is_plain(self, pattern: str) -> bool:
        if pattern not in self._plain:
            self._plain[pattern] = _ORDINARY.issuperset(pattern)
        return self._plain[pattern]

    def _match(
        self, key: str, pattern: str, name: str, around: Callable[[str], str], beside: Iterable[str] = ()
    ) -> str | None:
        """Return the text of the group ``index``, or None if the expression ``around(pattern)`` does not match
        ``name``.
        """
        if self._left <= 0:
            raise self._slow(key, [pattern])
        if refused := self._out_of_bounds(key, pattern):
            raise refused
        answer = self._answers.get(around(pattern))
        if answer is None or name not in answer.asked:
            asked = (each for each in beside if around is not _at_end or not self._is_plain(each))
            others = [each for each in asked if not self._out_of_bounds(key, each)]
            # Put this pattern first, because the error names the first pattern if the process is killed.
            answer = self._ask(key, list(dict.fromkeys([pattern, *others])), name, around)
        if answer.wrong:
            raise self._refused(key, f"this is not a valid regular expression: {answer.wrong}", pattern[:100])
        return answer.found.get(name)

    def _out_of_bounds(self, key: str, pattern: str) -> LoraError | None:
        """Return the error for an expression that is refused without matching, or None."""
        if len(pattern) > MAX_LENGTH:
            return self._refused(key, "an expression is too long", pattern[:40], f"at most {MAX_LENGTH} characters")
        if found := _READ_DIFFERENTLY.search(pattern):
            return self._refused(key, f"an expression may not have {found[0]!r}", pattern[:100])
        return None

    def _ask(self, key: str, patterns: list[str], name: str, around: Callable[[str], str]) -> _Answer:
        """Match ``patterns`` in a process. Returns the answer for the first pattern."""
        names = self._names if name in self._names else frozenset([name])
        wholes = [around(pattern) for pattern in patterns]
        job = {"expressions": wholes, "names": sorted(names), "seconds": self._left, "bytes": _BYTES}
        reply = self._run(key, patterns, job)
        for whole, answer in zip(wholes, reply["answers"], strict=True):
            wrong = isinstance(answer, str)
            self._answers[whole] = _Answer(names, {}, answer) if wrong else _Answer(names, answer)
        self._left -= reply["seconds"]
        if self._left <= 0:
            raise self._slow(key, patterns)
        return self._answers[wholes[0]]

    def _run(self, key: str, patterns: list[str], job: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            ended = run_script(Path(pattern_process.__file__), json.dumps(job).encode(), _PATIENCE)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise self._not_run(key, str(e)) from e
        if ended.returncode == -signal.SIGPROF:
            self._left = 0.0  # All later expressions are refused as well.
            raise self._slow(key, patterns)
        # Another process has sent this signal, so the expression may be valid.
        if ended.returncode in (-signal.SIGKILL, -signal.SIGTERM):
            raise self._not_run(key, f"the process was ended by {signal.Signals(-ended.returncode).name}")
        # The process was usually ended by a signal, because the expression has triggered a bug in the ``re`` library.
        if ended.returncode:
            self._left = 0.0
            what = f"the process that matches the expression crashed (exit code {ended.returncode})"
            raise self._refused(key, what, _named(patterns))
        reply: Mapping[str, Any] = json.loads(ended.stdout)
        if "memory" in reply:
            self._left = 0.0
            limit = f"at most {_BYTES >> 20} MiB"
            raise self._refused(key, "matching the expression takes too much memory", _named(patterns), limit)
        return reply

    def _slow(self, key: str, patterns: list[str]) -> LoraError:
        return self._refused(key, "matching the expression takes too long", _named(patterns), f"at most {_SECONDS} s")

    def _refused(self, key: str, what: str, pattern: str, limit: str = "") -> LoraError:
        return LoraError(LoraReason.CONFIG, f"{key}: {what}", self._file, "", repr(pattern), limit)

    def _not_run(self, key: str, why: str) -> LoraError:
        what = f"{key}: the process that matches expressions did not answer"
        return LoraError(LoraReason.UNREADABLE, what, self._file, value=why)


def _alone(pattern: str) -> str:
    return pattern


def _at_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})"


def _in_front_of_index(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\..*" if pattern else r".*?\.[^.]*\.(?P<index>\d+)\..*"


def _named(patterns: list[str]) -> str:
    """Return text for an error message: the first expression, and the number of other expressions in the same job."""
    more = f" and {len(patterns) - 1} more" if len(patterns) > 1 else ""
    return patterns[0][:100] + more


# The layers that a config selects, with their ranks and scales.

_ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class ChosenLayer:
    """A selected layer. The update is ``scale`` times ``B A``, and has rank ``rank``."""

    rank: int
    scale: float


def choose_layers(config: PeftConfig, names: Iterable[str], linear: Iterable[str]) -> dict[str, ChosenLayer]:
    """Return the layers among ``names`` that ``config`` targets. Raises LoraError for an expression that cannot be
    matched.

    Args:
        config: The adapter's config.
        names: Names of the model's layers, in the form that the adapter's files use.
        linear: Layers that "all-linear" selects.
    """
    names = list(names)
    choice = _Choice(config, names, frozenset(linear))
    return {name: choice.layer(name) for name in names if choice.means(name)}


class _Choice:
    def __init__(self, config: PeftConfig, names: Iterable[str], linear: frozenset[str]) -> None:
        self._config = config
        targets = config.target_modules
        self._targets = linear if isinstance(targets, str) and targets.lower() == _ALL_LINEAR else targets
        self._patterns = Patterns(CONFIG_FILE, names)

    def means(self, name: str) -> bool:
        config = self._config
        if config.exclude_modules and self._named("exclude_modules", config.exclude_modules, name):
            return False
        if not self._named("target_modules", self._targets, name):
            return False
        # A complete name selects the layer, whatever ``layers_to_transform`` says about the layer's number.
        if config.layers is None or name in self._targets:
            return True
        patterns = config.layers_patterns or ("",)
        found = (self._patterns.index("layers_pattern", pattern, name, patterns) for pattern in patterns)
        return next((index for index in found if index is not None), None) in config.layers

    def layer(self, name: str) -> ChosenLayer:
        config = self._config
        rank = config.rank_pattern.get(self._pattern("rank_pattern", config.rank_pattern, name), config.rank)
        alpha = config.alpha_pattern.get(self._pattern("alpha_pattern", config.alpha_pattern, name), config.alpha)
        return ChosenLayer(rank, config.scale(rank, alpha))

    def _named(self, key: str, wanted: str | frozenset[str], name: str) -> bool:
        if isinstance(wanted, str):
            return self._patterns.full(key, wanted, name)
        parts = name.split(".")
        return any(".".join(parts[i:]) in wanted for i in range(len(parts)))

    def _pattern(self, key: str, patterns: Iterable[str], name: str) -> str:
        """Return the first pattern that matches, as in PEFT, or '' if no pattern matches."""
        return next((each for each in patterns if self._patterns.ends(key, each, name, patterns)), "")
