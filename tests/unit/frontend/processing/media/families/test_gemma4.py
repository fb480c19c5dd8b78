"""Gemma 4: sizes, tokens and tensors of images, video and audio as transformers' own processors make them."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.video_utils import VideoMetadata

from penstock_common.config.settings import Reread
from penstock_common.errors import ConfigError
from penstock_common.types.media import EmbedRun, TensorData
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.call_types import EncodedFile, GenerateRequest, MediaPart, MixedPrompt, Part
from penstock_frontend.config import FairnessConfig, LimitsConfig, ModelConfig
from penstock_frontend.processing.media.families.base import Family, FamilyProcessor
from penstock_frontend.processing.media.families.checkpoint import load_family
from penstock_frontend.processing.media.families.gemma4 import SOFT_TOKENS, Pictures
from penstock_frontend.processing.media.families.tensors import to_array
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.tokenizer import load_model_files
from tests.fakes.multimodal_models import make_image, make_sound, save_multimodal_model
from tests.fakes.prepared_media import InProcessPreparer, video_part

NAMES = ("gemma4", "gemma4_unified")
SECONDS = (0.0101, 0.05, 0.3, 0.9999, 1.0, 1.37, 1.99, 2.0)
SIZES = [(1, 1), (1, 4000), (9000, 1), (48, 48), (47, 49), (12_000, 9000), (1, 2), (16, 4481)]
"""Widths and heights that are always tested, in addition to random ones."""


class Model(NamedTuple):
    name: str
    folder: Path
    family: Family
    processor: FamilyProcessor
    inputs: InputProcessor
    theirs: Any


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder: Path = tmp_path_factory.mktemp("models") / request.param
    save_multimodal_model(request.param, folder)
    tokenizer = load_model_files(ModelConfig(path=str(folder)), num_threads=1).tokenizer
    family = load_family(folder, tokenizer.literal)
    assert family is not None
    limits, fairness = Reread(LimitsConfig()), Reread(FairnessConfig())
    media = InProcessPreparer(family)
    inputs = InputProcessor(tokenizer, {}, model_name="demo", limits=limits, fairness=fairness, media=media)
    load: Any = AutoProcessor.from_pretrained
    yield Model(request.param, folder, family, family.make_processor()(), inputs, load(folder))
    tokenizer.close()


async def ours(model: Model, *parts: Part) -> EngineCoreRequest:
    fields = tuple(f"parts[{i}]" for i in range(len(parts)))
    return await model.inputs.process(GenerateRequest(prompt=MixedPrompt(parts, fields)), "r")


@pytest.mark.parametrize(("patch_size", "merge"), [(16, 3), (14, 2), (4, 3)])
def test_pictures_of_every_size_are_resized_as_transformers_does(patch_size: int, merge: int) -> None:
    rng = random.Random(50)
    pictures = Pictures(patch_size, merge, merges=False, max_embeds=280, resample=3)
    for index in range(4000):
        width, height = (
            SIZES[index] if index < len(SIZES) else (int(10 ** rng.uniform(0, 4)), int(10 ** rng.uniform(0, 4)))
        )
        for budget in SOFT_TOKENS:
            theirs = get_aspect_ratio_preserving_size(height, width, patch_size, budget * merge**2, merge)
            assert pictures.size_of(width, height, budget) == theirs[::-1], (width, height, budget)


def test_a_budget_of_tokens_is_that_of_transformers(model: Model) -> None:
    save = json.loads((model.folder / "processor_config.json").read_text())
    save["image_processor"]["max_soft_tokens"] = 280
    folder = model.folder.parent / "larger"
    folder.mkdir(exist_ok=True)
    for file in model.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "processor_config.json").write_text(json.dumps(save))
    family = load_family(folder, model.family._encode)  # type: ignore[attr-defined]
    assert family is not None
    assert family.max_tokens("image") == 280
    processor, image = family.make_processor()(), make_image(90, 61)
    for budget in (70, 140, 280):
        item = processor.image(image, {"max_soft_tokens": budget})
        theirs = model.theirs.image_processor(images=[image], max_soft_tokens=budget, return_tensors="np")
        assert item.num_embeds == int(theirs["num_soft_tokens_per_image"][0])
        positions = to_array(item.data["image_position_ids"])
        assert np.array_equal(positions[0], np.asarray(theirs["image_position_ids"])[0, : positions.shape[1]])
    for value, said in ((560, "from 1 to 280"), (100, "one of 70, 140"), (True, "a whole number")):
        with pytest.raises(ValueError, match=f"processor_kwargs.max_soft_tokens is {value}; it must be {said}"):
            processor.image(image, {"max_soft_tokens": value})
    with pytest.raises(ValueError, match=r"processor_kwargs\.size is set"):
        processor.image(image, {"size": 3})


def test_what_transformers_processor_gives_is_taken_with_its_padding(model: Model) -> None:
    image = make_image(90, 60)
    given = model.theirs.image_processor(images=[image], return_tensors="np")
    data = {
        name: TensorData(str(array.dtype), array.shape, array.tobytes())  # type: ignore[arg-type]
        for name, array in ((name, np.asarray(value)) for name, value in given.items())
    }
    assert model.family.described("image", data).num_embeds == model.processor.image(image, {}).num_embeds


@pytest.mark.parametrize("change", ["hole", "order", "sides", "empty", "length", "beyond"])
def test_positions_that_are_no_grid_are_refused(model: Model, change: str) -> None:
    data = dict(model.processor.image(make_image(90, 60), {}).data)
    positions = np.array(to_array(data["image_position_ids"]))
    match change:
        case "hole":
            positions[0, 3] = -1
        case "order":
            positions[0, [0, 1]] = positions[0, [1, 0]]
        case "sides":
            positions[0, -1] = [2**40, 1]
        case "empty":
            positions[:] = -1
        case "length":
            positions = positions[:, :-1]
        case _:
            positions += 1
    data["image_position_ids"] = TensorData("int64", positions.shape, positions.tobytes())
    with pytest.raises(ValueError, match=r"pixel_values has shape|image_position_ids (has positions up to|must have)"):
        model.family.described("image", data)


@pytest.mark.parametrize("count", [1, 3, 4])
async def test_videos_are_as_transformers_has_them(model: Model, count: int) -> None:
    for width, height, fps in ((24, 96, 1.0), (61, 47, 2.0), (120, 31, 0.02)):
        frames = [make_image(width, height, index) for index in range(count)]
        timestamps = [index / fps for index in range(count)]
        videos = [np.stack([np.asarray(frame) for frame in frames])] * 2
        metadata = [VideoMetadata(total_num_frames=count, fps=fps, frames_indices=list(range(count)))] * 2
        given = model.theirs(
            text="look <|video|>\nand<|video|> what",
            videos=videos,
            videos_kwargs={"do_sample_frames": False, "video_metadata": metadata, "return_metadata": True},
            return_tensors="np",
        )
        part = video_part(frames, timestamps)
        request = await ours(model, "look ", part, "\nand", part, " what")
        assert request.prompt_token_ids == given["input_ids"][0].tolist()
        token = model.theirs.video_token_id
        places = [
            feature.offset + run.start + index
            for feature in request.mm_features
            for run in feature.embed_runs or (EmbedRun(0, feature.length),)
            for index in range(run.count)
        ]
        assert places == [i for i, each in enumerate(request.prompt_token_ids) if each == token]
        [data, _] = [feature.data for feature in request.mm_features]
        positions, pixels = (to_array(data[name]) for name in ("video_position_ids", "pixel_values_videos"))
        theirs = np.asarray(given["video_position_ids"])[:count, : positions.shape[1]]
        assert np.array_equal(positions, theirs)
        expected = np.asarray(given["pixel_values_videos"])[:count, : positions.shape[1]] * 255
        assert np.abs(pixels - expected).mean() < 0.1  # torchvision and Pillow round differently
        assert to_array(data["num_frames_per_video"]).tolist() == [count]
        assert all(feature.length <= model.family.max_tokens("video") for feature in request.mm_features)


def test_videos_have_as_many_frames_as_the_checkpoint_allows(model: Model) -> None:
    frames = [make_image(40, 30, index) for index in range(9)]
    item = model.processor.video(frames, [float(index) for index in range(9)], {})
    assert to_array(item.data["num_frames_per_video"]).tolist() == [4]
    assert item.layout[1:] == (0, 3, 5, 8)
    with pytest.raises(ValueError, match="the tensors of a video do not contain the times"):
        model.family.described("video", item.data)


async def test_sound_is_as_transformers_has_it(model: Model) -> None:
    for index, seconds in enumerate(SECONDS):
        clips = [make_sound(seconds, index), make_sound(0.5, index)]
        parts = [MediaPart(modality="audio", source=EncodedFile(clip.tobytes()), field="sound") for clip in clips]
        request = await ours(model, "hear ", parts[0], " and", parts[1], "what")
        given = model.theirs(
            text="hear <|audio|> and<|audio|>what", audio=clips, return_tensors="np", sampling_rate=16_000
        )
        assert request.prompt_token_ids == given["input_ids"][0].tolist(), seconds
        for place, feature in enumerate(request.mm_features):
            assert feature.length <= model.family.max_tokens("audio")
            features = to_array(feature.data["input_features"])[0]
            mask = to_array(feature.data["input_features_mask"])[0]
            padded = np.asarray(given["input_features"])[place]
            assert np.array_equal(features[mask], padded[np.asarray(given["input_features_mask"])[place]])
            assert model.family.described("audio", feature.data).num_embeds == feature.length


def test_too_much_sound_or_too_little_is_refused(model: Model) -> None:
    least = 161 if model.name == "gemma4" else 1
    assert model.processor.audio(make_sound(1.0)[:least], {}).num_embeds == 1
    for clip in (make_sound(1.0)[: least - 1], make_sound(2.1)):
        with pytest.raises(ValueError, match=rf"the model accepts clips from 0\.\d+ s \({least} samples\) to 2 s"):
            model.processor.audio(clip, {})
    item = model.processor.audio(make_sound(1.0), {})
    mask = item.data["input_features_mask"]
    holes = TensorData(mask.dtype, mask.shape, b"\0" + bytes(mask.data)[1:])
    with pytest.raises(ValueError, match="the selected vectors must be the first vectors"):
        model.family.described("audio", {**item.data, "input_features_mask": holes})


def test_a_checkpoint_takes_the_media_that_it_has_encoders_for(model: Model, tmp_path: Path) -> None:
    config = json.loads((model.folder / "config.json").read_text())
    for file in model.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def family(encode: Any = model.family._encode, **sections: Any) -> Family:  # type: ignore[attr-defined]
        (tmp_path / "config.json").write_text(json.dumps({**config, **sections}))
        found = load_family(tmp_path, encode)
        assert found is not None
        return found

    assert model.family.modalities == {"image", "video", "audio"}
    silent = family(audio_config=None)
    assert (set(silent.modalities), silent.sampling_rate) == ({"image", "video"}, 0)
    blind = family(vision_config=None)
    assert (set(blind.modalities), blind.sampling_rate) == ({"audio"}, 16_000)
    assert blind.placeholder("audio") == "<|audio|>"
    with pytest.raises(ValueError, match="the model accepts no images"):
        blind.make_processor()().image(Image.new("RGB", (8, 8)), {})
    with pytest.raises(ValueError, match="the model accepts no image"):
        blind.described("image", {})
    with pytest.raises(ConfigError, match="neither vision_config nor audio_config"):
        family(vision_config=None, audio_config=None)
    encode = model.family._encode  # type: ignore[attr-defined]
    still = family(lambda text: [1, 2] if text == "<|video|>" else encode(text), audio_config=None)
    assert still.modalities == {"image"}


WITHOUT_TORCH = """
import sys
for name in ("torch", "torchvision", "torchaudio"):
    sys.modules[name] = None
from pathlib import Path
import numpy as np
import tokenizers
from PIL import Image
from penstock_frontend.processing.media.families.checkpoint import load_family
folder = Path(sys.argv[1])
backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
family = load_family(folder, lambda text: backend.encode(text, add_special_tokens=False).ids)
processor, image = family.make_processor()(), Image.new("RGB", (50, 40))
print(processor.image(image, {}).num_embeds, processor.video([image], [0.0], {}).num_embeds, end=" ")
print(processor.audio(np.zeros(16_000, np.float32), {}).num_embeds)
"""


def test_media_are_processed_without_torch(model: Model) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(model.folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["63", "63", "25"]
