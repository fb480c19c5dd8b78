"""Rules of a Whisper checkpoint for output tokens, and their reading from generation_config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PretrainedConfig

from penstock_common.checkpoint import TOKEN_RULES
from penstock_common.errors import quoted
from penstock_common.files import read_json
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models.checkpoint import weight_files
from penstock_enginecore.models.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class WhisperRules:
    """Rules of a Whisper checkpoint for output tokens.

    Attributes:
        suppressed: Tokens that are never chosen.
        suppressed_first: Tokens that are not chosen as the first output token.
        no_timestamps: The token ``<|notimestamps|>``, or None if the checkpoint has no timestamps. Timestamps are the
            tokens after it.
        max_first_timestamp: Largest index of a timestamp as the first output token, or None for no limit.
        end: The token that ends an output.
        start: The token ``<|startoftranscript|>``.
        tasks: The tokens of the tasks, such as ``<|transcribe|>``. Empty if the checkpoint does not name them.
        multilingual: Whether prompts name a language and a task after ``<|startoftranscript|>``.
    """

    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    no_timestamps: int | None = None
    max_first_timestamp: int | None = None
    end: int = 0
    start: int = 0
    tasks: tuple[int, ...] = ()
    multilingual: bool = True

    def __bool__(self) -> bool:
        return bool(self.suppressed or self.suppressed_first or self.no_timestamps is not None)

    @property
    def first_timestamp(self) -> int:
        """The token of the timestamp 0.00. All tokens from this token on are timestamps."""
        return 0 if self.no_timestamps is None else self.no_timestamps + 1

    def times(self, prompt: npt.NDArray[np.integer]) -> bool:
        """Return whether the output after the tokens ``prompt`` int ``[tokens]`` has timestamps.

        It has timestamps if the tokens after the last ``<|startoftranscript|>`` include a task and do not include
        ``<|notimestamps|>``. A multilingual prompt that ends with ``<|startoftranscript|>`` asks for the language.
        Prompts of English-only checkpoints have no task.
        """
        starts = np.flatnonzero(prompt == self.start)
        if self.no_timestamps is None or not len(starts):
            return False
        after = prompt[starts[-1] + 1 :]
        if (after == self.no_timestamps).any():
            return False
        if not self.multilingual:
            return True
        return bool(np.isin(after, self.tasks).any()) if self.tasks else len(after) > 0


_OF_CONFIG = ("suppress_tokens", "begin_suppress_tokens")


def read_whisper_rules(model: ModelConfig, config: PretrainedConfig, vocab_size: int) -> WhisperRules | None:
    """Return the rules in generation_config.json of a Whisper checkpoint. Return None for other models, and for a
    checkpoint without rules.

    Without the file, the rules are those of config.json, as in transformers: suppressed tokens, and no timestamps.
    Transformers also writes such rules to the file if it saves a model that never had the file. In both cases,
    suppressed tokens outside the vocabulary are ignored, because they are only defaults.

    Raises:
        ModelLoadError: The file cannot be read, or a value is not valid. The error names file, field and value.
    """
    if config.model_type not in TOKEN_RULES:
        return None
    directory = weight_files(model)
    file = directory / TOKEN_RULES[config.model_type]
    if not file.is_file():
        default = {name: getattr(config, name, None) for name in _OF_CONFIG}
        return _Reader(default, directory / "config.json", vocab_size).rules() or None
    try:
        values = read_json(file)
    except (OSError, ValueError) as e:
        raise ModelLoadError(f"{file} cannot be read: {e}") from e
    if not isinstance(values, dict):
        raise ModelLoadError(f"{file} must contain a JSON object")
    values = {"decoder_start_token_id": getattr(config, "decoder_start_token_id", None), **values}
    return _Reader(values, file, vocab_size, strict=not values.get("_from_model_config")).rules() or None


class _Reader:
    """Reads and checks the values of the rules. If ``strict`` is false, suppressed tokens outside the vocabulary are
    ignored.
    """

    def __init__(self, values: Mapping[str, Any], where: Path, vocab_size: int, *, strict: bool = False) -> None:
        self._values = values
        self._where = where
        self._vocab_size = vocab_size
        self._strict = strict

    def rules(self) -> WhisperRules:
        """Return the rules. Raises ModelLoadError."""
        suppressed, first = (self._listed(name) for name in ("suppress_tokens", "begin_suppress_tokens"))
        no_timestamps = self._values.get("no_timestamps_token_id")
        if no_timestamps is None:
            return WhisperRules(suppressed, first)
        self._check("no_timestamps_token_id", no_timestamps, self._vocab_size - 1)
        limit = self._values.get("max_initial_timestamp_index")
        if limit is not None:
            self._check("max_initial_timestamp_index", limit, None)
        return WhisperRules(
            suppressed=suppressed,
            suppressed_first=first,
            no_timestamps=no_timestamps,
            max_first_timestamp=limit,
            end=self._one("eos_token_id" if self._values.get("eos_token_id") else "bos_token_id"),
            start=self._one("decoder_start_token_id"),
            tasks=self._tasks(),
            multilingual=self._values.get("is_multilingual") is not False,
        )

    def _listed(self, name: str) -> tuple[int, ...]:
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise ModelLoadError(f"{self._where}: {name} is {_shown(value)}; it must be a list of token ids")
        if not self._strict:
            return tuple(i for i in value if _is_id(i, self._vocab_size))
        for index, token_id in enumerate(value):
            self._check(f"{name}[{index}]", token_id, self._vocab_size)
        return tuple(value)

    def _one(self, name: str) -> int:
        """Return a token id that the timestamp rules need. A list with one id is also valid."""
        value = self._values.get(name)
        if isinstance(value, list) and len(value) == 1:
            [value] = value
        self._check(name, value, self._vocab_size)
        return int(value)  # type: ignore[arg-type] # _check has found an integer

    def _tasks(self) -> tuple[int, ...]:
        tasks = self._values.get("task_to_id") or {}
        if not isinstance(tasks, dict):
            raise ModelLoadError(
                f"{self._where}: task_to_id is {_shown(tasks)}; it must be an object with a token id for each task"
            )
        for task, token_id in tasks.items():
            self._check(f"task_to_id[{quoted(task)}]", token_id, self._vocab_size)
        return tuple(tasks.values())

    def _check(self, name: str, value: object, end: int | None) -> None:
        """Raise ModelLoadError if a value is no integer from 0 to ``end`` - 1."""
        if end is None:
            if not _is_id(value, 2**31):
                raise ModelLoadError(f"{self._where}: {name} is {_shown(value)}; it must be an integer of at least 0")
        elif not _is_id(value, end):
            raise ModelLoadError(
                f"{self._where}: {name} is {_shown(value)}; it must be a token id from 0 to {end - 1}, because the "
                f"vocabulary has {self._vocab_size} tokens; take the file from the checkpoint's author"
            )


def _is_id(value: object, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end


def _shown(value: object) -> str:
    return "missing" if value is None else quoted(value)
