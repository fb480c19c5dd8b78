"""Images of every family: tokens as transformers' own processor makes them, tensors as its Pillow backend gives them."""

import math
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor
from transformers.models.smolvlm import processing_smolvlm as smolvlm

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
from tests.fakes.multimodal_items import WITHOUT_PILLOW
from tests.fakes.multimodal_models import IMAGE_FAMILIES, make_image, save_multimodal_model
from tests.fakes.prepared_media import InProcessPreparer, image_part

SIZES = [(1, 1), (32, 32), (64, 32), (33, 97), (7, 190), (200, 11), (96, 96), (300, 260), (1, 40)]
"""Widths and heights that are always tested, in addition to random ones."""
PIECES = ("", " ", "what", "\n", "\n\n", " of\n", "is 7", "<|im_start|>", ".\n\n\n", "und ä")
FAST, ALL = 24, 200
NARROW = {
    *("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
    *("llava_next", "llava_onevision", "idefics3", "smolvlm"),
    *("glm4v", "glm46v", "qwen2_5_omni", "qwen3_omni_moe", "paddleocr_vl"),
}
"""Take no image that is 30 times as wide as high, or are not made for it."""
TOGETHER = {
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "internvl",
    "aya_vision",
    "gemma3",
    "llama4",
    *("glm4v", "glm46v", "qwen2_5_omni", "qwen3_omni_moe", "paddleocr_vl"),
}
"""Have patches or tiles of all images in the first dimension."""
GEMMA4 = ("gemma4", "gemma4_unified")
"""Have patches of each image in the first two dimensions, with padding behind them in transformers."""


class Model(NamedTuple):
    name: str
    folder: Path
    family: Family
    processor: FamilyProcessor
    theirs: Any


ALIKE = ("glm4v_moe", "glm_ocr")
"""Model types with the processors of other types."""


@pytest.fixture(scope="module", params=[name for name in IMAGE_FAMILIES if name not in ALIKE])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name, folder = request.param, tmp_path_factory.mktemp("models") / request.param
    save_multimodal_model(name, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    family = load_family(folder, lambda text: list(backend.encode(text, add_special_tokens=False).ids))
    assert family is not None
    theirs_of_smolvlm: Any = smolvlm
    if theirs_of_smolvlm.num2words is None:
        theirs_of_smolvlm.num2words = str  # counts frames of videos, which are not looked at here
    load: Any = AutoProcessor.from_pretrained
    theirs, load = load(folder), AutoImageProcessor.from_pretrained
    theirs.image_processor = load(folder, backend="torchvision" if name in WITHOUT_PILLOW else "pil")
    return Model(name, folder, family, family.make_processor()(), theirs)


@pytest.fixture
def inputs(model: Model) -> Iterator[InputProcessor]:
    tokenizer = load_model_files(ModelConfig(path=str(model.folder)), num_threads=1).tokenizer
    limits, fairness = Reread(LimitsConfig()), Reread(FairnessConfig())
    media = InProcessPreparer(model.family)
    yield InputProcessor(tokenizer, {}, model_name="demo", limits=limits, fairness=fairness, media=media)
    tokenizer.close()


@cache
def picture(width: int, height: int) -> Image.Image:
    return make_image(width, height, width * 1000 + height)


def size(model: Model, index: int, rng: random.Random) -> tuple[int, int]:
    if index < len(SIZES):
        width, height = SIZES[index]
        return (width, height) if model.name not in NARROW else (max(width, 24), max(height, 24))
    return rng.randint(24, 260), rng.randint(24, 260)


async def ours(inputs: InputProcessor, texts: list[str], images: list[Image.Image]) -> EngineCoreRequest:
    parts: list[Part] = [texts[0]]
    for image, text in zip(images, texts[1:], strict=True):
        parts += [image_part(image), text]
    kept = tuple(part for part in parts if part)
    fields = tuple(f"parts[{i}]" for i in range(len(kept)))
    request = GenerateRequest(prompt=MixedPrompt(kept, fields), add_special_tokens=True)
    return await inputs.process(request, "r")


def their_ids(model: Model, texts: list[str], images: list[Image.Image]) -> list[int]:
    token = model.family.placeholder("image")
    # One list of images for each prompt: a flat list is as many prompts' to some processors.
    return [int(i) for i in model.theirs(text=token.join(texts), images=[images])["input_ids"][0]]


async def check_tokens(model: Model, inputs: InputProcessor, count: int) -> None:
    rng = random.Random(47)
    for index in range(count):
        images = [picture(*size(model, index + i, rng)) for i in range(rng.choice((1, 1, 1, 2, 3)))]
        texts = [rng.choice(PIECES) for _ in images] + ["what"]
        request = await ours(inputs, texts, images)
        assert request.prompt_token_ids == their_ids(model, texts, images), (index, texts, [i.size for i in images])
        check_places(model, request, len(images))


def check_places(model: Model, request: EngineCoreRequest, count: int) -> None:
    """Rows stand at the model's own image tokens, and all of them have rows."""
    named = model.theirs.tokenizer if model.name in ("gemma3", *GEMMA4) else model.theirs
    token = named.image_token_id
    if model.name == "llama4":  # its image token stands before the whole image
        token = named.tokenizer.convert_tokens_to_ids(named.img_patch_token)
    places: list[int] = []
    for feature in request.mm_features:
        runs = feature.embed_runs or ()
        for start, length in [(run.start, run.count) for run in runs] or [(0, feature.length)]:
            places += range(feature.offset + start, feature.offset + start + length)
        assert feature.length <= model.family.max_tokens("image")
        assert not runs or (runs[0].start == 0 and runs[-1].start + runs[-1].count == feature.length)
    assert places == [i for i, each in enumerate(request.prompt_token_ids) if each == token]
    assert len(request.mm_features) == count


async def test_tokens_are_those_of_transformers(model: Model, inputs: InputProcessor) -> None:
    await check_tokens(model, inputs, FAST)


@pytest.mark.slow
async def test_tokens_are_those_of_transformers_for_many_images(model: Model, inputs: InputProcessor) -> None:
    await check_tokens(model, inputs, ALL)


def test_tensors_are_those_of_the_pillow_backend(model: Model) -> None:
    rng = random.Random(48)
    for index in range(FAST):
        image = picture(*size(model, index, rng))
        item = model.processor.image(image, {})
        kwargs = {"return_tensors": "np", "do_rescale": False, "do_normalize": False}
        if model.name in ("internvl", "aya_vision"):
            kwargs["crop_to_patches"] = True  # as their processors say
        if model.name in ("llava_pixtral", "mistral3"):
            kwargs["patch_size"] = model.theirs.patch_size * model.theirs.spatial_merge_size
        theirs = model.theirs.image_processor(images=[image], **kwargs)
        data = {**item.data, **model.family.replacements([item])[0].data}
        data.pop("pixel_values_of_square", None)  # replaces other tensors, which are present as well
        for_processors = {"num_crops", "num_patches", "num_soft_tokens_per_image"}
        assert set(data) == set(theirs) - for_processors
        for name, tensor in data.items():
            assert same(model, to_array(tensor), np.asarray(theirs[name])), (name, image.size)
        assert item.data["pixel_values"].dtype == "uint8"


def same(model: Model, found: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> bool:
    """Return whether tensors are equal. Those of Gemma 4 have no padding. torchvision and Pillow round some resized pixels
    differently, after each of two directions.
    """
    if model.name in GEMMA4:
        padding = theirs[:, found.shape[1] :]
        theirs = theirs[:, : found.shape[1]]
        assert ((padding == 0) | (padding == -1)).all()
    if model.name in WITHOUT_PILLOW:
        differences = np.abs(found - theirs.astype(np.int64))
        return (
            bool(differences.max() <= 2 and (differences > 1).mean() < 0.001)
            if found.dtype == np.uint8
            else not differences.any()
        )
    return np.array_equal(found, theirs)


async def test_tensors_of_several_images_are_those_of_each(model: Model, inputs: InputProcessor) -> None:
    """The processor gives the same tensors for a prompt with several images, apart from padding after the
    normalization.
    """
    images = [picture(90, 60), picture(40, 120), picture(64, 64)]
    request = await ours(inputs, ["a", "b", "c", "d"], images)
    kwargs = {"return_tensors": "np", "do_rescale": False, "do_normalize": False}
    if model.name in ("internvl", "aya_vision"):
        kwargs["crop_to_patches"] = True
    if model.name in ("llava_pixtral", "mistral3"):
        kwargs["patch_size"] = model.theirs.patch_size * model.theirs.spatial_merge_size
    theirs = model.theirs.image_processor(images=[images] if model.name == "llava_onevision" else images, **kwargs)
    together, taken = np.asarray(theirs["pixel_values"]), 0
    for index, feature in enumerate(request.mm_features):
        pixels = to_array(feature.data["pixel_values"])
        if model.name in ("idefics3", "smolvlm"):  # tiles of a prompt's images, one after the other
            expected = together[:, taken : taken + pixels.shape[1]]
            taken += pixels.shape[1]
        elif model.name in TOGETHER:
            expected = together[taken : taken + len(pixels)]
            taken += len(pixels)
        else:
            expected = together[index : index + 1][tuple(slice(0, length) for length in pixels.shape)]
        assert same(model, pixels, expected), (index, pixels.shape)


def test_what_a_client_processed_is_the_same_item(model: Model) -> None:
    item = model.processor.image(picture(90, 60), {})
    data = {**item.data, **model.family.replacements([item])[0].data}
    if data.pop("pixel_values_of_square", None) is not None:
        item = msgspec.structs.replace(item, data=data)
    if model.name in ("idefics3", "smolvlm"):  # facts that its tensors do not show
        data |= {
            name: TensorData("int64", (1, 1), number.to_bytes(8, "little"))
            for name, number in zip(("rows", "cols"), item.layout, strict=True)
        }
    assert model.family.described("image", data) == item


@pytest.mark.parametrize("change", ["missing", "shape", "dtype", "more"])
def test_tensors_that_the_model_does_not_take_are_refused(model: Model, change: str) -> None:
    data = dict(model.processor.image(picture(90, 60), {}).data)
    data.pop("pixel_values_of_square", None)
    pixels = data.pop("pixel_values")
    if change == "shape":
        data["pixel_values"] = TensorData(pixels.dtype, (*pixels.shape, 1), pixels.data)
    elif change == "dtype":
        data["pixel_values"] = TensorData("int64", pixels.shape, bytes(8 * math.prod(pixels.shape)))
    elif change == "more":
        data |= {"pixel_values": pixels, "input_ids": TensorData("int64", (1,), bytes(8))}
    names = {
        "missing": "pixel_values is missing",
        "shape": "pixel_values has shape",
        "dtype": "pixel_values is int64",
        "more": "input_ids is not an input",
    }
    if model.name in ("idefics3", "smolvlm") and change != "more":
        names[change] = "rows is missing"
    with pytest.raises(ValueError, match=names[change]):
        model.family.described("image", data)


async def test_an_image_of_onevision_is_another_item_beside_others(model: Model, inputs: InputProcessor) -> None:
    if model.name != "llava_onevision":
        assert (
            len(
                {
                    (await ours(inputs, ["a"] * (n + 1), [picture(90, 60)] * n)).mm_features[0].identifier
                    for n in (1, 2, 3)
                }
            )
            == 1
        )
        return
    one, two, three = [(await ours(inputs, ["a"] * (n + 1), [picture(90, 60)] * n)).mm_features for n in (1, 2, 3)]
    assert len({feature.identifier for feature in (*two, *three)}) == 1
    assert one[0].identifier != two[0].identifier
    beside = model.family.described("image", two[0].data)
    assert model.family.replacements([beside, beside])[0].data == two[0].data
    with pytest.raises(ValueError, match="processed as the only image of its prompt"):
        model.family.replacements([model.family.described("image", one[0].data)] * 2)


def test_embeddings_take_the_place_of_an_image_where_they_say_how_it_is_laid_out(model: Model) -> None:
    rows = model.processor.image(picture(90, 60), {}).num_embeds
    embeds = {"embeds": TensorData("float32", (rows, 2), bytes(rows * 8))}
    if model.name in ("llava", "llava_siglip", "gemma3", "llava_next", "internvl", *GEMMA4):
        item = model.family.described("image", embeds)
        assert (item.num_embeds, item.data) == (rows, embeds)
        assert model.family.replacements([item])[0].num_embeds == rows
        most = model.family.max_tokens("image")
        with pytest.raises(ValueError, match=f"embeds has {most + 1} rows; it must have"):
            model.family.described("image", {"embeds": TensorData("float32", (most + 1, 2), bytes(most * 8 + 8))})
    else:
        with pytest.raises(ValueError, match="embeds does not define the image's layout"):
            model.family.described("image", embeds)
