"""Sound: tokens and tensors as transformers' own processors make them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from transformers import AutoProcessor, WhisperFeatureExtractor
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

from penstock_common.config.settings import Reread
from penstock_common.types.media import TensorData
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.call_types import EncodedFile, GenerateRequest, MediaPart, MixedPrompt, Part
from penstock_frontend.config import FairnessConfig, LimitsConfig, ModelConfig
from penstock_frontend.processing.media.families.base import Family, ProcessedItem
from penstock_frontend.processing.media.families.checkpoint import load_family
from penstock_frontend.processing.media.families.tensors import to_array
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.tokenizer import load_model_files
from tests.fakes.multimodal_models import make_sound, save_multimodal_model
from tests.fakes.prepared_media import InProcessPreparer

SECONDS = (0.05, 0.3, 0.9999, 1.0, 1.37, 1.99, 2.0)


def saved(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / name
    save_multimodal_model(name, folder)
    return folder


@pytest.fixture(scope="module")
def qwen2_audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen2_audio", tmp_path_factory)


@pytest.fixture(scope="module")
def voxtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("voxtral", tmp_path_factory)


@pytest.fixture
def make_inputs() -> Iterator[Any]:
    tokenizers = []

    def make(folder: Path) -> tuple[InputProcessor, Family]:
        tokenizer = load_model_files(ModelConfig(path=str(folder)), num_threads=1).tokenizer
        tokenizers.append(tokenizer)
        family = load_family(folder, tokenizer.literal)
        assert family is not None
        limits, fairness = Reread(LimitsConfig()), Reread(FairnessConfig())
        media = InProcessPreparer(family)
        inputs = InputProcessor(tokenizer, {}, model_name="demo", limits=limits, fairness=fairness, media=media)
        return inputs, family

    yield make
    for tokenizer in tokenizers:
        tokenizer.close()


def sound(samples: npt.NDArray[np.float32]) -> MediaPart:
    return MediaPart(modality="audio", source=EncodedFile(samples.tobytes()), field="sound")


async def process(inputs: InputProcessor, *parts: Part) -> EngineCoreRequest:
    fields = tuple(f"parts[{i}]" for i in range(len(parts)))
    return await inputs.process(GenerateRequest(prompt=MixedPrompt(parts, fields)), "r")


async def test_qwen2_audio_is_as_transformers_has_it(qwen2_audio: Path, make_inputs: Any) -> None:
    inputs, family = make_inputs(qwen2_audio)
    load: Any = AutoProcessor.from_pretrained
    theirs = load(qwen2_audio)
    for index, seconds in enumerate(SECONDS):
        clips = [make_sound(seconds, index), make_sound(0.5, index)]
        request = await process(
            inputs,
            "hear <|audio_bos|>",
            sound(clips[0]),
            "<|audio_eos|> and<|audio_bos|>",
            sound(clips[1]),
            "<|audio_eos|>",
        )
        text = "hear <|audio_bos|><|AUDIO|><|audio_eos|> and<|audio_bos|><|AUDIO|><|audio_eos|>"
        given = theirs(text=text, audio=clips, return_tensors="np", sampling_rate=16_000)
        assert request.prompt_token_ids == given["input_ids"][0].tolist()
        for place, feature in enumerate(request.mm_features):
            assert feature.length <= family.max_tokens("audio")
            for name in ("input_features", "feature_attention_mask"):
                assert np.array_equal(to_array(feature.data[name])[0], given[name][place])
    assert feature.data["input_features"].dtype == "float32"


OMNI = ("qwen2_5_omni", "qwen3_omni_moe")


@pytest.fixture(scope="module", params=OMNI)
def omni(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(request.param, tmp_path_factory)


async def test_omni_is_as_transformers_has_it(omni: Path, make_inputs: Any) -> None:
    """Features are cut behind the sound, where transformers has padding. Shorter padding changes the order of sums."""
    tolerance = {"qwen2_5_omni": 1e-5, "qwen3_omni_moe": 0.0}[omni.name]
    inputs, family = make_inputs(omni)
    load: Any = AutoProcessor.from_pretrained
    theirs = load(omni)
    token = family.placeholder("audio")
    for index, samples in enumerate((321, 799, 4801, 15_999, 16_000, 16_001, 31_840, 33_333, 48_000)):
        clip = make_sound(3.0, index)[:samples]
        request = await process(inputs, "hear ", sound(clip), " and ", sound(clip))
        given = theirs(text=f"hear {token} and {token}", audio=[clip] * 2, return_tensors="np", sampling_rate=16_000)
        assert request.prompt_token_ids == given["input_ids"][0].tolist()
        for feature in request.mm_features:
            steps = int(given["feature_attention_mask"][0].sum())
            found, expected = to_array(feature.data["input_features"])[0], given["input_features"][0][:, :steps]
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
            assert to_array(feature.data["feature_attention_mask"]).tolist() == [[1] * steps]
            assert feature.length <= family.max_tokens("audio")


async def test_the_shortest_and_the_longest_sound_of_omni_models(omni: Path, make_inputs: Any) -> None:
    inputs, family = make_inputs(omni)
    least, most = {"qwen2_5_omni": (321, 48_000), "qwen3_omni_moe": (201, 1800 * 16_000)}[omni.name]
    assert (await process(inputs, sound(make_sound(1.0)[:least]))).mm_features[0].length == 1
    with pytest.raises(ValueError, match=rf"minimum for a clip is 0.0\d+ s \({least} samples\)"):
        await process(inputs, sound(make_sound(1.0)[: least - 1]))
    with pytest.raises(ValueError, match=rf"the model's maximum for a clip is {most // 16_000} s"):
        family.make_processor()().audio(np.zeros(most + 1, np.float32), {})


def test_sound_for_omni_models_that_a_client_processed(omni: Path, make_inputs: Any) -> None:
    _, family = make_inputs(omni)
    item = family.make_processor()().audio(make_sound(1.0), {})
    assert family.described("audio", item.data) == item
    mask = item.data["feature_attention_mask"]
    holes = TensorData(mask.dtype, mask.shape, bytes(4) + bytes(mask.data)[4:])
    with pytest.raises(ValueError, match="selects 99 steps; the selected steps must be the first steps"):
        family.described("audio", {**item.data, "feature_attention_mask": holes})
    rows = TensorData("float32", (7, 64), bytes(7 * 64 * 4))
    assert family.described("audio", {"embeds": rows}).num_embeds == 7
    with pytest.raises(ValueError, match="pixel_values is not an input"):
        family.described("audio", {**item.data, "pixel_values": rows})


async def test_qwen3_asr_is_as_transformers_has_it(make_inputs: Any, tmp_path: Path) -> None:
    save_multimodal_model("qwen3_asr", tmp_path)
    inputs, family = make_inputs(tmp_path)
    load: Any = AutoProcessor.from_pretrained
    theirs = load(tmp_path)
    for index, samples in enumerate((1, 321, 7999, 8000, 15_999, 16_000, 16_001, 31_840, 48_000)):
        clip = make_sound(3.0, index)[:samples]
        request = await process(inputs, "hear ", sound(clip), " and")
        given = theirs(text="hear <|audio_pad|> and", audio=[clip], sampling_rate=16_000)
        assert request.prompt_token_ids == given["input_ids"][0].tolist()
        (feature,) = request.mm_features
        for name in ("input_features", "input_features_mask"):
            assert np.array_equal(to_array(feature.data[name]), given[name].numpy())
        assert feature.length <= family.max_tokens("audio")
        assert family.described("audio", feature.data).num_embeds == feature.length
    cut = TensorData("float32", (1, 16, 299), bytes(16 * 299 * 4))
    mask = TensorData("int32", (1, 299), (1).to_bytes(4, "little") * 299)
    with pytest.raises(ValueError, match="has 299 steps; the number of steps must be a multiple of 100"):
        family.described("audio", {"input_features": cut, "input_features_mask": mask})


async def test_voxtral_is_as_transformers_has_it(voxtral: Path, make_inputs: Any) -> None:
    inputs, family = make_inputs(voxtral)
    extractor: Any = WhisperFeatureExtractor
    # Its processor needs a tokenizer from another package, so only its audio methods are called.
    theirs: Any = object.__new__(VoxtralProcessor)
    theirs.feature_extractor = extractor.from_pretrained(voxtral)
    for seconds in (0.3, 29.99, 30.0, 30.01):
        clip = make_sound(seconds)
        request = await process(inputs, "[BEGIN_AUDIO]", sound(clip), "what")
        kwargs = {
            name: value for name, value in VoxtralProcessor.audio_kwargs.items() if name != "max_source_positions"
        }
        given = theirs._retrieve_input_features([clip], 3000, **kwargs)
        (feature,) = request.mm_features
        assert np.array_equal(to_array(feature.data["input_features"]), given.numpy())
        # A row stands for intermediate_size / hidden_size of the 1500 states of a window, as the model's projector takes them.
        assert feature.length == len(given) * 1500 * 32 // 128
        assert feature.length <= family.max_tokens("audio")


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (
            320 / 16_000,
            r"0.0200 s of sound \(320 samples at 16000 Hz\).* minimum for a clip is 0.0201 s \(321 samples\)",
        ),
        (2.1, "2.1 s of sound; the model's maximum for a clip is 2 s"),
    ],
)
async def test_too_much_sound_or_too_little_is_refused(
    qwen2_audio: Path, make_inputs: Any, seconds: float, message: str
) -> None:
    inputs, _ = make_inputs(qwen2_audio)
    with pytest.raises(ValueError, match=message):
        await process(inputs, sound(make_sound(seconds)))


async def test_the_shortest_sound_is_heard(qwen2_audio: Path, voxtral: Path, make_inputs: Any) -> None:
    for folder, samples in ((qwen2_audio, 321), (voxtral, 1)):
        inputs, _ = make_inputs(folder)
        assert (await process(inputs, sound(make_sound(1.0)[:samples]))).mm_features[0].length >= 1


def test_sound_that_a_client_processed_is_looked_at(qwen2_audio: Path, voxtral: Path, make_inputs: Any) -> None:
    _, family = make_inputs(qwen2_audio)
    item = family.make_processor()().audio(make_sound(1.0), {})
    assert family.described("audio", item.data) == item
    mask = item.data["feature_attention_mask"]
    holes = TensorData(mask.dtype, mask.shape, bytes(4) + bytes(mask.data)[4:])
    with pytest.raises(ValueError, match="selects 99 steps; the selected steps must be the first steps"):
        family.described("audio", {**item.data, "feature_attention_mask": holes})
    rows = TensorData("float32", (7, 64), bytes(7 * 64 * 4))
    assert family.described("audio", {"embeds": rows}).num_embeds == 7
    with pytest.raises(ValueError, match="input_ids is not an input"):
        family.described("audio", {**item.data, "input_ids": rows})


ROWS_OF_WINDOW = 1500 * 32 // 128


@pytest.mark.parametrize(("positions", "most"), [(2048, 5), (ROWS_OF_WINDOW - 1, 1), (10**6, 60), (None, 60)])
def test_voxtral_hears_as_many_windows_as_a_prompt_has_room_for(
    voxtral: Path, make_inputs: Any, tmp_path: Path, positions: int | None, most: int
) -> None:
    folder = shutil.copytree(voxtral, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(config))
    _, family = make_inputs(folder)
    assert family.max_tokens("audio") == most * ROWS_OF_WINDOW

    def described(count: int) -> ProcessedItem:
        return family.described("audio", {"input_features": TensorData("float32", (count, 16, 3000), b"")})

    assert described(most).num_embeds == most * ROWS_OF_WINDOW
    with pytest.raises(ValueError, match=f"has {most + 1} windows; an audio clip may have from 1 to {most}"):
        described(most + 1)
    clip = np.zeros(most * 480_000 + 1, np.float32)
    with pytest.raises(ValueError, match=f"the model's maximum for a clip is {most * 30} s"):
        family.make_processor()().audio(clip, {})


WITHOUT_TORCH = """
import sys
for name in ("torch", "torchvision", "torchaudio"):
    sys.modules[name] = None
from pathlib import Path
import numpy as np
import tokenizers
from penstock_frontend.processing.media.families.checkpoint import load_family
folder, samples, out = map(Path, sys.argv[1:])
backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
family = load_family(folder, lambda text: backend.encode(text, add_special_tokens=False).ids)
item = family.make_processor()().audio(np.load(samples), {})
np.save(out, np.frombuffer(item.data["input_features"].data, np.float32).reshape(item.data["input_features"].shape))
"""


def test_without_torch_sound_is_nearly_the_same(qwen2_audio: Path, make_inputs: Any, tmp_path: Path) -> None:
    _, family = make_inputs(qwen2_audio)
    clip = make_sound(1.3)
    np.save(tmp_path / "clip.npy", clip)
    arguments = [str(qwen2_audio), str(tmp_path / "clip.npy"), str(tmp_path / "out.npy")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with_torch = to_array(family.make_processor()().audio(clip, {}).data["input_features"])
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), with_torch, atol=1e-3)
