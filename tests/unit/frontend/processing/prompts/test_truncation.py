"""Texts are cut as the tokenizers library cuts them where its own truncation is on."""

import pytest
import tokenizers

from penstock_frontend.processing.prompts.truncation import Cut, End, encode_cut, encode_pair_cut
from tests.fakes.models.small_tokenizers import byte_level

SHORT, LONG = "hello", "the quick brown fox jumps over the lazy dog, hello world"


def backend(*, longest: int | None = None, at: End = "end") -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer that adds tokens around texts, and between the texts of a pair."""
    made = byte_level()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    if longest is not None:
        made.enable_truncation(longest, direction="right" if at == "end" else "left")
    return made


@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.parametrize("longest", [3, 4, 7, 200])
@pytest.mark.parametrize("text", [SHORT, LONG])
def test_a_text_is_cut_at_its_end_or_start(text: str, longest: int, at: End) -> None:
    expected = backend(longest=longest, at=at).encode(text).ids
    assert encode_cut(backend(), text, Cut(longest, at)).ids == expected
    ids = byte_level().encode(text).ids
    assert Cut(longest, at).of(ids) == (ids[:longest] if at == "end" else ids[-longest:])


@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.parametrize("longest", [5, 6, 9, 10, 15, 200])
@pytest.mark.parametrize("pair", [(SHORT, LONG), (LONG, SHORT), (LONG, LONG), (SHORT, SHORT)])
def test_of_a_pair_the_longer_text_gives_way(pair: tuple[str, str], longest: int, at: End) -> None:
    cut = encode_pair_cut(backend(), *pair, Cut(longest, at))
    expected = backend(longest=longest, at=at).encode(*pair)
    assert (cut.ids, cut.type_ids) == (expected.ids, expected.type_ids)
