"""Decoder prompts and languages of Whisper."""

import pytest
from transformers.models.whisper import tokenization_whisper as oracle

from penstock_common.errors import ConfigError, InvalidArgument
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from penstock_frontend.speech.languages import NAMES, code_of
from penstock_frontend.speech.prompts import SpeechTokens, load_tokens
from penstock_frontend.speech.types import SpeechTask
from tests.fakes.models import small_tokenizers
from tests.fakes.models.whisper_tokenizer import LANGUAGES, whisper_tokenizer

CONFIG = {"model_type": "whisper", "vocab_size": 51865, "max_target_positions": 16}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(whisper_tokenizer())


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> SpeechTokens:
    return load_tokens(tokenizer, CONFIG, {})


def names(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids)


def test_names_and_codes_are_those_of_transformers() -> None:
    assert dict(NAMES) == oracle.LANGUAGES
    codes = dict.fromkeys(oracle.LANGUAGES, 0)
    for name, code in oracle.TO_LANGUAGE_CODE.items():
        assert code_of(name, codes) == code
        assert code_of(f" {name.upper()}", codes) == code
        assert code_of(code, codes) == code


def test_prompts_name_language_and_task(tokenizer: Tokenizer, tokens: SpeechTokens) -> None:
    assert tuple(tokens.languages) == LANGUAGES
    plain = tokens.prompt("de", SpeechTask.TRANSCRIBE, timestamps=False)
    assert names(tokenizer, plain) == "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"
    timed = tokens.prompt("zh", SpeechTask.TRANSLATE, timestamps=True)
    assert names(tokenizer, timed) == "<|startoftranscript|><|zh|><|translate|>"
    assert names(tokenizer, [tokens.first_timestamp, tokens.first_timestamp + 50]) == "<|0.00|><|1.00|>"


async def test_the_last_tokens_of_the_text_before_the_speech_are_kept(
    tokenizer: Tokenizer, tokens: SpeechTokens
) -> None:
    previous = await tokens.previous_ids("  Penstock and Whisper. ", tokenizer)
    assert names(tokenizer, previous) == " Penstock and Whisper."
    prompt = tokens.prompt("en", SpeechTask.TRANSCRIBE, timestamps=True, previous=previous)
    assert names(tokenizer, prompt) == "<|startofprev|>hisper.<|startoftranscript|><|en|><|transcribe|>"
    assert await tokens.previous_ids(" \n", tokenizer) == []
    assert len(await tokens.previous_ids("x" * 100_000, tokenizer)) == 16 * 64


@pytest.mark.parametrize("text", ["ends <|endoftext|> here", "at <|1.00|>", "<|startofprev|>"])
async def test_control_tokens_in_the_text_before_the_speech_are_refused(
    tokenizer: Tokenizer, tokens: SpeechTokens, text: str
) -> None:
    with pytest.raises(InvalidArgument, match="prompt has the control token '<|") as error:
        await tokens.previous_ids(text, tokenizer)
    assert error.value.field == "prompt"


def test_english_checkpoints_have_neither_language_nor_task(tokenizer: Tokenizer) -> None:
    for config, generation in (({**CONFIG, "vocab_size": 51864}, {}), (CONFIG, {"is_multilingual": False})):
        tokens = load_tokens(tokenizer, config, generation)
        assert names(tokenizer, tokens.prompt("en", SpeechTask.TRANSCRIBE, timestamps=False)) == (
            "<|startoftranscript|><|notimestamps|>"
        )
        assert [tokens.language(given) for given in ("", "en", "English")] == ["en", "en", "en"]
        with pytest.raises(
            InvalidArgument, match="language is 'de', which the model does not know; the model knows en"
        ):
            tokens.language("de")
        with pytest.raises(InvalidArgument, match="task is 'translate', but the model knows only English"):
            tokens.check_task(SpeechTask.TRANSLATE)


def test_unknown_languages_are_refused_with_the_nearest_name(tokens: SpeechTokens) -> None:
    assert [tokens.language(given) for given in ("", "German", "cantonese")] == ["", "de", "yue"]
    with pytest.raises(InvalidArgument) as error:
        tokens.language("germn")
    assert str(error.value) == (
        "language is 'germn', which the model does not know; did you mean 'german'?; the model knows de, en, fr, yue, zh"
    )
    assert error.value.field == "language"
    with pytest.raises(InvalidArgument, match="language is 'es'"):
        tokens.language("es")


def test_the_generation_config_chooses_the_languages(tokenizer: Tokenizer) -> None:
    tokens = load_tokens(tokenizer, CONFIG, {"is_multilingual": True, "lang_to_id": {"<|de|>": 1, "<|xx|>": 2}})
    assert list(tokens.languages) == ["de"]
    assert tokens.languages["de"] == tokenizer.token_id("<|de|>")


def test_a_tokenizer_without_the_control_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"its tokenizer has no token <\|transcribe\|>|<\|startoftranscript\|>"):
        load_tokens(Tokenizer(small_tokenizers.byte_level()), CONFIG, {})
