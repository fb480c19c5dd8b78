"""Videos of families that see frames as images: tokens as transformers' own processors make them, pixels nearly theirs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor

from penstock_common.config.settings import Reread
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.call_types import GenerateRequest, MixedPrompt, Part
from penstock_frontend.config import FairnessConfig, LimitsConfig, ModelConfig
from penstock_frontend.processing.media.families.base import Family, FamilyProcessor
from penstock_frontend.processing.media.families.checkpoint import load_family
from penstock_frontend.processing.media.families.tensors import to_array
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.tokenizer import load_model_files
from tests.fakes.multimodal_models import SIDE, make_image, save_multimodal_model
from tests.fakes.prepared_media import InProcessPreparer, image_part, video_part


class Model(NamedTuple):
    name: str
    family: Family
    processor: FamilyProcessor
    inputs: InputProcessor
    theirs: Any


@pytest.fixture(scope="module", params=["internvl", "llava_onevision"])
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
    theirs, load = load(folder), AutoImageProcessor.from_pretrained
    theirs.image_processor = load(folder, backend="pil")
    yield Model(request.param, family, family.make_processor()(), inputs, theirs)
    tokenizer.close()


def frames_of(count: int, width: int, height: int) -> list[Image.Image]:
    return [make_image(width, height, index) for index in range(count)]


def times(frames: list[Image.Image]) -> list[float]:
    return [float(index) for index in range(len(frames))]


def stacked(frames: list[Image.Image]) -> Any:
    return np.stack([np.asarray(frame) for frame in frames])


async def ours(model: Model, *parts: Part) -> EngineCoreRequest:
    fields = tuple(f"parts[{i}]" for i in range(len(parts)))
    return await model.inputs.process(GenerateRequest(prompt=MixedPrompt(parts, fields)), "r")


@pytest.mark.parametrize("count", [1, 2, 5, 32])
async def test_tokens_are_those_of_transformers(model: Model, count: int) -> None:
    frames = frames_of(count, 50, 40)
    given = model.theirs(text="look\n<video>\nwhat", videos=[stacked(frames)], return_tensors="pt")
    request = await ours(model, "look\n", video_part(frames, times(frames)), "\nwhat")
    assert request.prompt_token_ids == given["input_ids"][0].tolist()
    (feature,) = request.mm_features
    assert feature.length <= model.family.max_tokens("video")
    row = request.prompt_token_ids[feature.offset]
    assert feature.num_embeds == request.prompt_token_ids.count(row)


async def test_videos_stand_beside_images(model: Model) -> None:
    frames, image = frames_of(3, 50, 40), make_image(70, 40)
    token = model.family.placeholder("image")
    given = model.theirs(text=f"a{token}b<video>c", images=[[image]], videos=[stacked(frames)], return_tensors="pt")
    request = await ours(model, "a", image_part(image), "b", video_part(frames, times(frames)), "c")
    assert request.prompt_token_ids == given["input_ids"][0].tolist()
    assert [feature.modality for feature in request.mm_features] == ["image", "video"]


def test_pixels_are_nearly_those_of_transformers(model: Model) -> None:
    for size, most in (((SIDE, SIDE), 0), ((50, 40), 40)):
        frames = frames_of(3, *size)
        item = model.processor.video(frames, times(frames), {})
        given = model.theirs.video_processor(
            [stacked(frames)], do_rescale=False, do_normalize=False, return_tensors="np"
        )["pixel_values_videos"]
        pixels = to_array(item.data["pixel_values_videos"])
        assert pixels.dtype == np.uint8
        difference = np.abs(pixels.astype(np.float32) - np.asarray(given, dtype=np.float32))
        assert difference.max() <= most
        assert difference.mean() < 1.0
        assert model.family.described("video", item.data) == item


def test_frames_are_bounded_and_arguments_known(model: Model) -> None:
    frames = frames_of(40, 20, 20)
    assert model.processor.video(frames, times(frames), {}).layout == (32,)
    assert model.processor.video(frames, times(frames), {"num_frames": 3}).layout == (3,)
    with pytest.raises(
        ValueError, match=r"processor_kwargs\.size is set; the model's processor accepts fps, num_frames"
    ):
        model.processor.video(frames, times(frames), {"size": {"height": 9, "width": 9}})
