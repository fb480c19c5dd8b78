"""Prompts of Whisper's decoder: control tokens, and the text before the speech."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.errors import ConfigError, InvalidArgument, quoted
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from penstock_frontend.speech.languages import NAMES, code_of
from penstock_frontend.speech.types import SpeechTask

_ENGLISH = "en"
_ENGLISH_VOCABULARY = 51_864
"""Size of the vocabulary of English-only checkpoints. The generation config of old checkpoints has no is_multilingual."""
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
"""Names of the token for audio without speech. The second name is that of older checkpoints."""
_MAX_CHARS_PER_TOKEN = 64
"""Assumed maximum number of characters of a token of the text before the speech."""


class SpeechTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Control tokens of a Whisper checkpoint.

    Attributes:
        start: Id of ``<|startoftranscript|>``.
        previous: Id of ``<|startofprev|>``, which comes before the text before the speech.
        tasks: Id of each task. Empty for an English-only checkpoint.
        languages: Id of each language, by code. Empty for an English-only checkpoint.
        no_timestamps: Id of ``<|notimestamps|>``.
        no_speech: Id of the token for audio without speech.
        special: Ids of all special tokens.
        max_positions: Maximum number of tokens of decoder prompt and output together.
    """

    start: int
    previous: int
    tasks: Mapping[SpeechTask, int]
    languages: Mapping[str, int]
    no_timestamps: int
    no_speech: int
    special: frozenset[int]
    max_positions: int

    @property
    def multilingual(self) -> bool:
        """Whether the checkpoint knows other languages than English."""
        return bool(self.languages)

    @property
    def first_timestamp(self) -> int:
        """Id of the timestamp 0.00. The ids of the later timestamps follow, in steps of 0.02 s."""
        return self.no_timestamps + 1

    def is_text(self, token_id: int) -> bool:
        """Return whether a token is neither a special token nor a timestamp."""
        return token_id < self.first_timestamp and token_id not in self.special

    def language(self, given: str) -> str:
        """Return the code of the language that a request names, or an empty text if the model must detect the language.

        Raises InvalidArgument for a language that the model does not know.
        """
        if not self.multilingual:
            return code_of(given or _ENGLISH, {_ENGLISH: 0})
        return code_of(given, self.languages) if given else ""

    def check_task(self, task: SpeechTask) -> None:
        """Raise InvalidArgument for a task that the checkpoint was not trained for."""
        if task is SpeechTask.TRANSLATE and not self.multilingual:
            raise InvalidArgument(
                "task is 'translate', but the model knows only English; serve a multilingual checkpoint to translate",
                field="task",
            )

    def prompt(self, language: str, task: SpeechTask, *, timestamps: bool, previous: Sequence[int] = ()) -> list[int]:
        """Return the token ids of the decoder prompt. ``previous`` are the token ids of the text before the speech, of
        which the last ``max_positions // 2 - 1`` are used, as in OpenAI's Whisper.
        """
        ids = [self.previous, *previous[-(self.max_positions // 2 - 1) :]] if previous else []
        ids.append(self.start)
        if self.multilingual:
            ids += [self.languages[language], self.tasks[task]]
        return ids if timestamps else [*ids, self.no_timestamps]

    async def previous_ids(self, text: str, tokenizer: Tokenizer, *, field: str = "prompt") -> list[int]:
        """Return the token ids of the text before the speech. Raises InvalidArgument if the text has control tokens."""
        if not (text := text.strip()):
            return []
        longest = self.max_positions * _MAX_CHARS_PER_TOKEN
        ids = (await tokenizer.encode(f" {text}"[-longest:], add_special_tokens=False)).ids
        if (control := next((each for each in ids if not self.is_text(each)), None)) is not None:
            raise InvalidArgument(
                f"{field} has the control token {quoted(tokenizer.decode([control]))}; remove it", field=field
            )
        return ids


def load_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> SpeechTokens:
    """Return the control tokens of a checkpoint. ``config`` is the content of its config.json.

    Raises ConfigError if the tokenizer lacks one of the tokens.
    """

    def of(*names: str) -> int:
        found = next((each for name in names if (each := tokenizer.token_id(name)) is not None), None)
        if found is None:
            raise ConfigError(f"the model is a Whisper model, but its tokenizer has no token {' or '.join(names)}")
        return found

    multilingual = generation_config.get("is_multilingual", config.get("vocab_size") != _ENGLISH_VOCABULARY)
    return SpeechTokens(
        start=of("<|startoftranscript|>"),
        previous=of("<|startofprev|>"),
        tasks={task: of(f"<|{task}|>") for task in SpeechTask} if multilingual else {},
        languages=_languages(tokenizer, generation_config) if multilingual else {},
        no_timestamps=of("<|notimestamps|>"),
        no_speech=of(*_NO_SPEECH),
        special=tokenizer.special_ids,
        max_positions=config.get("max_target_positions", 448),
    )


def _languages(tokenizer: Tokenizer, generation_config: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of each language by code, from the generation config, or else from the tokenizer. Raises ConfigError
    if there are none.
    """
    given = generation_config.get("lang_to_id") or {}
    names = [name.removeprefix("<|").removesuffix("|>") for name in given] or NAMES
    found = {code: each for code in names if (each := tokenizer.token_id(f"<|{code}|>")) is not None}
    if not found:
        raise ConfigError(
            "the model is a multilingual Whisper model, but its tokenizer has no tokens of languages, such as <|en|>"
        )
    return found
