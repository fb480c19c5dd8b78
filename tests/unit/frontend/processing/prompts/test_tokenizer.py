"""Decoding of byte-level vocabularies by a table of bytes: the same text as the library's, whatever the tokens."""

import json
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers

from penstock_common.errors import ConfigError
from penstock_frontend.processing.prompts.tokenizer import (
    ByteLevelDecoder,
    OddTokenError,
    Tokenizer,
    hide,
    is_byte_level,
)
from penstock_frontend.processing.prompts.truncation import Cut
from tests.fakes.models import small_tokenizers
from tests.fakes.models.small_tokenizers import EOS, byte_fallback, byte_level, word_pieces

BACKEND = byte_level()
SIZE = BACKEND.get_vocab_size()


def of_library(backend: tokenizers.Tokenizer, ids: list[int]) -> str:
    text: str = backend.decode(ids, skip_special_tokens=False)
    return text


class _NoDecode:
    """A tokenizer whose library decoding fails once ``broken`` is set."""

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


# Special tokens, which no text is tokenized to, in all kinds of tokenizers.

IMAGE, BREAK, OTHER = "<image>", "<br>", "<|im_start|>"


def with_tokens(backend: tokenizers.Tokenizer, *, lstrip: bool = False) -> tokenizers.Tokenizer:
    tokens = [
        AddedToken(token, special=True, normalized=False, lstrip=lstrip) for token in (IMAGE, OTHER, BREAK, "<x>")
    ]
    backend.add_special_tokens(tokens)
    return backend


def in_the_vocabulary() -> tokenizers.Tokenizer:
    """Return a tokenizer whose own vocabulary has the media tokens, followed by other tokens."""
    backend = small_tokenizers.byte_level()
    described = json.loads(backend.to_str())
    vocabulary = described["model"]["vocab"]
    for token in (IMAGE, OTHER, BREAK):
        vocabulary[token] = len(vocabulary)
    return with_tokens(tokenizers.Tokenizer.from_str(json.dumps(described)))


def unigram() -> tokenizers.Tokenizer:
    pieces = [("<unk>", 0.0), (IMAGE, -1.0), *((char, -3.0) for char in "\u2581abcdefgims<>|_r")]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return with_tokens(backend)


MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": lambda: with_tokens(small_tokenizers.byte_level()),
    "stripping": lambda: with_tokens(small_tokenizers.byte_level(), lstrip=True),
    "byte fallback": lambda: with_tokens(small_tokenizers.byte_fallback()),
    "in the vocabulary": in_the_vocabulary,
    "unigram": unigram,
}


@pytest.fixture(params=MAKERS)
def backend(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return MAKERS[request.param]()


TEXTS = ("<image>", "a <image> b", "<image><image>", "<|im_start|>a<br>", "<image >", "a\n<image>\n\nb", "<x><image>")


def test_the_others_stay_what_they_are(backend: tokenizers.Tokenizer) -> None:
    copy, names = hide(backend, [IMAGE, BREAK])
    assert copy.get_vocab_size() == backend.get_vocab_size()
    for token in (OTHER, "<x>"):
        assert copy.encode(f"a{token}b").ids == backend.encode(f"a{token}b").ids
    assert {copy.token_to_id(name) for name in names.values()} == {
        backend.token_to_id(token) for token in (IMAGE, BREAK)
    }


@pytest.mark.parametrize("text", TEXTS)
def test_names_do_what_the_tokens_did(backend: tokenizers.Tokenizer, text: str) -> None:
    copy, names = hide(backend, [IMAGE, BREAK])
    assert copy.encode(text.replace(IMAGE, names[IMAGE]).replace(BREAK, names[BREAK])).ids == backend.encode(text).ids


@pytest.mark.parametrize("text", TEXTS)
def test_the_characters_are_text(backend: tokenizers.Tokenizer, text: str) -> None:
    copy, _ = hide(backend, [IMAGE, BREAK])
    ids = copy.encode(text).ids
    assert not {backend.token_to_id(IMAGE), backend.token_to_id(BREAK)} & set(ids)
    assert (backend.token_to_id(OTHER) in ids) == (OTHER in text)


def test_names_are_never_the_same() -> None:
    one, other = (hide(MAKERS["byte level"](), [IMAGE])[1][IMAGE] for _ in range(2))
    assert one != other


def test_a_tokenizer_without_the_tokens_is_told_of() -> None:
    with pytest.raises(ConfigError, match="no added token '<image>'"):
        hide(small_tokenizers.byte_level(), [IMAGE])
    tokenizer = Tokenizer(with_tokens(small_tokenizers.byte_level()))
    tokenizer.hide([IMAGE, "<none>"])
    assert tokenizer.stand_in(IMAGE)
    with pytest.raises(ConfigError, match="no added token '<none>'"):
        tokenizer.stand_in("<none>")
    tokenizer.close()


async def test_every_way_to_read_a_text_knows_it_for_text() -> None:
    tokenizer = Tokenizer(with_tokens(small_tokenizers.byte_level()))
    tokenizer.hide([IMAGE])
    image = tokenizer.token_id(IMAGE)
    text = "a <image> b"
    assert image in tokenizer.literal(text)
    assert image not in (await tokenizer.encode(text)).ids
    assert all(
        image not in ids for ids in await tokenizer.encode_all([text, text], add_special_tokens=True, cut=Cut(8))
    )
    (pair,) = await tokenizer.encode_pairs([(text, text)])
    assert image not in pair.ids
    assert tokenizer.decode([image or 0]) == IMAGE
    tokenizer.close()


def test_an_unknown_characters_token_may_be_hidden() -> None:
    copy, names = hide(small_tokenizers.byte_fallback(), ["<s>"])
    assert copy.encode("a").ids == small_tokenizers.byte_fallback().encode("a").ids
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[UNK]"])
    copy, names = hide(backend, ["[UNK]"])
    assert copy.encode(f"a b {names['[UNK]']}").ids == [1, 0, 0]


def test_no_merges_lead_to_a_hidden_token() -> None:
    vocabulary = {piece: index for index, piece in enumerate(["<", "s", ">", "s>", "<s>", "<s", "ss"])}
    merges = [("s", ">"), ("<", "s>"), ("s", "s")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    assert backend.encode("<s>ss").ids == [4, 6]
    backend.add_special_tokens(["<s>"])
    copy, names = hide(backend, ["<s>"])
    assert copy.encode("<s>ss").ids == [0, 3, 6]
    assert copy.encode(f"{names['<s>']}ss").ids == [4, 6]
