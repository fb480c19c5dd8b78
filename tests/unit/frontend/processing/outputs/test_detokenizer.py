"""Incremental detokenization: characters stay whole, and the pieces are the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_frontend.processing.outputs.detokenizer import IncrementalDetokenizer
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from tests.fakes.models import small_tokenizers

BYTE_LEVEL = Tokenizer(small_tokenizers.byte_level())
BYTE_FALLBACK = Tokenizer(small_tokenizers.byte_fallback())
WORD_PIECES = Tokenizer(small_tokenizers.word_pieces())


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer._backend.encode(text, add_special_tokens=False).ids


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, prompt: str = "", skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, ids_of(tokenizer, prompt), skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(text=st.text(max_size=40), prompt=st.text(max_size=10))
def test_pieces_of_any_text_join_to_the_text(text: str, prompt: str) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, ids_of(BYTE_LEVEL, text), prompt=prompt)) == text


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=60))
def test_pieces_of_arbitrary_tokens_join_to_what_decoding_at_once_gives(ids: list[int]) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, ids, skip=False)) == BYTE_LEVEL.decode(ids)


@given(ids=st.lists(st.sampled_from(ids_of(BYTE_LEVEL, "你🙂é")), max_size=80))
def test_tokens_that_are_mostly_torn_characters_join_to_what_decoding_at_once_gives(ids: list[int]) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@given(text=st.text(alphabet="ab \u4f60\U0001f642é", max_size=30))
def test_byte_fallback_text_keeps_its_leading_space_behind_a_prompt(text: str) -> None:
    ids = ids_of(BYTE_FALLBACK, text)
    behind_prompt = "".join(pieces_of(BYTE_FALLBACK, ids, prompt="hello"))
    assert behind_prompt == (f" {text}" if ids else "")
    assert "".join(pieces_of(BYTE_FALLBACK, ids)) == text


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_a_character_comes_out_with_its_last_token_only(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "🦊")
    assert len(ids) >= 3
    pieces = pieces_of(tokenizer, ids, prompt="a")
    assert "".join(pieces[: len(ids) - 1]).strip() == ""
    assert pieces[len(ids) - 1] == "🦊"


def test_an_unfinished_character_is_flushed_as_a_replacement_character() -> None:
    ids = ids_of(BYTE_LEVEL, "a🦊")[:-1]
    assert pieces_of(BYTE_LEVEL, ids)[-1] == "\ufffd"


def test_a_character_that_the_prompt_began_is_completed() -> None:
    fox = ids_of(BYTE_LEVEL, "🦊")
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, fox[:-1], skip_special_tokens=True)
    assert detokenizer.push(fox[-1]) == "🦊"


def test_special_tokens_are_skipped_or_shown() -> None:
    [eos] = ids_of(BYTE_LEVEL, small_tokenizers.EOS)
    hello = ids_of(BYTE_LEVEL, "hello")
    assert "".join(pieces_of(BYTE_LEVEL, [*hello, eos, *hello])) == "hellohello"
    assert "".join(pieces_of(BYTE_LEVEL, [*hello, eos, *hello], skip=False)) == "hello</s>hello"


def test_skipped_special_tokens_do_not_eat_the_space_of_the_next_word() -> None:
    bos = 1
    assert "".join(pieces_of(BYTE_FALLBACK, [*ids_of(BYTE_FALLBACK, "a"), bos, *ids_of(BYTE_FALLBACK, "b")])) == "a b"


def test_ids_without_a_token_give_no_text_and_no_growing_window() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], skip_special_tokens=True)
    assert "".join(detokenizer.push(100_000) for _ in range(200)) == ""
    assert len(detokenizer._window) < 50
    assert detokenizer.push(ids_of(BYTE_LEVEL, "x")[0]) == "x"


@settings(max_examples=20)
@given(byte=st.sampled_from(ids_of(BYTE_LEVEL, "🦊")))
def test_endless_torn_characters_come_out_and_keep_the_window_small(byte: int) -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], skip_special_tokens=True)
    text = "".join(detokenizer.push(byte) for _ in range(300))
    assert len(text) > 250
    assert len(detokenizer._window) < 20


def text_of_all(tokenizer: Tokenizer, ids: list[int], *, spaces: bool, skip: bool = False) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    return "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()])


def test_spaces_of_the_decoder_between_special_tokens_can_be_left_out() -> None:
    unknown, cls, sep, fox, es, run = range(6)
    ids = [cls, sep, sep, fox, es, run, sep, cls, fox, sep, unknown]
    assert text_of_all(WORD_PIECES, ids, spaces=True) == "[CLS] [SEP] [SEP] foxes run [SEP] [CLS] fox [SEP] [UNK]"
    assert text_of_all(WORD_PIECES, ids, spaces=False) == "[CLS][SEP][SEP] foxes run [SEP][CLS] fox [SEP] [UNK]"
    assert text_of_all(WORD_PIECES, ids, spaces=False, skip=True) == "foxes run fox [UNK]"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
def test_decoders_without_spaces_between_tokens_have_none_to_leave_out(tokenizer: Tokenizer) -> None:
    special = sorted(tokenizer.special_ids)
    ids = [*special, *ids_of(tokenizer, "a b"), *special, *special]
    assert text_of_all(tokenizer, ids, spaces=False) == text_of_all(tokenizer, ids, spaces=True)
