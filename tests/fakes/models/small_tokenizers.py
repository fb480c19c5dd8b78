"""Real tokenizers, small enough to be built in a test."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

BOS, EOS = "<s>", "</s>"
_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, this is a small tokenizer for the tests of the frontend",
    "größer über Ähren 你好世界 🙂🙂 naïve café",
]


@functools.cache
def _byte_level_json() -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer.to_str()


def byte_level() -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer like that of GPT-2. Characters outside ASCII span several tokens."""
    return tokenizers.Tokenizer.from_str(_byte_level_json())


@functools.cache
def _encoder() -> tokenizers.Tokenizer:
    return byte_level()


def ids_of(text: str) -> list[int]:
    """Return the tokens of a text in ``byte_level``, without a begin-of-sequence token."""
    ids: list[int] = _encoder().encode(text, add_special_tokens=False).ids
    return ids


def byte_fallback() -> tokenizers.Tokenizer:
    """Return a SentencePiece tokenizer like Llama 2's. Words begin with U+2581; unknown characters become byte tokens."""
    pieces = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def word_pieces() -> tokenizers.Tokenizer:
    """Return a tokenizer like BERT's. Its decoder puts a space between tokens, except before a piece that continues a
    word.
    """
    vocab = {piece: index for index, piece in enumerate(["[UNK]", "[CLS]", "[SEP]", "fox", "##es", "run", "a"])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def save_model(folder: Path, *, generation_config: Mapping[str, Any] | None = None) -> Path:
    """Write a directory with the files that a frontend reads from a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_byte_level_json(), encoding="utf-8")
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    return folder
