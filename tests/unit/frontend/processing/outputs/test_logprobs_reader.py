"""The text of each entry of log-probabilities."""

import pytest

from penstock_common.types.outputs import Logprobs
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.processing.outputs.processor import LogprobsReader
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from tests.fakes.models import small_tokenizers

BYTE_LEVEL = Tokenizer(small_tokenizers.byte_level())
BYTE_FALLBACK = Tokenizer(small_tokenizers.byte_fallback())
WORD_PIECES = Tokenizer(small_tokenizers.word_pieces())


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer._backend.encode(text, add_special_tokens=False).ids


def texts_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    logprobs = Logprobs()
    logprobs.add(ids, [0.0] * len(ids), [1] * len(ids))
    read = LogprobsReader(tokenizer, SamplingParams(logprobs=0), 1).read(logprobs, 1)
    assert read is not None
    return read.tokens


def test_texts_of_tokens_with_whole_characters_join_to_the_text() -> None:
    text = "the quick brown fox"
    texts = texts_of(BYTE_LEVEL, ids_of(BYTE_LEVEL, text))
    assert "".join(texts) == text
    assert len(texts) < len(text)


def test_a_leading_space_is_kept_even_if_decoding_the_token_alone_loses_it() -> None:
    ids = ids_of(BYTE_FALLBACK, "ab c")
    assert BYTE_FALLBACK.decode(ids[:1]) == ""
    assert "".join(texts_of(BYTE_FALLBACK, ids)) == " ab c"


def test_word_pieces_begin_with_a_space_unless_they_go_on_with_a_word() -> None:
    assert texts_of(WORD_PIECES, [3, 4, 5]) == [" fox", "es", " run"]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_a_part_of_a_character_is_the_replacement_character(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "🦊")[-3:]
    assert texts_of(tokenizer, ids) == ["\ufffd"] * 3


def test_a_special_token_is_its_name_and_an_id_without_a_token_nothing() -> None:
    [eos] = ids_of(BYTE_LEVEL, small_tokenizers.EOS)
    assert texts_of(BYTE_LEVEL, [eos, BYTE_LEVEL.vocab_size + 5]) == [small_tokenizers.EOS, ""]
