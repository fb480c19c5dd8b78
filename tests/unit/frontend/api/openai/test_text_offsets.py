"""Offsets of tokens' texts, including tokens that are parts of characters."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers

from penstock_frontend.api.openai.choice_logprobs import TextOffsets
from penstock_frontend.config import ModelConfig
from penstock_frontend.processing.outputs.detokenizer import IncrementalDetokenizer
from penstock_frontend.processing.prompts.tokenizer import load_model_files
from tests.fakes.models.small_tokenizers import byte_fallback, byte_level

SMILE = "🙂".encode()


class Offsets:
    """Computes offsets for a vocabulary with a token for each byte, and other tokens."""

    def __init__(self, directory: Path, tokenizer: tokenizers.Tokenizer, byte_tokens: Sequence[str]) -> None:
        directory.mkdir()
        tokenizer.save(str(directory / "tokenizer.json"))
        self.tokenizer = load_model_files(ModelConfig(path=str(directory)), num_threads=1).tokenizer
        self._ids = tokenizer.get_vocab()
        self._byte_tokens = byte_tokens

    def ids(self, *parts: bytes | str) -> list[int]:
        """Return the token ids of bytes, and of tokens given by name."""
        found: list[int] = []
        for part in parts:
            names = [part] if isinstance(part, str) else [self._byte_tokens[byte] for byte in part]
            found += [self._ids[name] for name in names]
        return found

    def detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.tokenizer, (), skip_special_tokens=True)

    def of(self, *batches: list[int]) -> list[int]:
        offsets = TextOffsets(self.detokenizer(), self.tokenizer.text_of, self.tokenizer.bytes_of)
        return [offset for batch in batches for offset in offsets.of(batch)]

    def text(self, token_ids: Sequence[int]) -> str:
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


def byte_level_alphabet() -> list[str]:
    """Return the token of every byte, as byte-level BPE names it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def offsets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Offsets:
    directory = tmp_path_factory.mktemp("models") / "model"
    if request.param == "byte_level":
        return Offsets(directory, byte_level(), byte_level_alphabet())
    return Offsets(directory, byte_fallback(), [f"<0x{byte:02X}>" for byte in range(256)])


def test_tokens_inside_a_character_have_its_offset(offsets: Offsets) -> None:
    ids = offsets.ids("x", SMILE, "y")
    assert offsets.text(ids) == "x🙂y"
    assert offsets.of(ids) == [0, 1, 1, 1, 1, 2]


def test_a_token_behind_an_unfinished_character_begins_behind_what_that_becomes(offsets: Offsets) -> None:
    ids = offsets.ids("x", SMILE[:1], "y", "z")
    assert offsets.text(ids) == "x\ufffdyz"
    assert offsets.of(ids) == [0, 1, 2, 3]


def test_an_unfinished_character_of_several_tokens_is_one_place(offsets: Offsets) -> None:
    ids = offsets.ids("x", SMILE[:2], "y")
    text = offsets.text(ids)
    found = offsets.of(ids)
    assert found[-1] == text.index("y")
    assert found[:2] == [0, 1]


def test_offsets_are_the_same_in_one_batch_and_in_batches_of_whole_texts(offsets: Offsets) -> None:
    ids = offsets.ids("x", SMILE[:1], "y", SMILE, "z")
    assert offsets.text(ids) == "x\ufffdy🙂z"
    assert offsets.of(ids) == [0, 1, 2, 3, 3, 3, 3, 4]
    assert offsets.of(ids[:3], ids[3:7], ids[7:]) == offsets.of(ids)


def test_a_whole_character_behind_an_unfinished_one_has_its_own_place(
    offsets: Offsets, request: pytest.FixtureRequest
) -> None:
    ids = offsets.ids("x", SMILE[:1], "你".encode(), "z")
    found, text = offsets.of(ids), offsets.text(ids)
    assert found[-1] == text.index("z")
    if text == "x\ufffd你z":  # in a sequence of byte tokens, one invalid byte makes the entire sequence invalid
        assert found == [0, 1, 2, 2, 2, 3]


def test_what_ends_unfinished_has_the_offset_of_its_replacement(offsets: Offsets) -> None:
    ids = offsets.ids("x", "y", SMILE[:1])
    assert offsets.of(ids) == [0, 1, 2]
    assert offsets.text(ids) == "xy\ufffd"
