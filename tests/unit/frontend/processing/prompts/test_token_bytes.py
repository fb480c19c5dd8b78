"""Bytes of tokens, including tokens that are parts of characters."""

from pathlib import Path

import pytest
import tokenizers

from penstock_frontend.config import ModelConfig
from penstock_frontend.processing.prompts.tokenizer import Tokenizer, load_model_files
from tests.fakes.models.small_tokenizers import byte_fallback, byte_level

TEXT = "naïve 你好 🙂 \ufffd fox"


def loaded(directory: Path, backend: tokenizers.Tokenizer) -> Tokenizer:
    backend.save(str(directory / "tokenizer.json"))
    return load_model_files(ModelConfig(path=str(directory)), num_threads=1).tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_tokens_together_are_the_text(tmp_path: Path, make: object) -> None:
    tokenizer = loaded(tmp_path, make())  # type: ignore[operator]
    ids = tokenizer.literal(TEXT)
    assert any(tokenizer.text_of(token_id) == "\ufffd" for token_id in ids)
    assert b"".join(map(tokenizer.bytes_of, ids)).decode().strip() == TEXT


def test_a_whole_token_has_the_bytes_of_its_text(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, byte_level())
    for token_id in range(tokenizer.vocab_size):
        if "\ufffd" not in (text := tokenizer.text_of(token_id)):
            assert tokenizer.bytes_of(token_id) == text.encode()
    assert tokenizer.bytes_of(10**9) == b""
