"""The bytes that each token of the model stands for, read from the model's tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xgrammar
from huggingface_hub import hf_hub_download
from tokenizers import Tokenizer

from penstock_common.errors import LONGEST_PATH, Unimplemented, quoted
from penstock_common.input_files import read_input
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.structured_output.constraints.source import FIELD

_FILE = "tokenizer.json"
_OTHER_FILES = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""


def check_tokenizer(config: ModelConfig) -> None:
    """Raise Unimplemented when the model's directory holds no tokenizer. Reads nothing; a model of the hub passes."""
    directory = Path(config.path).expanduser()
    if directory.is_dir() and not any((directory / name).is_file() for name in (_FILE, *_OTHER_FILES)):
        raise Unimplemented(
            f"this engine has no tokenizer: {quoted(config.path, LONGEST_PATH)} holds no {_FILE}", field=FIELD
        )


def load_tokenizer_info(config: ModelConfig, vocab_size: int, eos_token_ids: frozenset[int]) -> xgrammar.TokenizerInfo:
    """What xgrammar knows of the vocabulary: ``vocab_size`` tokens, of which those without text, special ones included,
    can only be ``eos_token_ids``. Raises Unimplemented without a tokenizer that can be read.
    """
    try:
        tokens = token_bytes(_load_tokenizer(config), vocab_size)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as e:
        reason = str(e).strip().split("\n", 1)[0]
        raise Unimplemented(
            f"this engine has no usable tokenizer: {quoted(config.path, LONGEST_PATH)}: {reason}", field=FIELD
        ) from e
    stop = sorted(token for token in eos_token_ids if token < vocab_size)
    for token in stop:
        tokens[token] = b""
    return xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stop)


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of each token id below ``vocab_size``; none for special tokens and for ids that the tokenizer lacks.

    Raises ValueError for a tokenizer whose tokens are not pieces of text put side by side.
    """
    added = tokenizer.get_added_tokens_decoder()
    decode = _decoder(json.loads(tokenizer.to_str()))
    tokens = [b""] * vocab_size
    for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token < vocab_size:
            special = token in added and added[token].special
            tokens[token] = b"" if special else text.encode() if token in added else decode(text)
    return tokens


def _load_tokenizer(config: ModelConfig) -> Tokenizer:
    directory = Path(config.path).expanduser()
    if (directory / _FILE).is_file():
        return _read(directory / _FILE)
    if not directory.is_dir():
        return _read(Path(hf_hub_download(config.path, _FILE, revision=config.revision or None)))
    from transformers import AutoTokenizer  # imported late: only models without a tokenizer.json need it

    loaded = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=config.trust_remote_code)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ValueError("it is not one of the tokenizers library")
    return backend


def _read(path: Path) -> Tokenizer:
    return Tokenizer.from_buffer(read_input(path))


def _decoder(description: dict[str, Any]) -> Callable[[str], bytes]:
    """How a token of the model, as the tokenizer writes it, becomes bytes."""
    kinds = {part.get("type") for part in _parts([description.get("decoder"), description.get("pre_tokenizer")])}
    if "ByteLevel" in kinds:
        table = _byte_level()
        return lambda text: bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()
    if "WordPiece" in kinds or description["model"].get("type") == "WordPiece":
        raise ValueError("WordPiece tokens do not say where spaces are")
    fallback = bool(description["model"].get("byte_fallback")) or "ByteFallback" in kinds
    return lambda text: _sentence_piece(text, fallback)


def _parts(tree: Any) -> list[dict[str, Any]]:
    """Every object in ``tree``."""
    if isinstance(tree, list):
        return [part for item in tree for part in _parts(item)]
    return [tree, *_parts(list(tree.values()))] if isinstance(tree, dict) else []


def _sentence_piece(text: str, fallback: bool) -> bytes:
    if fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(_SPACE, " ").encode()


def _byte_level() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
