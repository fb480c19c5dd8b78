"""Inputs of late-interaction models (ColBERT): markers of queries and documents, expansion of queries with mask tokens, and
tokens of documents that have no embedding.

The settings are in the files of PyLate, sentence-transformers or Stanford's ColBERT.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock_common import files
from penstock_common.errors import ConfigError
from penstock_common.types.outputs import EngineCoreOutput
from penstock_common.types.request import Vectors
from penstock_frontend.config import ModelConfig
from penstock_frontend.processing.prompts.tokenizer import Tokenizer, read_json, resolve
from penstock_frontend.processing.prompts.truncation import Cut

_COLBERT = "HF_ColBERT"
_DEFAULT_LENGTH = 32
_MASKS = ("mask_token", "eos_token")
"""Special tokens that expand queries. The first that the tokenizer has is used."""


class EncodedInput(NamedTuple):
    """Token ids of a query or a document. ``unattended_start`` is the position of the first expansion token if other
    tokens must not attend to the expansion, and otherwise None.
    """

    ids: list[int]
    unattended_start: int | None = None


@dataclass(frozen=True, slots=True)
class Marker:
    """Text or token at the start of an input. ``token_id`` is None if the marker is text."""

    text: str = ""
    token_id: int | None = None


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """Settings of a late-interaction model.

    Attributes:
        query: Marker of queries.
        document: Marker of documents.
        query_length: Number of tokens to which queries are truncated if truncation is on, or None.
        document_length: The same number for documents.
        expansion_length: Number of tokens to which queries are expanded, or 0.
        expansion_id: Token that expands queries.
        attends: Whether tokens attend to expansion tokens.
        skipped: Ids of the tokens of documents that have no embedding.
        leading: Number of special tokens before a text, after which markers are inserted.
    """

    query: Marker = Marker()
    document: Marker = Marker()
    query_length: int | None = None
    document_length: int | None = None
    expansion_length: int = 0
    expansion_id: int = 0
    attends: bool = False
    skipped: frozenset[int] = frozenset()
    leading: int = 1

    def marked(self, text: str, *, is_query: bool) -> str:
        """Return the text with the text of its marker before it."""
        return (self.query if is_query else self.document).text + text

    def cut(self, given: Cut, *, is_query: bool) -> Cut:
        """Return the truncation of texts before the marker's token is inserted."""
        longest = self.query_length if is_query else self.document_length
        has_token = (self.query if is_query else self.document).token_id is not None
        return given._replace(longest=min(given.longest, longest or given.longest) - has_token)

    def encoded(self, ids: list[int], *, is_query: bool, max_len: int) -> EncodedInput:
        """Return a tokenized text with the token of its marker. Queries are expanded to at most ``max_len`` tokens."""
        token = (self.query if is_query else self.document).token_id
        marked = ids if token is None else [*ids[: self.leading], token, *ids[self.leading :]]
        missing = min(self.expansion_length, max_len) - len(marked)
        if not is_query or missing <= 0:
            return EncodedInput(marked)
        return EncodedInput([*marked, *[self.expansion_id] * missing], None if self.attends else len(marked))

    def kept(self, output: EngineCoreOutput, token_ids: Sequence[int]) -> EngineCoreOutput:
        """Return the output for a document with the tokens ``token_ids``, without the skipped tokens. At least one token
        remains.
        """
        vectors = output.pooling_output
        if vectors is None or not self.skipped:
            return output
        kept = [index for index, token in enumerate(token_ids) if token not in self.skipped]
        if not kept or len(kept) == len(token_ids):
            return output
        rows = matrix(vectors)[kept]
        return msgspec.structs.replace(output, pooling_output=Vectors((len(kept), vectors.shape[1]), rows.tobytes()))


def matrix(vectors: Vectors) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Return the embeddings of tokens as float32 ``[tokens, dimensions]``."""
    return np.frombuffer(vectors.data, dtype="<f4").reshape(vectors.shape)


def load_late_interaction(config: ModelConfig, tokenizer: Tokenizer) -> LateInteraction | None:
    """Return the settings of a late-interaction model, or None for other models. Raises ConfigError if a file cannot be
    read, or if a setting is not supported.
    """
    folder = resolve(config)
    if _COLBERT in (read_json(folder / "config.json").get("architectures") or ()):
        return _stanford(folder, tokenizer)
    if not (folder / "modules.json").is_file():
        return None
    try:
        modules: Any = files.read_json(folder / "modules.json")
    except (OSError, ValueError) as e:
        raise ConfigError(f"{folder / 'modules.json'} cannot be read: {e}") from None
    kinds = {str(module.get("type", "")).rpartition(".")[2]: module.get("path", "") for module in modules}
    if "Pooling" in kinds or "Dense" not in kinds:
        return None
    return _sentence_transformers(folder, kinds, tokenizer)


def _stanford(folder: Path, tokenizer: Tokenizer) -> LateInteraction:
    data = read_json(folder / "artifact.metadata")
    return _settings(
        folder,
        tokenizer,
        prefixes=(data.get("query_token_id") or "[unused0]", data.get("doc_token_id") or "[unused1]"),
        lengths=(data.get("query_maxlen") or _DEFAULT_LENGTH, data.get("doc_maxlen")),
        expansion={
            "length": data.get("query_maxlen") or _DEFAULT_LENGTH,
            "attend": bool(data.get("attend_to_mask_tokens")),
        },
        skipped=list(string.punctuation) if data.get("mask_punctuation", True) else [],
    )


def _sentence_transformers(folder: Path, kinds: Mapping[str, str], tokenizer: Tokenizer) -> LateInteraction:
    """Return the settings in the files of PyLate (all in one file) or of sentence-transformers (in the modules' files)."""
    data = read_json(folder / "config_sentence_transformers.json")
    transformer = read_json(folder / "sentence_bert_config.json")
    mask = read_json(folder / kinds["MultiVectorMask"] / "config.json") if "MultiVectorMask" in kinds else {}
    if mask.get("keep_only_token_ids") or mask.get("skiplist_tasks") not in (None, ["document"]):
        raise ConfigError(f"{folder}: keep_only_token_ids and skiplist_tasks of MultiVectorMask are not supported")
    if "MultiVectorMask" in kinds:
        expansion, skipped = transformer.get("query_expansion"), mask.get("skiplist_words") or []
        lengths = (transformer.get("query_length"), transformer.get("document_length"))
    else:
        given = data.get("skiplist_words")
        skipped = list(string.punctuation) if given is None else given
        lengths = (data.get("query_length") or _DEFAULT_LENGTH, data.get("document_length"))
        expansion = {"length": lengths[0], "attend": bool(data.get("attend_to_expansion_tokens"))}
        if data.get("do_query_expansion") is False:
            expansion = None
    prefixes = (data.get("query_prefix") or "", data.get("document_prefix") or "")
    return _settings(folder, tokenizer, prefixes=prefixes, lengths=lengths, expansion=expansion, skipped=skipped)


def _settings(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    prefixes: tuple[str, str],
    lengths: tuple[Any, Any],
    expansion: Mapping[str, Any] | None,
    skipped: Any,
) -> LateInteraction:
    if not isinstance(skipped, list) or not all(isinstance(word, str) for word in skipped):
        raise ConfigError(f"{folder}: the skiplist of the late-interaction model must be a list of texts")
    length: Any = 0 if expansion is None else expansion.get("length")
    for number in (length, *lengths):
        if number is not None and (not isinstance(number, int) or number < 0):
            raise ConfigError(f"{folder}: the lengths of queries and documents must be positive numbers")
    query_length: Any = lengths[0]
    if expansion is not None:
        query_length = max(query_length or 0, length) if expansion.get("strategy") == "min" else length
    words = [tokenizer.token_id(word) for word in skipped]
    unknown = tokenizer.token_id(_named(folder, ("unk_token",)))
    return LateInteraction(
        query=_marker(prefixes[0], tokenizer),
        document=_marker(prefixes[1], tokenizer),
        query_length=query_length,
        document_length=lengths[1],
        expansion_length=length or 0,
        expansion_id=_expansion_id(folder, tokenizer, expansion),
        attends=bool(expansion and expansion.get("attend")),
        skipped=frozenset(word for word in words if word is not None and word != unknown),
        leading=int(tokenizer.leading_token is not None),
    )


def _marker(prefix: str, tokenizer: Tokenizer) -> Marker:
    """Return the marker for a prefix. If the complete prefix or its first word is a token, the marker is that token."""
    for word in (prefix, *prefix.split()[:1]):
        if word and (token_id := tokenizer.token_id(word)) is not None:
            rest = prefix[len(word) :].strip()
            return Marker(prefix) if rest else Marker(token_id=token_id)
    return Marker(prefix)


def _expansion_id(folder: Path, tokenizer: Tokenizer, expansion: Mapping[str, Any] | None) -> int:
    if expansion is None:
        return 0
    name = expansion.get("token") or _named(folder, _MASKS)
    token_id = tokenizer.token_id(name)
    if token_id is None:
        raise ConfigError(f"{folder}: queries are expanded, but the tokenizer has no mask token and no end token")
    return token_id


def _named(folder: Path, kinds: Sequence[str]) -> str:
    """Return the text of the first special token that the tokenizer's files name, or an empty text."""
    named = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    for kind in kinds:
        found = named.get(kind)
        text = found.get("content") if isinstance(found, dict) else found
        if isinstance(text, str) and text:
            return text
    return ""
