"""Prompts of embedding models: texts that a model expects before certain inputs, from the files of sentence-transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock_common.errors import ConfigError, InvalidArgument, quoted
from penstock_frontend.config import ModelConfig
from penstock_frontend.processing.prompts.tokenizer import read_json, resolve

_FILE = "config_sentence_transformers.json"
_QUERY = ("query", "search_query", "retrieval.query", "s2p_query")
_DOCUMENT = ("document", "passage", "corpus", "search_document", "retrieval.passage")
_OF_INPUT_TYPE: Mapping[str, Sequence[str]] = {
    "query": _QUERY,
    "search_query": _QUERY,
    "document": _DOCUMENT,
    "passage": _DOCUMENT,
    "search_document": _DOCUMENT,
    "classification": ("classification",),
    "clustering": ("clustering", "separation"),
}
"""Names of prompts for each value of ``input_type``, a field of Cohere, Voyage and NIM. The first prompt that the model
has is used.
"""


@dataclass(frozen=True, slots=True)
class NamedPrompts:
    """The prompts of a model by name, and the name of the prompt for inputs without a name, or None."""

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None

    @property
    def query(self) -> str:
        """Text before queries whose embeddings are compared with those of documents."""
        return self.text(None, "query") or ""

    @property
    def document(self) -> str:
        """Text before documents whose embeddings are compared with those of queries."""
        return self.text(None, "document") or ""

    @property
    def default_text(self) -> str:
        """Text before inputs for which the client names no prompt."""
        return "" if self.default is None else self.texts[self.default]

    def text(self, prompt_name: str | None, input_type: str | None) -> str | None:
        """Return the text that a request selects, or None if it selects none.

        If the model has prompts, but none for the ``input_type``, no text is added, because many models have a prompt
        only for queries. Raises InvalidArgument for unknown names, and if both fields are set.
        """
        if prompt_name is None and input_type is None:
            return None
        if prompt_name is not None and input_type is not None:
            raise InvalidArgument("prompt_name and input_type are both set; set only one of them", field="input_type")
        if prompt_name is not None:
            if prompt_name not in self.texts:
                known = f"its prompts are {', '.join(map(repr, self.texts))}" if self.texts else "it has no prompts"
                raise InvalidArgument(
                    f"prompt_name is {quoted(prompt_name)}, which the model does not have: {known}", field="prompt_name"
                )
            return self.texts[prompt_name]
        names = _OF_INPUT_TYPE.get(str(input_type).lower())
        if names is None:
            raise InvalidArgument(
                f"input_type is {quoted(input_type)}; known: {', '.join(_OF_INPUT_TYPE)}", field="input_type"
            )
        return next((self.texts[name] for name in names if name in self.texts), "")


P = TypeVar("P")


def with_prompt(prompt: str, given: P) -> P | str:
    """Return an input with the text of a prompt before it. Token ids and media stay as they are. An empty text stays
    empty, so that it is refused.
    """
    return prompt + given if isinstance(given, str) and given else given


def check_texts(inputs: Sequence[object], fields: Sequence[str]) -> None:
    """Raise InvalidArgument if an input for which the client selects a prompt is not a text. ``fields`` are the paths of
    the inputs.
    """
    for given, path in zip(inputs, fields, strict=True):
        if not isinstance(given, str):
            raise InvalidArgument(
                f"{path} is not a text, but a prompt can be added only to texts; send texts, or no prompt_name and "
                "no input_type",
                field=path,
            )


def num_queries_of(kind: str | None, num_inputs: int) -> int | None:
    """Return how many of the inputs are queries of a late-interaction model: all or none, as the kind of the inputs says,
    or None if that is no kind of queries or documents.
    """
    names = _OF_INPUT_TYPE.get((kind or "").lower())
    return num_inputs if names is _QUERY else 0 if names is _DOCUMENT else None


def load_prompts(config: ModelConfig) -> NamedPrompts:
    """Return the prompts in ``config_sentence_transformers.json``, or none without that file. Raises ConfigError if the
    file cannot be read.
    """
    file = resolve(config) / _FILE
    data = read_json(file)
    texts: Any = data.get("prompts") or {}
    default = data.get("default_prompt_name")
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ConfigError(f"{file}: prompts must be an object whose values are texts")
    if default is not None and default not in texts:
        raise ConfigError(f"{file}: default_prompt_name is {default!r}, but prompts has no such name")
    return NamedPrompts(texts, default)
