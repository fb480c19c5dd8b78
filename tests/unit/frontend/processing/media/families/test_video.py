"""Videos of the Qwen-VL and GLM families: tokens and grids as transformers' own processors make them, pixels nearly theirs."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

from penstock_common.config.settings import Reread
from penstock_common.types.media import TensorData
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.call_types import GenerateRequest, MixedPrompt, Part
from penstock_frontend.config import FairnessConfig, LimitsConfig, ModelConfig
from penstock_frontend.processing.media.families.base import Family, FamilyProcessor
from penstock_frontend.processing.media.families.checkpoint import load_family
from penstock_frontend.processing.media.families.tensors import to_array
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.tokenizer import load_model_files
from tests.fakes.multimodal_models import make_image, save_multimodal_model
from tests.fakes.prepared_media import InProcessPreparer, image_part, video_part

GLM = ("glm4v", "glm46v")
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", *GLM)
AROUND = (("<|vision_start|>", "<|vision_end|>"), ("<|begin_of_video|>", "<|end_of_video|>"))
"""Tokens around videos of Qwen's models, and of GLM's models."""
FRAMES = (2, 3, 4, 5, 8)
FAST, ALL = 12, 200


class Model(NamedTuple):
    name: str
    family: Family
    processor: FamilyProcessor
    inputs: InputProcessor
    theirs: Any


@pytest.fixture(scope="module", params=FAMILIES)
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
    yield Model(request.param, family, family.make_processor()(), inputs, load(folder))
    tokenizer.close()


def frames_of(count: int, width: int, height: int) -> list[Image.Image]:
    return [make_image(width, height, index) for index in range(count)]


async def ours(model: Model, *parts: Part) -> EngineCoreRequest:
    fields = tuple(f"parts[{i}]" for i in range(len(parts)))
    return await model.inputs.process(GenerateRequest(prompt=MixedPrompt(parts, fields)), "r")


def theirs(model: Model, text: str, videos: Sequence[Sequence[Image.Image]], fps: float, **more: Any) -> Any:
    arrays = [np.stack([np.asarray(frame) for frame in frames]) for frames in videos]
    metadata = [
        VideoMetadata(total_num_frames=len(each), fps=fps, frames_indices=list(range(len(each)))) for each in arrays
    ]
    kwargs = {"do_sample_frames": False, "video_metadata": metadata, "return_metadata": True}
    return model.theirs(text=text, videos=arrays, videos_kwargs=kwargs, return_tensors="pt", **more)


async def check(model: Model, count: int) -> None:
    rng = random.Random(47)
    for index in range(count):
        width, height = rng.randint(17, 120), rng.randint(17, 120)
        frames = frames_of(FRAMES[index % len(FRAMES)], width, height)
        fps = rng.choice((1.0, 2.0, 3.0, 0.7))
        timestamps = [i / fps for i in range(len(frames))]
        begin, end = AROUND[model.name in GLM]
        video = f"{begin}{model.theirs.video_token}{end}"
        given = theirs(model, f"look {video} and {video}\nwhat", [frames, frames[:2]], fps)
        request = await ours(
            model,
            f"look {begin}",
            video_part(frames, timestamps),
            f"{end} and {begin}",
            video_part(frames[:2], timestamps[:2]),
            f"{end}\nwhat",
        )
        assert request.prompt_token_ids == given["input_ids"][0].tolist(), (index, width, height, len(frames))
        places: list[int] = []
        for feature in request.mm_features:
            runs = [(run.start, run.count) for run in feature.embed_runs] or [(0, feature.length)]
            places += [feature.offset + start + i for start, length in runs for i in range(length)]
            assert feature.length <= model.family.max_tokens("video")
        token = model.theirs.image_token_id if model.name in GLM else model.theirs.video_token_id
        assert places == [i for i, each in enumerate(request.prompt_token_ids) if each == token]
        grids = [to_array(feature.data["video_grid_thw"])[0].tolist() for feature in request.mm_features]
        assert grids == given["video_grid_thw"].tolist()
        if model.name == "qwen2_5_vl":
            seconds = [float(to_array(feature.data["second_per_grid_ts"])[0]) for feature in request.mm_features]
            assert seconds == pytest.approx(np.asarray(given["second_per_grid_ts"]).tolist(), rel=1e-6)


async def test_tokens_and_grids_are_those_of_transformers(model: Model) -> None:
    await check(model, FAST)


@pytest.mark.slow
async def test_tokens_and_grids_are_those_of_transformers_for_many_videos(model: Model) -> None:
    await check(model, ALL)


def test_pixels_are_nearly_those_of_transformers(model: Model) -> None:
    """Torchvision resizes, too, in other steps of rounding; frames that keep their size are equal."""
    as_they_are = {"do_rescale": False, "do_normalize": False}
    for size, most in (((64, 48), 0), ((90, 70), 40)):
        frames = frames_of(5, *size)
        item = model.processor.video(frames, [float(i) for i in range(5)], {})
        given = theirs(model, model.theirs.video_token, [frames], 1.0, **as_they_are)["pixel_values_videos"].numpy()
        difference = np.abs(to_array(item.data["pixel_values_videos"]).astype(np.float32) - given)
        assert item.data["pixel_values_videos"].dtype == "uint8"
        assert difference.max() <= most
        assert difference.mean() < 1.0


async def test_images_and_videos_stand_in_one_prompt(model: Model) -> None:
    video, image = video_part(frames_of(4, 50, 50), [0.0, 0.5, 1.0, 1.5]), image_part(make_image(50, 50))
    request = await ours(model, "a", video, "b", image, "c", video)
    assert [feature.modality for feature in request.mm_features] == ["video", "image", "video"]
    assert request.mm_features[0].identifier == request.mm_features[2].identifier


def test_frames_are_sampled_as_a_request_asks(model: Model) -> None:
    frames, timestamps = frames_of(8, 40, 40), [i * 0.5 for i in range(8)]
    whole = model.processor.video(frames, timestamps, {})
    assert whole.layout[0] == 4
    four = model.processor.video(frames, timestamps, {"num_frames": 4})
    evenly = [0, 2, 5, 7]
    assert four == model.processor.video([frames[i] for i in evenly], [timestamps[i] for i in evenly], {})
    assert model.processor.video(frames, timestamps, {"fps": 1}) == four
    assert model.processor.video(frames_of(20, 40, 40), [float(i) for i in range(20)], {}).layout[0] == 4  # 8 at most


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_frames": 9}, "processor_kwargs.num_frames is 9; it must be from 1 to 8"),
        ({"fps": 0}, "processor_kwargs.fps is 0; it must be above 0"),
        ({"fps": "x" * 99}, "it must be above 0 and at most 1000"),
        ({"fps": 1, "num_frames": 2}, "fps and processor_kwargs.num_frames are both set"),
        ({"do_sample_frames": True}, "processor_kwargs.do_sample_frames is set"),
        ({"max_pixels": 10**9}, "processor_kwargs.max_pixels is 1000000000; it must be from 1"),
    ],
)
def test_other_arguments_are_refused(model: Model, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.processor.video(frames_of(4, 40, 40), [0.0, 1.0, 2.0, 3.0], kwargs)


def test_a_video_that_a_client_processed(model: Model) -> None:
    item = model.processor.video(frames_of(4, 40, 40), [0.0, 1.0, 2.0, 3.0], {})
    if model.name.startswith(("qwen3", "glm")):
        with pytest.raises(ValueError, match="does not contain the times of frames"):
            model.family.described("video", item.data)
        return
    assert model.family.described("video", item.data) == item
    grid = TensorData("int64", (1, 3), np.array([2, 4, 5], dtype=np.int64).tobytes())
    with pytest.raises(ValueError, match="4 x 5 patches cannot be divided"):
        model.family.described("video", {**item.data, "video_grid_thw": grid})


@pytest.mark.parametrize(("processor", "said"), [("Glm4vProcessor", "1"), ("Glm46VProcessor", "1.9 seconds")])
def test_the_processor_and_not_the_model_chooses_the_times_of_glm(processor: str, said: str, tmp_path: Path) -> None:
    """GLM-4.6V-Flash is a model of type glm4v."""
    save_multimodal_model("glm4v", tmp_path)
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps(settings | {"processor_class": processor}))
    tokenizer = load_model_files(ModelConfig(path=str(tmp_path)), num_threads=1).tokenizer
    family = load_family(tmp_path, tokenizer.literal)
    assert family is not None
    item = family.make_processor()().video(frames_of(4, 40, 40), [0.0, 1.0, 1.94, 3.0], {})
    assert family.replacements([item])[0].after == said
    tokenizer.close()


@pytest.mark.parametrize(("timestamps", "given"), [([], 0), ([0.0, 1e300], 2)])
def test_a_video_without_frames_or_without_end_is_refused(model: Model, timestamps: list[float], given: int) -> None:
    with pytest.raises(ValueError, match=f"the video has {given} frames"):
        model.processor.video(frames_of(given, 40, 40), timestamps, {"fps": 1000})


def test_frames_of_an_odd_shape_are_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="one side may be at most 200 times the other"):
        model.processor.video([make_image(4200, 20)] * 2, [0.0, 1.0], {})
