"""Tokens that stand for media, and that no text of a client's becomes."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from penstock_common.errors import ConfigError


def hide(backend: tokenizers.Tokenizer, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """A copy of a tokenizer that knows ``tokens`` by other names, which nobody can guess, and these names by token. Their ids
    are the same, and so is what they do to the text beside them; to the copy their own characters are text.

    Tokens that were not added to the model's own are left as they are. Raises ConfigError where none was, or one cannot be told
    from text.
    """
    described = json.loads(backend.to_str())
    added = {entry["content"]: entry for entry in described["added_tokens"]}
    names = {token: f"<|{uuid.uuid4().hex}|>" for token in tokens if token in added}
    if not names:
        raise ConfigError(f"the tokenizer has no added token {' or '.join(map(repr, tokens))}, which stand for media")
    for token, name in names.items():
        added[token]["content"] = name
    _rename(described["model"], names)
    try:
        copy = tokenizers.Tokenizer.from_str(json.dumps(described))
    except Exception as e:  # tokenizers raises nothing narrower
        raise ConfigError(f"the tokenizer cannot be told to take {', '.join(tokens)} for text: {e}") from e
    for token, name in names.items():
        if copy.token_to_id(name) != backend.token_to_id(token):
            raise ConfigError(f"the tokenizer cannot be told to take {token!r} for text: its id would be another one")
    return copy, names


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """A model may know added tokens, too: as keys of a vocabulary, or in a list of pieces and scores. Merges that lead to
    them are dropped: no text becomes such a token.
    """
    vocabulary = model.get("vocab")
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if isinstance(vocabulary, dict):
        if model.get("merges") and not names.keys().isdisjoint(vocabulary):
            model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_pieces(merge))]
        for token, name in names.items():
            if token in vocabulary:
                vocabulary[name] = vocabulary.pop(token)
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]


def _pieces(merge: str | Sequence[str]) -> tuple[str, str, str]:
    """The two pieces of a merge, and what they become."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second, first + second
