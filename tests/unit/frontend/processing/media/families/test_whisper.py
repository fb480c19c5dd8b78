"""Prompts of Whisper: one clip at the start, with the features of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from penstock_common.config.settings import Reread
from penstock_common.errors import ConfigError, InvalidArgument
from penstock_common.types.media import TensorData
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.call_types import EncodedFile, GenerateRequest, MediaPart, MixedPrompt
from penstock_frontend.config import FairnessConfig, LimitsConfig, ModelConfig
from penstock_frontend.processing.media.families.checkpoint import load_family
from penstock_frontend.processing.media.families.tensors import to_array
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.tokenizer import load_model_files
from tests.fakes.models.speech_models import SOUND, save_speech_model
from tests.fakes.multimodal_models import make_sound
from tests.fakes.prepared_media import InProcessPreparer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("whisper")
    save_speech_model(made)
    return made


@pytest.fixture
def inputs(folder: Path) -> Iterator[InputProcessor]:
    tokenizer = load_model_files(ModelConfig(path=str(folder)), num_threads=1).tokenizer
    family = load_family(folder, tokenizer.literal)
    assert family is not None
    limits, fairness = Reread(LimitsConfig()), Reread(FairnessConfig())
    media = InProcessPreparer(family)
    yield InputProcessor(tokenizer, {}, model_name="demo", limits=limits, fairness=fairness, media=media)
    tokenizer.close()


def clip(seconds: float, seed: int = 0) -> MediaPart:
    return MediaPart(modality="audio", source=EncodedFile(make_sound(seconds, seed).tobytes()), field="clip")


async def process(inputs: InputProcessor, *parts: Any, special: bool = True) -> EngineCoreRequest:
    prompt = MixedPrompt(parts, tuple(f"parts[{index}]" for index in range(len(parts))))
    return await inputs.process(GenerateRequest(prompt=prompt, add_special_tokens=special), "id")


@pytest.mark.parametrize("seconds", [0.001, 3.0, 30.0])
async def test_a_clip_has_the_features_of_transformers_and_fills_the_start(
    inputs: InputProcessor, folder: Path, seconds: float
) -> None:
    request = await process(inputs, clip(seconds), [5, 6, 7])
    assert request.prompt_token_ids == [inputs.media.tokenizer.token_id(SOUND)] * 1504 + [5, 6, 7]  # type: ignore[union-attr]
    (feature,) = request.mm_features
    assert (feature.offset, feature.length, feature.num_embeds) == (0, 1500, 1500)
    load: Any = WhisperFeatureExtractor.from_pretrained
    given = load(folder)(make_sound(seconds), sampling_rate=16_000, return_tensors="np").input_features
    assert np.array_equal(to_array(feature.data["input_features"]), given)


async def test_text_after_the_clip_has_no_other_special_tokens_if_they_are_turned_off(inputs: InputProcessor) -> None:
    request = await process(inputs, clip(1.0), "<|startoftranscript|><|en|>", special=False)
    whole = await process(inputs, "<|startoftranscript|><|en|>", special=False)
    assert request.prompt_token_ids[1504:] == whole.prompt_token_ids


async def test_clips_that_are_too_long_or_too_many_are_refused(inputs: InputProcessor) -> None:
    with pytest.raises(
        ValueError, match=r"has 30\.1 s of sound; the limit .* is 30 s; send longer clips to /v1/audio/"
    ):
        await process(inputs, clip(30.1), [5])
    with pytest.raises(
        InvalidArgument, match="the prompt has 2 audio clips; a prompt of a Whisper model has exactly one"
    ):
        await process(inputs, clip(1.0), clip(2.0, 1), [5])
    with pytest.raises(InvalidArgument, match="is an image; this model accepts text, audio"):
        await process(inputs, MediaPart(modality="image", source=EncodedFile(b"x"), field="picture"), [5])


def test_features_from_clients_must_have_the_shape_of_a_window(inputs: InputProcessor) -> None:
    assert inputs.media is not None
    family = inputs.media.preparer.family
    data = TensorData("float32", (1, 80, 2999), bytes(4 * 80 * 2999))
    with pytest.raises(ValueError, match=r"input_features has shape \[1, 80, 2999\]; it must be \[\*, 80, 3000\]"):
        family.described("audio", {"input_features": data})
    assert family.max_tokens("audio") == 1504


def test_a_tokenizer_without_the_placeholder_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer has no token '<\|startoflm\|>', which whisper uses"):
        load_family(folder, lambda text: [1, 2])
