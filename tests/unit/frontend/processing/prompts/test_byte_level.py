"""Decoding of byte-level vocabularies by a table of bytes: the same text as the library's, whatever the tokens."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from penstock_frontend.processing.prompts.tokenizer import ByteLevelDecoder, OddTokenError, Tokenizer, is_byte_level
from tests.fakes.models.small_tokenizers import EOS, byte_fallback, byte_level, word_pieces

BACKEND = byte_level()
SIZE = BACKEND.get_vocab_size()


def of_library(backend: tokenizers.Tokenizer, ids: list[int]) -> str:
    text: str = backend.decode(ids, skip_special_tokens=False)
    return text


class _NoDecode:
    """A tokenizer whose decoding by the library fails once it was told to."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.broken = False

    def __call__(self, ids: object) -> str:
        if self.broken:
            raise AssertionError("the library was asked")
        return str(self._backend.decode(ids, skip_special_tokens=False))


@given(st.lists(st.integers(0, SIZE + 5), max_size=12))
def test_any_tokens_give_the_librarys_text(ids: list[int]) -> None:
    assert Tokenizer(BACKEND).decode(ids) == of_library(BACKEND, ids)


@given(st.lists(st.integers(2, 257), max_size=8))
def test_torn_and_invalid_bytes_give_the_librarys_replacement_characters(ids: list[int]) -> None:
    assert Tokenizer(BACKEND).decode(ids) == of_library(BACKEND, ids)


def test_added_tokens_in_any_script_give_the_librarys_text() -> None:
    backend = byte_level()
    backend.add_tokens(["你好", "Ġplain", "<tool>", "a b"])
    backend.add_special_tokens(["<|end|>", "▁user▁"])
    tokenizer = Tokenizer(backend)
    ids = list(range(backend.get_vocab_size() + 2))
    for first in ids:
        assert tokenizer.decode([first, 300, first]) == of_library(backend, [first, 300, first])


def test_a_token_that_was_seen_is_not_decoded_by_the_library_again() -> None:
    library = _NoDecode(BACKEND)
    decoder = ByteLevelDecoder(BACKEND, library)
    ids = BACKEND.encode("hello world", add_special_tokens=False).ids
    decoder.decode(ids)
    library.broken = True
    assert decoder.decode(ids) == "hello world"


def test_a_token_that_the_library_reads_in_another_way_is_left_to_it() -> None:
    decoder = ByteLevelDecoder(BACKEND, lambda ids: "something else")
    for _ in range(2):
        with pytest.raises(OddTokenError):
            decoder.decode([BACKEND.token_to_id(EOS)])


@pytest.mark.parametrize("backend", [byte_fallback(), word_pieces()], ids=["byte fallback", "word pieces"])
def test_decoders_that_look_at_neighbours_are_the_librarys(backend: tokenizers.Tokenizer) -> None:
    assert not is_byte_level(backend)
